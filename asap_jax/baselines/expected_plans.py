"""Expected sliced transport plans: one plan a slice, averaged by cost.

Each slice sorts the projections of queries and keys and matches ranks, which gives a plan Gamma_l
``(..., N, M)`` of cost ``c_l = sum_ij D_ij Gamma_l,ij``. The result is the average of the plans
under weights ``exp(-T (c_l - min c))``. Projections carry the slices in front: ``(L, ..., N)``.
``sharpness`` (of SoftSort) and ``inverse_temperature`` (T) have one value a problem: ``(...)``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import checks, masks
from asap_jax.baselines import softsort
from asap_jax.features import directions as slices


class Support(NamedTuple):
    """Which tokens take part; every field may be None.

    Attributes:
      query, key: bool ``(..., N)`` and ``(..., M)``; None for all.
      coupling: of ranks ``(..., N, M)``, see ``rank_coupling``; None for equal ranks.
    """

    query: jax.Array | None = None
    key: jax.Array | None = None
    coupling: jax.Array | None = None


def project(x: jax.Array, directions, valid: jax.Array | None) -> jax.Array:
    """Projections ``(L, ..., N)`` of ``x (..., N, d)``: its coordinates when directions is None.

    Other directions project the distances from the mean of the active tokens: sorting does not
    see a shift, rounding does.

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

    They are sums of squared differences, accurate for close tokens, and compiled into one pass
    that keeps no difference. The derivative is written as products of ``(N, d)`` and ``(M, d)``
    matrices: left to itself, reverse mode keeps all N M d differences.
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


def soft_plan(a, b, support: Support, sharpness, *, harden: bool, precision) -> jax.Array:
    """The relaxed plan of one slice: the soft permutations of both sides, joined by rank.

    ``a (..., N)``, ``b (..., M)`` to ``(..., N, M)``.
    """
    rows = softsort.soft_permutation(a, support.query, sharpness, harden=harden)
    columns = softsort.soft_permutation(b, support.key, sharpness, harden=harden)
    if support.coupling is not None:
        columns = jnp.matmul(support.coupling, columns, precision=precision)
    return jnp.einsum("...rn,...rm->...nm", rows, columns, precision=precision)


def plan_cost(distance: jax.Array, plan: jax.Array) -> jax.Array:
    """``sum_ij D_ij Gamma_ij``, ``(...)``."""
    return jnp.sum(distance * plan, axis=(-2, -1))


def dense_soft_plan(
    a, b, distance, support: Support, sharpness, inverse_temperature, harden, precision
) -> jax.Array:
    """The averaged relaxed plan with the plans of all slices in memory, ``(L, ..., N, M)``."""
    one = lambda a, b: soft_plan(a, b, support, sharpness, harden=harden, precision=precision)
    plans = jax.vmap(one)(a, b)
    costs = jax.vmap(plan_cost, in_axes=(None, 0))(distance, plans)
    weights = jax.nn.softmax(-inverse_temperature[None] * costs, axis=0)
    return jnp.sum(weights[..., None, None] * plans, axis=0)


