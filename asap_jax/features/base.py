"""What every feature family shares: the register of names, concatenation and evaluation.

A family is a ``flax.struct`` dataclass with

- ``family(q, k, *, scale, query_valid, key_valid)``: centred features ``(..., N, F)``;
- ``family.num_features(head_dim)``: F;
- ``Family.create(rng, head_dim, *, num_slices, slice_kind)``: a new one for a compile, where it
  can be made before any data are seen (optional);
- ``family.linear(coefficients, tokens)``: the features' linear combination ``(..., N)``, up to a
  constant per problem, where there is a cheaper way to it than the features (optional). ``tokens``
  are checked ``Tokens``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.problem import Tokens
from asap_jax.scores import accumulation_dtype, resolve_scale

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
    if not isinstance(families, tuple):
        given = checks.describe(families)
        raise TypeError(f"{name} must be a tuple of feature families, got {given}")
    for family in families:
        if isinstance(family, type) or not callable(family):
            given = family.__name__ if isinstance(family, type) else checks.describe(family)
            raise TypeError(
                f"{name} must hold feature families, for instance asap_jax.Moments(), got {given}"
            )


def check_tokens(
    q: Any, k: Any, scale: float | None = None, query_valid: Any = None, key_valid: Any = None
) -> Tokens:
    """The arguments of a family as Tokens: one accumulation dtype, scale and validities resolved.

    Raises:
      ValueError: shapes that do not fit, ``scale <= 0``; TypeError: dtypes that are not real
        floating.
    """
    q, k = checks.real_array("q", q), checks.real_array("k", k)
    checks.heads_last_dim(q, k)
    dtype = accumulation_dtype(q, k)
    scale = resolve_scale(scale, q.shape[-1])
    query_valid = checks.optional_validity("query_valid", query_valid, q[..., 0])
    key_valid = checks.optional_validity("key_valid", key_valid, k[..., 0])
    return Tokens(q.astype(dtype), k.astype(dtype), scale, query_valid, key_valid)


def concatenate(families: tuple[Any, ...], tokens: Tokens) -> jax.Array:
    """All features of ``families`` side by side, ``(..., N, F)``."""
    columns = [_features(family, tokens) for family in families]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1)


def evaluate(families: tuple[Any, ...], head: Any, tokens: Tokens) -> jax.Array:
    """``head`` on the features of ``families``: ``(..., N)``, up to a constant per problem.

    Under a linear head, families that can combine their features more cheaply do so.
    """
    coefficients = getattr(head, "coefficients", None)
    if coefficients is None or not any(hasattr(family, "linear") for family in families):
        return head(concatenate(families, tokens))
    widths = [family.num_features(tokens.own.shape[-1]) for family in families]
    if coefficients.shape[-1] != sum(widths):
        # The head raises an error that names both shapes.
        return head(concatenate(families, tokens))
    ends = itertools.accumulate(widths)
    parts = [coefficients[..., end - n : end] for end, n in zip(ends, widths, strict=True)]
    terms = [
        family.linear(part, tokens)
        if hasattr(family, "linear")
        else type(head)(part)(_features(family, tokens))
        for family, part in zip(families, parts, strict=True)
    ]
    return functools.reduce(operator.add, terms)


def _features(family: Any, t: Tokens) -> jax.Array:
    return family(t.own, t.other, scale=t.scale, query_valid=t.own_valid, key_valid=t.other_valid)
