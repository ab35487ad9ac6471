"""Matrix scaling: exponentiate once, then every closure is a matrix-vector product.

If the norms of queries and keys show that every entry lies within ``exp(+-REACH)``, the log kernel
is exponentiated unchanged. Otherwise the peaks of one axis and then of the other are divided out,
so that every row and every column has an entry 1 and none is larger.

A single row closure of a short input is softmax attention and is computed as such.

The result is checked: a sum outside ``FLOOR`` and ``CEILING`` means that underflow may matter for
the weights or their derivatives. Then, and for values that are not finite, ``lax.cond`` switches to
the log domain, so an untrusted result is never returned.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import devices
from asap_jax.problem import Problem
from asap_jax.scores import largest_score
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import AXIS, OTHER, Closures

SMALL = 2**17
"""Largest number of kernel entries of a problem that is computed as softmax attention. At 512
tokens XLA's single pass takes 8 or 18 ms, differently in every process; the other way takes 9."""
REACH = 32.0
"""Largest absolute exponent, start included, that is exponentiated without dividing peaks out."""
FLOOR = 1e-14
"""Smallest trusted sum. An entry lost to underflow (below 1.2e-38) is then at most
1.2e-38 / FLOOR**2, about 1e-10, of any row or column."""
CEILING = 1e18
"""Largest trusted sum. Derivatives need the square of its inverse, 1e-36."""


class Scaled(NamedTuple):
    """A plan ``row_i matrix_ij column_j``; the scalar bool ``ok`` says if it can be trusted.

    ``matrix (..., N, M)``, ``row (..., N)``, ``column (..., M)``.
    """

    matrix: jax.Array
    row: jax.Array
    column: jax.Array
    ok: jax.Array

    def weights(self) -> jax.Array:
        """A ``(..., N, M)``."""
        return self.row[..., :, None] * self.matrix * self.column[..., None, :]

    def mix(self, values: jax.Array, precision: Any = None) -> jax.Array:
        """``A @ values``: ``(..., M, d)`` to ``(..., N, d)``, without forming A."""
        values = self.column[..., None] * values
        mixed = jnp.einsum("...nm,...md->...nd", self.matrix, values, precision=precision)
        return self.row[..., None] * mixed


def apply(p: Problem, start: jax.Array, log_target: jax.Array, closures: Closures) -> jax.Array:
    """As ``log_domain.apply``, by matrix-vector products where they can be trusted."""
    if is_small_softmax(p, closures):
        return log_domain.apply(p, start, log_target, closures)
    # XLA drops axes of size 1 from a product, and writes the exponentials over it only if they have
    # its shape; otherwise it stores a second array of all scores.
    ones = [i for i, n in enumerate(p.score_shape[:-2]) if isinstance(n, int) and n == 1]
    drop = lambda x: jnp.squeeze(x, ones) if x.ndim else x
    out = _apply(jax.tree.map(drop, p), drop(start), drop(log_target), closures)
    return jnp.expand_dims(out, ones)


def _apply(p: Problem, start: jax.Array, log_target: jax.Array, closures: Closures) -> jax.Array:
    """``apply`` of problems without axes of size 1."""

    @jax.checkpoint
    def by_scaling():
        scaled = run(p, start, log_target, closures)
        return scaled.weights() if p.v is None else scaled.mix(p.v, p.precision), scaled.ok

    out, ok = by_scaling()
    if closures.num_steps == 1:  # a single step can be trusted either way
        return out
    # checkpoint: compute the log kernel again there rather than store a second large array.
    log = jax.checkpoint(lambda: log_domain.apply(p, start, log_target, closures))
    return jax.lax.cond(shared_across_vmap(ok), lambda: out, log)