def streaming_soft_plan(
    a, b, distance, support: Support, sharpness, inverse_temperature, harden, precision
) -> jax.Array:
    """The averaged relaxed plan, one slice at a time; same value as ``dense_soft_plan``.

    A running minimum of the costs rescales what has been summed, so each plan is made once and
    dropped. Reverse mode keeps the result and the costs and makes each plan once more:
    ``dA/dGamma_l`` and ``dA/dc_l`` need nothing else. Memory does not grow with L but for the
    projections. Forward mode is not defined; use ``dense_soft_plan``.
    """
    # Under shard_map a cotangent is sharded as the problems are: so must what it belongs to be,
    # also where, say, the keys came in replicated.
    zero = jnp.zeros_like(distance[..., 0, 0])[None, ..., None]
    return _streaming(
        a + zero, b + zero, distance, support, sharpness, inverse_temperature, harden, precision
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _streaming(a, b, distance, support, sharpness, inverse_temperature, harden, precision):
    return _streaming_forward(
        a, b, distance, support, sharpness, inverse_temperature, harden, precision
    )[0]


def _streaming_forward(
    a, b, distance, support, sharpness, inverse_temperature, harden, precision
) -> tuple[jax.Array, tuple]:
    def add(carry, projections):
        least, total, mean = carry
        plan = soft_plan(*projections, support, sharpness, harden=harden, precision=precision)
        cost = plan_cost(distance, plan)
        lower = jnp.minimum(least, cost)
        drop = jnp.where(least == jnp.inf, jnp.zeros_like(least), least - lower)
        old = jnp.exp(-inverse_temperature * drop)
        new = jnp.exp(-inverse_temperature * (cost - lower))
        mean = old[..., None, None] * mean + new[..., None, None] * plan
        return (lower, old * total + new, mean), cost

    none = jnp.zeros_like(distance[..., 0, 0])
    start = (jnp.full_like(none, jnp.inf), none, jnp.zeros_like(distance))
    (least, total, mean), costs = jax.lax.scan(add, start, (a, b))
    mean = mean / total[..., None, None]
    weights = jnp.exp(-inverse_temperature[None] * (costs - least[None])) / total[None]
    return mean, (a, b, distance, support, sharpness, inverse_temperature, costs, weights, mean)


def _streaming_backward(harden, precision, saved, pulled):
    a, b, distance, support, sharpness, inverse_temperature, costs, weights, mean = saved
    make = functools.partial(soft_plan, harden=harden, precision=precision)
    expected = jnp.sum(pulled * mean, axis=(-2, -1))

    def add(carry, slices):
        d_distance, d_sharpness = carry
        a, b, weight = slices
        plan, pull = jax.vjp(lambda a, b, k: make(a, b, support, k), a, b, sharpness)
        gain = jnp.sum(pulled * plan, axis=(-2, -1))
        d_cost = -inverse_temperature * weight * (gain - expected)
        d_plan = weight[..., None, None] * pulled + d_cost[..., None, None] * distance
        d_a, d_b, d_k = pull(d_plan)
        carry = (d_distance + d_cost[..., None, None] * plan, d_sharpness + d_k)
        return carry, (d_a, d_b, gain)

    start = (jnp.zeros_like(distance), jnp.zeros_like(sharpness))
    (d_distance, d_sharpness), (d_a, d_b, gain) = jax.lax.scan(add, start, (a, b, weights))
    # d weight_l / dT = -weight_l (c_l - mean c), the mean under the weights.
    lag = costs - jnp.sum(weights * costs, axis=0, keepdims=True)
    d_inverse_temperature = -jnp.sum(weights * lag * gain, axis=0)
    return d_a, d_b, d_distance, None, d_sharpness, d_inverse_temperature


_streaming.defvjp(_streaming_forward, _streaming_backward)


def hard_plan(a, b, distance, support: Support, inverse_temperature) -> jax.Array:
    """The averaged plan of exact matchings: equal ranks, by a stable argsort of each slice.

    Nothing larger than the result is made beside ``distance``: the L matchings are index vectors.
    Differentiable in ``distance`` only (a matching is piecewise constant). Where the numbers of
    active queries and keys differ, ranks without a partner give 0.
    """
    queries, keys = (
        jax.vmap(softsort.ranked, in_axes=(0, None))(x, valid)
        for x, valid in ((a, support.query), (b, support.key))
    )
    size = min(queries.shape[-1], keys.shape[-1])
    queries, keys = queries[..., :size], keys[..., :size]
    used = jnp.ones_like(queries[0], bool)
    rank = jnp.arange(size).reshape((1,) * (used.ndim - 1) + (size,))
    for valid in (support.query, support.key):
        used = used if valid is None else used & (rank < valid.sum(-1, keepdims=True))
    match = jnp.vectorize(_match, signature="(n,m),(l,r),(l,r),(r),()->(n,m)")
    front = lambda x: jnp.moveaxis(x, 0, -2)
    return match(distance, front(queries), front(keys), used, inverse_temperature)


def _match(distance, queries, keys, used, inverse_temperature) -> jax.Array:
    """One problem: ``distance (N, M)``, matched index pairs ``(L, R)``, ranks in use ``(R,)``."""
    length = distance[queries, keys]
    cost = jnp.sum(jnp.where(used[None], length, jnp.zeros_like(length)), axis=-1)
    weight = jax.nn.softmax(-inverse_temperature * cost)[:, None]
    weight = jnp.where(used[None], weight, jnp.zeros_like(weight))
    return jnp.zeros_like(distance).at[queries, keys].add(weight)
