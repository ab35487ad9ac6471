"""Feature families: functions of queries and keys from which a dual is predicted.

``asap_jax.features.base`` describes a family; to add one, write a file here.
"""

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
