"""Feature families: what a dual is predicted from.

A family is a ``flax.struct`` dataclass that owns its arrays; called as
``family(q, k, *, scale, query_valid, key_valid)`` it gives centred features ``(..., N, F)`` in
cost units for the side of its first argument. ``register`` gives it the name it is saved under.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax.potentials import sliced_potentials

FAMILIES: dict[str, type] = {}


def register(name: str):
    """Class decorator: makes a feature family known to artefacts under ``name``."""

    def add(cls):
        FAMILIES[name] = cls
        cls.family = name
        return cls

    return add


@register("sliced_potentials")
@flax.struct.dataclass
class SlicedPotentials:
    """Exact sliced Kantorovich potentials (paper, section "One-Dimensional Sliced Potentials").

    Attributes:
      directions: ``(L, d)`` slice bank.
      outside: ``"extend"`` or ``"zero"``, see ``sliced_potentials``.
    """

    directions: jax.Array
    outside: str = flax.struct.field(pytree_node=False, default="extend")

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None) -> jax.Array:
        """Centred potentials ``(..., N, L)`` of the side of ``q``, see ``sliced_potentials``."""
        return sliced_potentials(
            q,
            k,
            self.directions,
            scale=scale,
            query_valid=query_valid,
            key_valid=key_valid,
            outside=self.outside,
        )


def concatenate(
    families: tuple[Any, ...], q, k, *, scale=None, query_valid=None, key_valid=None
) -> jax.Array:
    """All features of ``families`` side by side, ``(..., N, F)``."""
    columns = [
        family(q, k, scale=scale, query_valid=query_valid, key_valid=key_valid)
        for family in families
    ]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1)
