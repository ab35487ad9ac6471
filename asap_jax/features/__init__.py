"""Feature families: what a dual is predicted from.

A family is a ``flax.struct`` dataclass that owns its arrays; called as
``family(q, k, *, scale, query_valid, key_valid)`` it gives centred features ``(..., N, F)`` for
the side of its first argument. ``register`` gives it the name it is saved under: a new family is
one file of its own (``asap_jax.features.base`` says what it has).
"""

from __future__ import annotations

from asap_jax.features.base import (
    FAMILIES,
    check_families,
    check_tokens,
    concatenate,
    evaluate,
    register,
)
from asap_jax.features.codebook import Codebook
from asap_jax.features.moments import Moments
from asap_jax.features.sliced import RankDisplacement, RawProjections, SlicedPotentials

__all__ = [
    "FAMILIES",
    "Codebook",
    "Moments",
    "RankDisplacement",
    "RawProjections",
    "SlicedPotentials",
    "check_families",
    "check_tokens",
    "concatenate",
    "evaluate",
    "register",
]
