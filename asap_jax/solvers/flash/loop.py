"""Closures as calls of an attention kernel: the teacher's steps and the compiled layer alike.

Closures that end on rows take one call each. Those that end on columns take one call more: the key
dual is known only after the last, so the product with the values needs its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax.problem import Problem
from asap_jax.solvers import matrix_scaling
from asap_jax.solvers.closures import AXIS, OTHER, Closures
from asap_jax.solvers.flash import gradient, ring
from asap_jax.solvers.flash.kernel import MASKED, Kernel


class Operands(NamedTuple):
    """The problems as a kernel takes them.

    Attributes:
      q ``(..., N, d)``, scaled by ``scale / epsilon``; k ``(..., M, d)``; v ``(..., M, e)``.
      rows, columns: active queries ``(..., N)`` and keys ``(..., M)``, or a scalar True.
      log_target: log column target.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rows: jax.Array
    columns: jax.Array
    log_target: jax.Array

    @classmethod
    def of(cls, p: Problem, log_target: jax.Array, epsilon: float) -> Operands:
        """The arrays in the dtype of the call; scores are scaled once, before they are rounded."""
        assert p.v is not None
        q, k, v = (x.astype(p.dtype) for x in (p.q * (p.scale / epsilon), p.k, p.v))
        return cls(q, k, v, p.active("query"), p.active("key"), log_target)


def apply(
    kernel: Kernel, p: Problem, start: jax.Array, log_target: jax.Array, closures: Closures
) -> jax.Array:
    """As ``log_domain.apply``, by calls of the kernel; without values, the weights by scaling.

    A mask must leave out whole queries and whole keys, and a bias must have no row per query or no
    column per key. A bias on the side of the start is part of it. One on the other side is
    normalised away by the first closure. With ``p.axis_name`` the calls go round the devices.
    """
    if p.v is None:
        return matrix_scaling.apply(p, start, log_target, closures)
    x = Operands.of(p, log_target, closures.epsilon)
    if p.bias is not None:
        start = start + _bias_of(p.bias.astype(start.dtype), closures)
    active = p.active(closures.side)
    start = _masked(matrix_scaling.centred_range(start, active, p.axis_name), active)
    kernel = kernel if p.axis_name is None else ring.around(kernel, p.axis_name)
    out = _closed(kernel, x, start, closures)
    return jnp.where(x.rows[..., None], out, jnp.zeros_like(out)) if x.rows.ndim else out


def _bias_of(bias: jax.Array, closures: Closures) -> jax.Array:
    """The log scaling ``(..., n)`` on the side of the start that is the same as the bias."""
    other = AXIS[OTHER[closures.side]]
    if bias.shape[other] != 1:
        return jnp.zeros((), bias.dtype)
    return jnp.squeeze(bias / closures.epsilon, other)


def _masked(dual: jax.Array, active: jax.Array) -> jax.Array:
    return jnp.where(active, dual, jnp.full_like(dual, MASKED))


def _closed(kernel: Kernel, x: Operands, start: jax.Array, closures: Closures) -> jax.Array:
    """``A v`` after the closures, in the dtype of the duals."""
    column, num_steps = start, closures.num_steps
    if kernel.flash is None:
        assert closures.num_calls == 1
        return kernel.attend(x.q, x.k, x.v, column).astype(column.dtype)
    lse = gradient.log_sum_exp(kernel.flash)

    def row_closed(column):
        return _masked(-lse(x.q, x.k, column), x.rows)

    def column_closed(row):
        return _masked(x.log_target - lse(x.k, x.q, row), x.columns)

    def product(row, column):
        out, lse = gradient.attention(kernel)(x.q, x.k, x.v, column)
        return jnp.exp(row + lse)[..., None] * out.astype(lse.dtype)

    if closures.side == "query":
        column = column_closed(start)
        num_steps -= 1
        if num_steps == 0:
            return product(start, column)

    pair = lambda _, column: column_closed(row_closed(column))
    column = jax.lax.fori_loop(0, (num_steps - 1) // 2, pair, column)
    if num_steps % 2:
        return kernel.attend(x.q, x.k, x.v, column).astype(column.dtype)
    row = row_closed(column)
    return product(row, column_closed(row))