def is_small_softmax(p: Problem, closures: Closures) -> bool:
    """Whether XLA on CPUs may compute the closures in one pass: softmax attention, short inputs.

    For longer inputs that pass is slower than exponentials and products one after the other.
    """
    n, m = p.q.shape[-2], p.k.shape[-2]
    known = isinstance(n, int) and isinstance(m, int)
    one_row_closure = closures.side == "key" and closures.num_steps == 1
    return one_row_closure and not (known and n * m > SMALL)


def can_exponentiate(p: Problem, start: jax.Array, closures: Closures) -> jax.Array:
    """A scalar bool: whether the kernel with ``start`` can be exponentiated unchanged."""
    return shared_across_vmap(largest_exponent(p, start, closures) <= REACH)


def largest_exponent(p: Problem, start: jax.Array, closures: Closures) -> jax.Array:
    """An upper bound ``()`` of all entries of the log kernel with the centred ``start``."""
    low, high = _range(start, p.active(closures.side))
    spread = jnp.max(jnp.where(low <= high, high - low, jnp.zeros_like(low)), initial=0)
    largest = largest_score(p.q, p.k, p.scale, p.bias) / closures.epsilon + spread / 2
    return jax.lax.stop_gradient(largest)


def run(p: Problem, start: jax.Array, log_target: jax.Array, closures: Closures) -> Scaled:
    """The closures from ``start``; its ``weights()`` are ``log_domain.apply`` without values."""
    side, active = closures.side, {"query": p.active("query"), "key": p.active("key")}
    matrix, near = exponentiate(p, start, closures)
    near = jnp.where(active[side], near, jnp.zeros_like(near))
    target = {"query": jnp.exp(log_target), "key": jnp.ones((), matrix.dtype)}
    near, far, ok = _loop(side, closures.num_steps, matrix, near, target, active)
    row, column = (near, far) if side == "query" else (far, near)
    return Scaled(matrix, row, column, jax.lax.stop_gradient(ok) > 0)


_TOTALS = {"query": "...nm,...n->...m", "key": "...nm,...m->...n"}


def _total(matrix, x, at):
    """Sums of the matrix over side ``at``, weighted by the vector ``x`` of that side."""
    return jnp.einsum(_TOTALS[at], matrix, x, precision=jax.lax.Precision.HIGHEST)


