"""What every feature family shares: the register of names, concatenation and evaluation.

A family is a ``flax.struct`` dataclass with

- ``family(q, k, *, scale, query_valid, key_valid)``: centred features ``(..., N, F)``;
- ``family.num_features(head_dim)``: F;
- ``Family.create(rng, head_dim, *, num_slices, slice_kind)``: a new one for a compile, where it
  can be made before any data are seen (optional);
- ``family.linear(coefficients, q, k, ...)``: the features' linear combination ``(..., N)``, up to
  a constant per problem, where there is a cheaper way to it than the features (optional).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.features import directions

FAMILIES: dict[str, type] = {}


def register(name: str):
    """Class decorator: makes a feature family known to artefacts and options under ``name``."""

    def add(cls):
        FAMILIES[name] = cls
        cls.family = name
        return cls

    return add


def check_families(name: str, families: Any) -> None:
    """Raises TypeError unless ``families`` is a tuple of feature families."""
    checks.instance(name, families, tuple, "a tuple of feature families")
    for family in families:
        if isinstance(family, type) or not callable(family):
            given = family.__name__ if isinstance(family, type) else checks.told(family)
            raise TypeError(
                f"{name} must hold feature families, for instance asap_jax.Moments(), got {given}"
            )


class Sliced:
    """What families on a bank of slices share; they own ``directions (L, d)``."""

    @classmethod
    def create(cls, rng, head_dim: int, *, num_slices: int = 32, slice_kind: str = "gaussian"):
        """The family on a new bank of ``num_slices`` directions."""
        return cls(directions.slice_directions(rng, num_slices, head_dim, kind=slice_kind))

    def num_features(self, head_dim: int) -> int:
        """L, whatever the width of a head."""
        del head_dim
        return self.directions.shape[-2]


def concatenate(
    families: tuple[Any, ...], q, k, *, scale=None, query_valid=None, key_valid=None
) -> jax.Array:
    """All features of ``families`` side by side, ``(..., N, F)``."""
    columns = [
        family(q, k, scale=scale, query_valid=query_valid, key_valid=key_valid)
        for family in families
    ]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1)


def evaluate(
    families: tuple[Any, ...], head: Any, q, k, *, scale=None, query_valid=None, key_valid=None
) -> jax.Array:
    """``head`` on the features of ``families``: ``(..., N)``, up to a constant per problem.

    Under a linear head, families that can combine their features more cheaply do so.
    """
    tokens = dict(scale=scale, query_valid=query_valid, key_valid=key_valid)
    folds = [hasattr(family, "linear") for family in families]
    if not any(folds) or not hasattr(head, "coefficients"):
        return head(concatenate(families, q, k, **tokens))
    widths = [family.num_features(q.shape[-1]) for family in families]
    total, start = None, 0
    if head.coefficients.shape[-1] != sum(widths):
        return head(concatenate(families, q, k, **tokens))  # which names both shapes
    for family, fold, width in zip(families, folds, widths, strict=True):
        part = head.coefficients[..., start : start + width]
        start += width
        if fold:
            value = family.linear(part, q, k, **tokens)
        else:
            value = type(head)(part)(family(q, k, **tokens))
        total = value if total is None else total + value
    return total
