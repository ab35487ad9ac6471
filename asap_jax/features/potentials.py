"""Exact one-dimensional Kantorovich potentials on slices (paper, eq. sliced_source_potential)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import ArrayLike

from asap_jax import checks, masks
from asap_jax.features import sorting
from asap_jax.features.base import check_tokens
from asap_jax.features.directions import unit_rows
from asap_jax.problem import Tokens

OUTSIDE = ("extend", "zero")


def potential_1d(a: jax.Array, b: jax.Array, a_valid: jax.Array, b_valid: jax.Array) -> jax.Array:
    """Source potential of the monotone matching under the cost ``(a - b)^2 / 2``.

    The potential is ``a^2 / 2 - phi(a)`` up to a constant, where phi is convex and piecewise
    linear. Its slope after the t-th sorted valid query is the key quantile ``b_(ceil(t m / n))``,
    which is ``b_(t)`` for n = m, the paper's formula. It is ``b_(1)`` before the first query and
    ``b_(m)`` after the last.

    The increments ``(a_(t+1) - a_(t)) ((a_(t+1) + a_(t)) / 2 - slope_t)`` are summed, because they
    do not change when a and b are shifted together. The potential is evaluated at every a, valid or
    not. Equal entries of a get equal values, so ties do no harm.

    Args:
      a: query projections ``(N,)``; b: key projections ``(M,)``.
      a_valid, b_valid: bool ``(N,)``, ``(M,)``: the support, n and m entries.

    Returns:
      ``(N,)``; 0 everywhere when n or m is 0.
    """
    line = _monotone(a, b, a_valid, b_valid)
    knots, slopes = line.knots, line.slopes
    steps = jnp.diff(knots) * (0.5 * (knots[1:] + knots[:-1]) - slopes[:-1])
    heights = jnp.concatenate([jnp.zeros_like(knots[:1]), jnp.cumsum(steps)])
    value = heights[line.at] + (a - knots[line.at]) * (0.5 * (a + knots[line.at]) - line.slope)
    return jnp.where(line.nonempty, value, jnp.zeros_like(value))


def displacement_1d(
    a: jax.Array, b: jax.Array, a_valid: jax.Array, b_valid: jax.Array
) -> jax.Array:
    """``a`` minus its key in the monotone matching; arguments as ``potential_1d``.

    Returns ``(N,)``, the derivative of the potential: ``a_(r) - b_(r)`` at the r-th sorted query
    for n = m. Equal entries of a all get the key of the last one.
    """
    line = _monotone(a, b, a_valid, b_valid)
    value = a - line.slope
    return jnp.where(line.nonempty, value, jnp.zeros_like(value))


class _Monotone(NamedTuple):
    """The convex function of a monotone matching.

    knots ``(N,)``: the sorted support; slopes ``(N,)``: the slope after each knot; at ``(N,)``: the
    index of the last knot <= a, or 0; slope ``(N,)``: the slope at each a; nonempty: n, m > 0.
    """

    knots: jax.Array
    slopes: jax.Array
    at: jax.Array
    slope: jax.Array
    nonempty: jax.Array


def _monotone(a, b, a_valid, b_valid) -> _Monotone:
    for length in (a.shape[0], b.shape[0]):
        if not isinstance(length, int):  # jax.export with a symbolic length
            raise ValueError(
                f"sliced features sort the tokens, so their number must be known: export with a "
                f"length in place of {length}, or compile with fit='moments'"
            )
    n, m = a_valid.sum(dtype=jnp.uint32), b_valid.sum(dtype=jnp.uint32)
    knots = _sorted_support(a, a_valid, n)
    keys = _sorted_support(b, b_valid, m)
    t = jnp.arange(1, a.shape[0] + 1, dtype=jnp.uint32)
    one = jnp.uint32(1)
    quantile = (jnp.minimum(t, n) * m + n - one) // jnp.maximum(n, one)
    slopes = keys[jnp.maximum(quantile, one) - one]
    after = jnp.searchsorted(knots, a, side="right")
    at = jnp.maximum(after - 1, 0)
    return _Monotone(
        knots, slopes, at, jnp.where(after == 0, keys[0], slopes[at]), (n > 0) & (m > 0)
    )


def _sorted_support(x: jax.Array, valid: jax.Array, count: jax.Array) -> jax.Array:
    """The valid entries in ascending order, padded with the last one; all 0 without any."""
    ordered = sorting.ascending(jnp.where(valid, x, jnp.inf))
    last = ordered[jnp.maximum(count, jnp.uint32(1)) - jnp.uint32(1)]
    last = jnp.where(count > 0, last, jnp.zeros_like(last))
    return jnp.where(jnp.arange(x.shape[0], dtype=jnp.uint32) < count, ordered, last)


def sliced_potentials(
    q: ArrayLike,
    k: ArrayLike,
    directions: ArrayLike,
    *,
    scale: float | None = None,
    query_valid: ArrayLike | None = None,
    key_valid: ArrayLike | None = None,
    outside: str = "extend",
) -> jax.Array:
    """Sliced source potentials X_Theta(Q, K), centred over the valid queries, in cost units.

    Paper, eq. sliced_projections and sliced_source_potential, for any N and M and masked supports.
    Projections are multiplied by ``sqrt(scale)``. For a key-side dual swap q and k.

    Args:
      q: queries ``(..., N, d)``; k: keys ``(..., M, d)``.
      directions: ``(L, d)``; rows are normalised to unit length.
      scale: score scale > 0; ``1 / sqrt(d)`` when None.
      query_valid, key_valid: bool, broadcasting to ``(..., N)`` and ``(..., M)``: the supports.
      outside: ``"extend"`` evaluates the same potential at the invalid queries, ``"zero"`` gives
        them 0.

    Returns:
      ``(..., N, L)`` in float32; in float64 if q or k is float64.

    Raises:
      TypeError: dtypes that are not real floating.
      ValueError: shapes that do not fit, ``scale <= 0``, an unknown ``outside``.
    """
    return potentials(check_tokens(q, k, scale, query_valid, key_valid), directions, outside)


def potentials(tokens: Tokens, directions: ArrayLike, outside: str) -> jax.Array:
    """``sliced_potentials`` of checked tokens."""
    checks.one_of("outside", outside, OUTSIDE)
    x = sliced_features(potential_1d, tokens, directions)
    return masks.zero_inactive(x, tokens.own_valid) if outside == "zero" else x


def _automatic(function: Callable[..., jax.Array], like: jax.Array) -> Callable[..., jax.Array]:
    """``function``, with explicit mesh axes made automatic and its result sharded as ``like``.

    Sorting and gathers have no rules for explicit shardings.
    """
    sharding = jax.typeof(like).sharding
    axes = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in axes if kind == AxisType.Explicit)
    if not explicit:
        return function
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=sharding)


def sliced_features(
    function_1d: Callable[..., jax.Array], tokens: Tokens, directions: ArrayLike
) -> jax.Array:
    """``function_1d(a, b, a_valid, b_valid)`` on every slice, centred over the valid queries.

    Directions ``(L, d)``, result ``(..., N, L)`` and errors as ``sliced_potentials``.
    """
    q, k, scale, query_valid, key_valid, _ = tokens
    directions = checks.real_array("directions", directions)
    if directions.ndim != 2 or directions.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"directions of shape {directions.shape} must be (L, {q.shape[-1]}) to "
            f"fit q of shape {q.shape}"
        )
    if q.shape[-2] == 0 or k.shape[-2] == 0:
        raise ValueError(f"q of shape {q.shape} and k of shape {k.shape} must hold a token")
    query_valid = checks.validity("query_valid", query_valid, q[..., 0])
    key_valid = checks.validity("key_valid", key_valid, k[..., 0])

    # Potentials do not change when q and k are shifted together; without the shift float32 would.
    common = masks.token_mean(k, key_valid)
    k = masks.zero_inactive(k - common, key_valid)
    q = q - common
    bank = math.sqrt(scale) * unit_rows(directions.astype(q.dtype))
    project = functools.partial(jnp.einsum, "...nd,ld->...ln", precision=jax.lax.Precision.HIGHEST)
    over_slices = jax.vmap(function_1d, in_axes=(0, 0, None, None))
    every = jnp.vectorize(over_slices, signature="(l,n),(l,m),(n),(m)->(l,n)")
    a, b = project(q, bank), project(k, bank)
    x = _automatic(every, a)(a, b, query_valid, key_valid)
    return jnp.swapaxes(masks.center(x, query_valid[..., None, :]), -1, -2)