def _totals(matrix, stacked, at):
    """``_total`` of every vector in ``stacked``, as one matrix product."""
    into, out = _TOTALS[at].split("->")
    into = into.replace(",...", ",t...")
    return jnp.einsum(f"{into}->t{out}", matrix, stacked, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _loop(side, num_steps, matrix, near, target, active):
    """The closures: the scalings ``near`` of ``side`` and ``far`` of the other side, and ``ok``.

    ``ok`` is 1 or 0 in the kernel's dtype: under ``shard_map`` a bool would have no tangent type.
    """
    return _run(side, num_steps, matrix, near, target, active)[0]


def _run(side, num_steps, matrix, near, target, active):
    """The result of ``_loop``, and the scalings of all pairs of half-steps, stacked."""
    floor, ceiling = (jnp.asarray(x, matrix.dtype) for x in (FLOOR, CEILING))
    other = OTHER[side]

    def step(x, at):
        total, alive = _total(matrix, x, at), active[OTHER[at]]
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
    if num_steps > 1:
        state, steps = jax.lax.scan(pair, state, None, length=num_steps // 2)
    else:  # jax.disable_jit runs no scan of length 0
        steps = tuple(jnp.zeros_like(x, shape=(0, *x.shape)) for x in (near, far, near))
    if num_steps % 2:
        near, _, ok = state
        far, last = step(near, side)
        state = (near, far, ok & last)
    return (*state[:2], state[2].astype(matrix.dtype)), steps


@_loop.defjvp
def _loop_jvp(side, num_steps, primals, tangents):
    """Tangents by the recursion ``dy = -(y^2 / target) (dK x + K dx)`` of every half-step.

    The products with dK of all steps are two matrix products before the loop. So the loop of
    reverse mode carries vectors only, and two matrix products after it give the cotangent of K.
    """
    matrix, _, target, _ = primals
    d_matrix, d_near = tangents[:2]
    (out_near, out_far, ok), (nears, fars, afters) = _run(side, num_steps, *primals)
    other = OTHER[side]
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
    if num_steps > 1:
        state, _ = jax.lax.scan(pair, state, (fars, afters, pushed_far, pushed_near))
    if num_steps % 2:
        pushed = _total(d_matrix, out_near, side) + _total(matrix, state[0], side)
        state = (state[0], slope(out_far, side) * pushed)
    return (out_near, out_far, ok), (*state, jnp.zeros_like(ok))


def exponentiate(p: Problem, start: jax.Array, closures: Closures) -> tuple[jax.Array, jax.Array]:
    """The kernel with the log scaling ``start`` of ``closures.side``, as ``(matrix, near)``.

    It equals ``matrix_ij near_i`` (``near_j`` for side ``"key"``) up to a scaling of the other
    side. ``matrix (..., N, M)``; ``near`` has the shape of ``start``.

    Only the peaks depend on a condition, so all that follows is compiled once.
    """
    side, products = closures.side, p.products
    own, other = AXIS[OTHER[side]], AXIS[side]
    start = centred_range(start, p.active(side))
    zeros = lambda products: tuple(jnp.zeros_like(products.take(0, at)) for at in (other, own))
    far, near = jax.lax.cond(
        can_exponentiate(p, start, closures),
        zeros,
        lambda products: _peaks(side, p.log_kernel(closures.epsilon, products), start),
        jax.lax.stop_gradient(products),
    )
    far, near = jax.lax.stop_gradient((far, near))
    log = p.log_kernel(closures.epsilon, products)
    log = log - jnp.expand_dims(near, own) - jnp.expand_dims(far, other)
    # The tangent of the start goes to ``near`` only, which gives the plan the same tangent.
    # At most REACH but for slices that are all masked, whose scaling only has to be finite.
    return jnp.exp(log), jnp.exp(jnp.minimum(start + near, REACH))


def _range(x: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Minimum and maximum ``(..., 1)`` of the active ``x (..., n)``; inf and -inf without any."""
    low = jnp.min(jnp.where(active, x, jnp.inf), -1, keepdims=True)
    return low, jnp.max(jnp.where(active, x, -jnp.inf), -1, keepdims=True)


def centred_range(start: jax.Array, active: jax.Array, axis_name: str | None = None) -> jax.Array:
    """``start`` minus the middle of its range, which leaves the plan unchanged; 0 if inactive."""
    low, high = jax.lax.stop_gradient(_range(start, active))
    low, high = devices.smallest(low, axis_name), devices.largest(high, axis_name)
    middle = jnp.where(low <= high, (low + high) / 2, jnp.zeros_like(low))
    return jnp.where(active, start - middle, jnp.zeros_like(start))


def _peaks(side: str, log_kernel: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Peaks of the kernel with ``start`` along ``side``, and then its own along the other side.

    Without both, entries are in 0..1, with a 1 in every row and column that is not all masked.
    """
    axis, other = AXIS[side], AXIS[OTHER[side]]
    first = _peak(log_kernel + jnp.expand_dims(start, other), axis)
    second = _peak(log_kernel - first, other)  # without the start, which may be huge
    return jnp.squeeze(first, axis), jnp.squeeze(second, other)


def _peak(x: jax.Array, axis: int) -> jax.Array:
    peak = jnp.max(x, axis=axis, keepdims=True)
    return jnp.where(peak == -jnp.inf, jnp.zeros_like(peak), peak)


@jax.custom_batching.custom_vmap
def shared_across_vmap(ok: jax.Array) -> jax.Array:
    """``ok``, a scalar bool; under ``vmap`` its conjunction, so that ``cond`` runs one branch."""
    return ok


@shared_across_vmap.def_vmap
def _all(axis_size, batched, ok):
    return (jnp.all(ok) if batched[0] else ok), False
