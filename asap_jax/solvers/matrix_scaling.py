"""Matrix scaling: exponentiate once, then every closure is a matrix-vector product.

Where the norms of queries and keys show that no entry can leave ``exp(+-REACH)``, the log kernel is
exponentiated as it is. Elsewhere it is first divided by its largest entries along one axis, then
along the other, so that every row and every column has an entry 1 and none is larger. What this
form cannot represent (a sum outside ``FLOOR`` and ``CEILING``, where entries or derivatives lost to
underflow could begin to matter, or a value that is not finite) is noticed, and the log domain takes
over: ``plans.read`` chooses by ``lax.cond`` on scalars, and no wrong answer leaves.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax.solvers import log_domain
from asap_jax.solvers.kernel import Kernel

REACH = 32.0
"""Largest exponent of an entry that is taken as it is, start included: sums stay within limits."""
FLOOR = 1e-14
"""Smallest sum that is trusted: an entry lost to underflow (below 1.2e-38) then carries at most
1.2e-38 / FLOOR**2, about 1e-10, of any row or column."""
CEILING = 1e18
"""Largest sum that is trusted: the square of its inverse, which derivatives take, is 1e-36."""


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


def fits(kernel: Kernel, scaling: jax.Array, *, side: str) -> jax.Array:
    """Whether the kernel under ``scaling`` on ``side`` can be exponentiated as it is; ``()``."""
    low, high = _range(scaling, kernel.active()[side])
    spread = jnp.max(jnp.where(low <= high, high - low, jnp.zeros_like(low)), initial=0)
    return one_for_all(jax.lax.stop_gradient(kernel.reach() + spread / 2) <= REACH)


def scale(
    kernel: Kernel,
    scaling: jax.Array,
    *,
    side: str,
    num_steps: int,
    log_target,
    divided: bool = True,
) -> Scaled:
    """``num_steps >= 1`` closures from the log scaling ``scaling`` on ``side``.

    Arguments as ``closures.finish``, but for the kernel, which is not made yet; the result of that
    is ``scale(...).weights()``. ``divided`` says whether peaks are divided out first; without that,
    the kernel has to be one that ``fits``. A single step can be trusted either way.
    """
    matrix, near = exponentiate(side, divided, kernel, scaling)
    target = {"query": jnp.exp(log_target), "key": jnp.ones((), matrix.dtype)}
    near, far, ok = _loop(side, num_steps, matrix, near, target, kernel.active())
    row, column = (near, far) if side == "query" else (far, near)
    return Scaled(matrix, row, column, jax.lax.stop_gradient(ok) > 0)


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
    floor, ceiling = (jnp.asarray(x, matrix.dtype) for x in (FLOOR, CEILING))
    other = log_domain.OTHER[side]

    def step(x, at):
        total, alive = _total(matrix, x, at), active[log_domain.OTHER[at]]
        safe = jnp.maximum(jnp.where(alive, total, jnp.ones_like(total)), floor)
        result = jnp.where(alive, target[at] / safe, jnp.zeros_like(total))
        return result, jnp.all(((total > floor) & (total < ceiling)) | ~alive)

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
    other = log_domain.OTHER[side]
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def exponentiate(
    side: str, divided: bool, kernel: Kernel, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The kernel under the log scaling ``start`` of ``side``, as ``(matrix, near)``.

    It is ``matrix_ij near_i`` (``near_j`` for ``side="key"``), up to factors of the other side and
    one of the problem. ``matrix (..., N, M)``; ``near``, of the shape of ``start``, is 0 at
    tokens without an entry.
    """
    active = kernel.active()[side]
    if divided:
        matrix, near = _peaks_divided_out(side, kernel.log(), start)
    else:
        low, high = _range(start, active)
        middle = jnp.where(low <= high, (low + high) / 2, jnp.zeros_like(low))
        matrix = jnp.exp(kernel.log())
        near = jnp.exp(jnp.where(active, start - middle, jnp.zeros_like(start)))
    return matrix, jnp.where(active, near, jnp.zeros_like(near))


@exponentiate.defjvp
def _exponentiate_jvp(side, divided, primals, tangents):
    """All of the start's tangent is in ``near``: factors of a side can be on either of the two."""
    kernel, start = primals
    matrix, near = exponentiate(side, divided, kernel, start)
    _, d_log = jax.jvp(Kernel.log, (kernel,), tangents[:1])
    return (matrix, near), (matrix * d_log, near * tangents[1])


def _range(x, active):
    """Smallest and largest of the active ``x`` ``(..., n)``, axis kept; inf and -inf of none."""
    of = lambda reduce, other: reduce(jnp.where(active, x, other), -1, keepdims=True)
    return of(jnp.min, jnp.inf), of(jnp.max, -jnp.inf)


def _peaks_divided_out(side: str, log_kernel: jax.Array, start: jax.Array):
    """As ``exponentiate``, with entries in 0..1 and a 1 in every row and column that has any."""
    axis = log_domain.AXIS[side]
    other = log_domain.AXIS[log_domain.OTHER[side]]
    log_kernel = log_kernel + jnp.expand_dims(start, other)
    log_kernel = log_kernel - _peak(log_kernel, axis)
    second = _peak(log_kernel, other)
    return jnp.exp(log_kernel - second), jnp.exp(jnp.squeeze(second, other))


def _peak(x: jax.Array, axis: int) -> jax.Array:
    peak = jnp.max(x, axis=axis, keepdims=True)
    return jnp.where(peak == -jnp.inf, jnp.zeros_like(peak), peak)


@jax.custom_batching.custom_vmap
def one_for_all(ok: jax.Array) -> jax.Array:
    """The same scalar bool; under ``vmap`` all examples share one answer, so one branch runs."""
    return ok


@one_for_all.def_vmap
def _all(axis_size, batched, ok):
    del axis_size
    return (jnp.all(ok) if batched[0] else ok), False
