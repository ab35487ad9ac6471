"""Feature families: registration, concatenation and evaluation.

A family is a ``flax.struct`` dataclass, registered under the name with which it is saved, with

- ``family(q, k, *, scale, query_valid, key_valid)``: centred features ``(..., N, F)`` of the
  tokens q, as arrays or in ``from_tokens``, see ``Family``;
- ``family.num_features(head_dim)``: F;
- ``create(rng, head_dim, *, num_slices, slice_kind)``, optional: a class method that makes the
  family of a compile, before any data are seen;
- ``family.linear(coefficients, tokens)``, optional: a cheaper way to compute the features times
  the coefficients, ``(..., N)``, up to a constant per problem;
- ``family.adds_up``, optional: True if ``linear`` only takes sums over tokens, by the functions of
  ``devices``, so that it works on tokens shared by several devices.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks
from asap_jax.problem import Tokens
from asap_jax.scores import accumulation_dtype

FAMILIES: dict[str, type] = {}
_Class = TypeVar("_Class", bound=type)


def register(name: str) -> Callable[[_Class], _Class]:
    """Class decorator that registers a feature family under ``name``, for files and options."""

    def add(cls):
        FAMILIES[name] = cls
        cls.family = name
        return cls

    return add


class Family:
    """Base class of the built-in families."""

    def __call__(
        self,
        q: ArrayLike,
        k: ArrayLike,
        *,
        scale: float | None = None,
        query_valid: ArrayLike | None = None,
        key_valid: ArrayLike | None = None,
    ) -> jax.Array:
        """Centred features ``(..., N, F)`` of the tokens q; for the key side swap q and k.

        Raises:
          ValueError: shapes that do not fit; TypeError: dtypes that are not real floating.
        """
        return self.from_tokens(check_tokens(q, k, scale, query_valid, key_valid))

    def from_tokens(self, tokens: Tokens) -> jax.Array:
        """Centred features ``(..., N, F)`` of the own side of checked tokens."""
        raise NotImplementedError  # every family defines this or its own __call__


def check_families(name: str, families: Any) -> None:
    """Raises TypeError unless ``families`` is a tuple of feature families."""
    if not isinstance(families, tuple):
        wrong = checks.describe(families)
        raise TypeError(f"{name} must be a tuple of feature families, got {wrong}")
    for family in families:
        if isinstance(family, type) or not callable(family):
            wrong = family.__name__ if isinstance(family, type) else checks.describe(family)
            raise TypeError(
                f"{name} must hold feature families, for instance asap_jax.Moments(), got {wrong}"
            )


def check_tokens(
    q: Any, k: Any, scale: float | None = None, query_valid: Any = None, key_valid: Any = None
) -> Tokens:
    """The arguments of a family, checked, as Tokens of one accumulation dtype.

    Raises:
      ValueError: shapes that do not fit, ``scale <= 0``.
      TypeError: dtypes that are not real floating.
    """
    q, k = checks.real_array("q", q), checks.real_array("k", k)
    checks.heads_last_dim(q, k)
    dtype = accumulation_dtype(q, k)
    scale = checks.score_scale(scale, q.shape[-1])
    query_valid = checks.optional_validity("query_valid", query_valid, q[..., 0])
    key_valid = checks.optional_validity("key_valid", key_valid, k[..., 0])
    return Tokens(q.astype(dtype), k.astype(dtype), scale, query_valid, key_valid)


def concatenate(families: tuple[Any, ...], tokens: Tokens) -> jax.Array:
    """All features of ``families`` side by side, ``(..., N, F)``."""
    columns = [_features(family, tokens) for family in families]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1)


def evaluate(families: tuple[Any, ...], head: Any, tokens: Tokens) -> jax.Array:
    """``head`` on the features of ``families``: ``(..., N)``, up to a constant per problem.

    With a linear head, families that have a method ``linear`` use it.
    """
    coefficients = getattr(head, "coefficients", None)
    if tokens.axis_name is not None:
        _check_adds_up(families, tokens.axis_name, coefficients)
    if coefficients is None or not any(hasattr(family, "linear") for family in families):
        return head(concatenate(families, tokens))
    widths = [family.num_features(tokens.own.shape[-1]) for family in families]
    heads = tokens.own.shape[-3] if tokens.own.ndim > 2 else None
    if coefficients.shape not in ((sum(widths),), (heads, sum(widths))):
        return head(concatenate(families, tokens))  # raises an error that names both shapes
    ends = itertools.accumulate(widths)
    parts = [coefficients[..., end - n : end] for end, n in zip(ends, widths, strict=True)]
    terms = [
        family.linear(part, tokens)
        if hasattr(family, "linear")
        else type(head)(part)(_features(family, tokens))
        for family, part in zip(families, parts, strict=True)
    ]
    return functools.reduce(operator.add, terms)


def _check_adds_up(families: tuple[Any, ...], axis_name: str, coefficients: Any) -> None:
    for family in families:
        if coefficients is None or not getattr(family, "adds_up", False):
            raise ValueError(
                f"axis_name={axis_name!r} needs features that add up over devices and a linear "
                f"head, got {type(family).__name__}: compile with fit='moments'"
            )


def _features(family: Any, t: Tokens) -> jax.Array:
    return family(t.own, t.other, scale=t.scale, query_valid=t.own_valid, key_valid=t.other_valid)
