"""Matrix scaling: exponentiate once, then every closure is a matrix-vector product.

The log kernel is first divided by its largest entries along one axis, then along the other, so
that every row and every column of the exponentiated kernel has an entry 1 and none is larger.
What this form cannot represent (a sum that falls below ``FLOOR``, where entries lost to underflow
could begin to matter, or a value that is not finite) is noticed, and the log domain takes over:
``lax.cond`` on one scalar a call, so no wrong answer leaves and nothing is computed twice.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import closures

FLOOR = 1e-14
"""Smallest sum that is trusted: an entry lost to underflow (below 1.2e-38) then carries at most
1.2e-38 / FLOOR**2, about 1e-10, of any row or column."""


class Scaled(NamedTuple):
    """A plan ``row_i matrix_ij column_j`` and whether it may be trusted.

    ``matrix (..., N, M)``, ``row (..., N)``, ``column (..., M)``, ``ok`` a scalar bool.
    """

    matrix: jax.Array
    row: jax.Array
    column: jax.Array
    ok: jax.Array

    def weights(self) -> jax.Array:
        """A ``(..., N, M)``."""
        return self.row[..., :, None] * self.matrix * self.column[..., None, :]

    def mix(self, values: jax.Array, precision=None) -> jax.Array:
        """``A @ values``: ``(..., M, d)`` to ``(..., N, d)``, without forming A."""
        values = self.column[..., None] * values
        mixed = jnp.einsum("...nm,...md->...nd", self.matrix, values, precision=precision)
        return self.row[..., None] * mixed


def scale(
    kernel: jax.Array, scaling: jax.Array, *, side: str, num_steps: int, log_target
) -> Scaled:
    """``num_steps >= 1`` closures from the log scaling ``scaling`` on ``side``.

    Arguments as ``closures.finish``, whose result is ``scale(...).weights()``.
    """
    start = kernel + jnp.expand_dims(scaling, closures.AXIS[closures.OTHER[side]])
    matrix, near, active = exponentiate(start, closures.AXIS[side])
    target = {"query": jnp.exp(log_target), "key": jnp.ones((), kernel.dtype)}
    near, far, ok = _loop(side, num_steps, matrix, near, target, active)
    row, column = (near, far) if side == "query" else (far, near)
    return Scaled(matrix, row, column, one_for_all(jax.lax.stop_gradient(ok) > 0))


_TOTALS = {"query": "...nm,...n->...m", "key": "...nm,...m->...n"}


def _total(matrix, x, at):
    """Sums of the matrix weighted by ``x`` on side ``at``: a vector of the other side."""
    return jnp.einsum(_TOTALS[at], matrix, x, precision=jax.lax.Precision.HIGHEST)


def _totals(matrix, stacked, at):
    """``_total`` for a leading axis of vectors, as one matrix product."""
    into, out = _TOTALS[at].split("->")
    into = into.replace(",...", ",t...")
    return jnp.einsum(f"{into}->t{out}", matrix, stacked, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _loop(side, num_steps, matrix, near, target, active):
    """``(near, far, ok)`` after the closures; see ``_loop_jvp`` for its derivative.

    ``ok`` is 1 or 0 in the kernel's dtype: under ``shard_map`` a bool would have no tangent type.
    """
    return _run(side, num_steps, matrix, near, target, active)[0]


def _run(side, num_steps, matrix, near, target, active):
    """The loop, and the scalings before each half-step, stacked by pair of half-steps."""
    floor = jnp.asarray(FLOOR, matrix.dtype)
    other = closures.OTHER[side]

    def step(x, at):
        total, alive = _total(matrix, x, at), active[closures.OTHER[at]]
        safe = jnp.maximum(jnp.where(alive, total, jnp.ones_like(total)), floor)
        result = jnp.where(alive, target[at] / safe, jnp.zeros_like(total))
        return result, jnp.all((total > floor) | ~alive)

    def pair(state, _):
        near, _, ok = state
        far, first = step(near, side)
        after, second = step(far, other)
        return (after, far, ok & first & second), (near, far, after)

    far = jnp.zeros_like(matrix[..., 0, :] if side == "query" else matrix[..., 0])
    state = (near, far, jnp.all(jnp.isfinite(near)))
    state, steps = jax.lax.scan(pair, state, None, length=num_steps // 2)
    if num_steps % 2:
        near, _, ok = state
        far, last = step(near, side)
        state = (near, far, ok & last)
    return (*state[:2], state[2].astype(matrix.dtype)), steps


@_loop.defjvp
def _loop_jvp(side, num_steps, primals, tangents):
    """Tangents by the recursion ``dy = -(y^2 / target) (dK x + K dx)`` of every half-step.

    All products with dK are two matrix products before the loop, so that the transpose, reverse
    mode, forms dK by two matrix products after its loop and carries vectors only.
    """
    matrix, _, target, _ = primals
    d_matrix, d_near = tangents[:2]
    (out_near, out_far, ok), (nears, fars, afters) = _run(side, num_steps, *primals)
    other = closures.OTHER[side]
    slope = lambda y, at: -y * (y / target[at])
    pushed_far = _totals(d_matrix, nears, side)
    pushed_near = _totals(d_matrix, fars, other)

    def pair(state, step):
        d_near, _ = state
        far, after, to_far, to_near = step
        d_far = slope(far, side) * (to_far + _total(matrix, d_near, side))
        d_near = slope(after, other) * (to_near + _total(matrix, d_far, other))
        return (d_near, d_far), None

    state = (d_near, jnp.zeros_like(out_far))
    state, _ = jax.lax.scan(pair, state, (fars, afters, pushed_far, pushed_near))
    if num_steps % 2:
        pushed = _total(d_matrix, out_near, side) + _total(matrix, state[0], side)
        state = (state[0], slope(out_far, side) * pushed)
    return (out_near, out_far, ok), (*state, jnp.zeros_like(ok))


def exponentiate(start: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, dict]:
    """The kernel with its peaks divided out, first along ``axis``.

    Returns:
      ``(matrix, near, active)``: the exponentiated kernel ``(..., N, M)`` with entries in 0..1;
      the scalings that stand for the second peaks; and for each side which tokens have an entry.
    """
    other = -1 if axis == -2 else -2
    first, alive = _peak(start, axis)
    start = start - first
    second, own = _peak(start, other)
    far, near = ("key", "query") if axis == -2 else ("query", "key")
    active = {far: jnp.squeeze(alive, axis), near: jnp.squeeze(own, other)}
    return jnp.exp(start - second), jnp.squeeze(jnp.exp(second), other), active


def _peak(x, axis):
    peak = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    alive = peak != -jnp.inf
    return jnp.where(alive, peak, jnp.zeros_like(peak)), alive


@jax.custom_batching.custom_vmap
def one_for_all(ok: jax.Array) -> jax.Array:
    """The same scalar bool; under ``vmap`` all examples share one answer, so one branch runs."""
    return ok


@one_for_all.def_vmap
def _all(axis_size, batched, ok):
    del axis_size
    return (jnp.all(ok) if batched[0] else ok), False
