"""Expected sliced transport plans: one plan for each slice, averaged by cost.

Each slice sorts the projections of queries and keys and matches ranks, which gives a plan Gamma_l
``(..., N, M)`` of cost ``c_l = sum_ij D_ij Gamma_l,ij``. The result is the average of the plans
with weights proportional to ``exp(-T (c_l - min c))``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks, masks
from asap_jax.baselines import softsort
from asap_jax.features import directions as slices


class Support(NamedTuple):
    """The active tokens, and how their ranks are matched.

    Attributes:
      query, key: bool ``(..., N)`` and ``(..., M)``; None if all are active.
      coupling: of ranks ``(..., N, M)``, see ``rank_coupling``; None to match equal ranks.
    """

    query: jax.Array | None = None
    key: jax.Array | None = None
    coupling: jax.Array | None = None


class Slices(NamedTuple):
    """Projections and distances, and how plans are made and averaged.

    Attributes:
      a, b: projections of queries ``(L, ..., N)`` and keys ``(L, ..., M)``.
      distance: ``(..., N, M)``.
      sharpness: of SoftSort, the inverse of its temperature, ``(...)``.
      inverse_temperature: T of the average, ``(...)``.
    """

    a: jax.Array
    b: jax.Array
    distance: jax.Array
    sharpness: jax.Array
    inverse_temperature: jax.Array


def project(x: jax.Array, directions: ArrayLike | None, valid: jax.Array | None) -> jax.Array:
    """Projections ``(L, ..., N)`` of ``x (..., N, d)``; its coordinates when directions is None.

    Before other directions, the mean of the valid tokens is subtracted, for smaller rounding errors
    and the same order.

    Raises:
      ValueError: directions of another width or rank.
    """
    if directions is None:
        return jnp.moveaxis(x, -1, 0)
    directions = checks.real_array("directions", directions)
    if directions.ndim != 2 or directions.shape[0] == 0 or directions.shape[1] != x.shape[-1]:
        raise ValueError(
            f"directions of shape {directions.shape} must be (L, {x.shape[-1]}) to fit the head_dim"
        )
    unit = slices.unit_rows(directions.astype(x.dtype))
    x = x - masks.token_mean(x, valid)
    return jnp.einsum("...nd,ld->l...n", x, unit, precision=jax.lax.Precision.HIGHEST)


@jax.custom_jvp
@jax.jit
def distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """Euclidean distances ``(..., N, M)``; the derivative at distance 0 is 0.

    Sums of squared differences are accurate for close tokens, and compile into one pass that stores
    no differences. The derivative is written as products of ``(N, d)`` and ``(M, d)`` matrices,
    because automatic reverse mode would store all N M d differences.
    """
    return jnp.sqrt(jnp.sum(jnp.square(x[..., :, None, :] - y[..., None, :, :]), axis=-1))


@distances.defjvp
def _distances_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    distance = distances(x, y)
    apart = distance > 0
    inverse = jnp.where(apart, 1 / jnp.where(apart, distance, jnp.ones_like(distance)), 0.0)
    common = y.mean(-2, keepdims=True)
    x, y = x - common, y - common
    product = functools.partial(
        jnp.einsum, "...nd,...md->...nm", precision=jax.lax.Precision.HIGHEST
    )
    own = jnp.sum(x * dx, -1)[..., :, None] + jnp.sum(y * dy, -1)[..., None, :]
    return distance, inverse * (own - product(dx, y) - product(x, dy))


def soft_plan(
    a: jax.Array, b: jax.Array, sharpness: jax.Array, support: Support, harden: bool, precision: Any
) -> jax.Array:
    """The relaxed plan ``(..., N, M)`` of one slice: both soft permutations, joined by rank.

    ``a (..., N)`` and ``b (..., M)`` are the projections on the slice.
    """
    rows = softsort.soft_permutation(a, support.query, sharpness, harden=harden)
    columns = softsort.soft_permutation(b, support.key, sharpness, harden=harden)
    if support.coupling is not None:
        columns = jnp.matmul(support.coupling, columns, precision=precision)
    return jnp.einsum("...rn,...rm->...nm", rows, columns, precision=precision)


def plan_cost(distance: jax.Array, plan: jax.Array) -> jax.Array:
    """``sum_ij D_ij Gamma_ij``, ``(...)``."""
    return jnp.sum(distance * plan, axis=(-2, -1))


def dense_soft_plan(x: Slices, support: Support, harden: bool, precision: Any) -> jax.Array:
    """The average of the relaxed plans, with all plans ``(L, ..., N, M)`` in memory."""
    plan = lambda a, b: soft_plan(a, b, x.sharpness, support, harden, precision)
    plans = jax.vmap(plan)(x.a, x.b)
    costs = jax.vmap(plan_cost, in_axes=(None, 0))(x.distance, plans)
    weights = jax.nn.softmax(-x.inverse_temperature[None] * costs, axis=0)
    return jnp.sum(weights[..., None, None] * plans, axis=0)


def streaming_soft_plan(x: Slices, support: Support, harden: bool, precision: Any) -> jax.Array:
    """The value of ``dense_soft_plan``, computed one slice at a time.

    The sum so far is rescaled when the minimum of the costs changes, so each plan is made once and
    dropped. Reverse mode stores the result and the costs and makes each plan again. Only the
    projections need memory that grows with L. There is no forward-mode derivative.
    """
    # Under shard_map a cotangent is sharded as the problems are, so its primal must have the same
    # sharding, even if, for instance, the keys are replicated.
    zero = jnp.zeros_like(x.distance[..., 0, 0])[None, ..., None]
    return _streaming(x._replace(a=x.a + zero, b=x.b + zero), support, harden, precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _streaming(x, support, harden, precision):
    return _streaming_forward(x, support, harden, precision)[0]


def _streaming_forward(x: Slices, support: Support, harden, precision) -> tuple[jax.Array, tuple]:
    def add(carry, projections):
        least, total, mean = carry
        plan = soft_plan(*projections, x.sharpness, support, harden, precision)
        cost = plan_cost(x.distance, plan)
        lower = jnp.minimum(least, cost)
        drop = jnp.where(least == jnp.inf, jnp.zeros_like(least), least - lower)
        old = jnp.exp(-x.inverse_temperature * drop)
        new = jnp.exp(-x.inverse_temperature * (cost - lower))
        mean = old[..., None, None] * mean + new[..., None, None] * plan
        return (lower, old * total + new, mean), cost

    zero = jnp.zeros_like(x.distance[..., 0, 0])
    start = (jnp.full_like(zero, jnp.inf), zero, jnp.zeros_like(x.distance))
    (least, total, mean), costs = jax.lax.scan(add, start, (x.a, x.b))
    mean = mean / total[..., None, None]
    weights = jnp.exp(-x.inverse_temperature[None] * (costs - least[None])) / total[None]
    return mean, (x, support, costs, weights, mean)


def _streaming_backward(harden, precision, saved, pulled):
    x, support, costs, weights, mean = saved
    expected = jnp.sum(pulled * mean, axis=(-2, -1))

    def add(carry, slices):
        d_distance, d_sharpness = carry
        a, b, weight = slices
        make = lambda a, b, sharpness: soft_plan(a, b, sharpness, support, harden, precision)
        plan, pull = jax.vjp(make, a, b, x.sharpness)
        gain = jnp.sum(pulled * plan, axis=(-2, -1))
        d_cost = -x.inverse_temperature * weight * (gain - expected)
        d_plan = weight[..., None, None] * pulled + d_cost[..., None, None] * x.distance
        d_a, d_b, d_k = pull(d_plan)
        carry = (d_distance + d_cost[..., None, None] * plan, d_sharpness + d_k)
        return carry, (d_a, d_b, gain)

    start = (jnp.zeros_like(x.distance), jnp.zeros_like(x.sharpness))
    (d_distance, d_sharpness), (d_a, d_b, gain) = jax.lax.scan(add, start, (x.a, x.b, weights))
    # d weight_l / dT = -weight_l (c_l - mean c), the mean under the weights.
    lag = costs - jnp.sum(weights * costs, axis=0, keepdims=True)
    d_inverse_temperature = -jnp.sum(weights * lag * gain, axis=0)
    return Slices(d_a, d_b, d_distance, d_sharpness, d_inverse_temperature), None


_streaming.defvjp(_streaming_forward, _streaming_backward)


def hard_plan(x: Slices, support: Support) -> jax.Array:
    """The average of exact matchings of equal ranks, by a stable argsort of each slice.

    Each matching is an index vector, so no other array has the size of ``distance`` and the result.
    Differentiable in ``distance`` and ``inverse_temperature`` only: a matching is piecewise
    constant. If the numbers of active queries and keys differ, ranks without a partner give 0.
    """
    queries, keys = (
        jax.vmap(softsort.ranked, in_axes=(0, None))(projections, valid)
        for projections, valid in ((x.a, support.query), (x.b, support.key))
    )
    size = min(queries.shape[-1], keys.shape[-1])
    queries, keys = queries[..., :size], keys[..., :size]
    used = jnp.ones_like(queries[0], bool)
    rank = jax.lax.broadcast_to_rank(jnp.arange(size), used.ndim)
    for valid in (support.query, support.key):
        used = used if valid is None else used & (rank < valid.sum(-1, keepdims=True))
    match = jnp.vectorize(_match, signature="(n,m),(l,r),(l,r),(r),()->(n,m)")
    front = lambda indices: jnp.moveaxis(indices, 0, -2)
    return match(x.distance, front(queries), front(keys), used, x.inverse_temperature)


def _match(distance, queries, keys, used, inverse_temperature) -> jax.Array:
    """The plan of one problem: distance ``(N, M)``, indices ``(L, R)``, used ranks ``(R,)``."""
    length = distance[queries, keys]
    cost = jnp.sum(jnp.where(used[None], length, jnp.zeros_like(length)), axis=-1)
    weight = jax.nn.softmax(-inverse_temperature * cost)[:, None]
    weight = jnp.where(used[None], weight, jnp.zeros_like(weight))
    return jnp.zeros_like(distance).at[queries, keys].add(weight)
