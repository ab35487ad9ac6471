"""Closures block by block, so that no N x M array is stored, in forward or reverse mode.

A block is some of one side's tokens with all tokens of the other side. ``flash`` is softmax
attention with a bias on the keys, and gives the log-sum-exp of every row: a row closure. A column
closure is the same with queries and keys exchanged. In a loop, a row closure and the next column
closure take one sweep: with ``P`` the row-closed plan, the next column scaling is
``v + log(target / sum_i P_ij)``. If a column sum is too small to be trusted, the closures are
repeated with ``flash`` alone.

Only sums over blocks are carried from block to block. The work on a block is checkpointed without
them, therefore reverse mode stores the inputs of the blocks and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.problem import Problem
from asap_jax.solvers import ctransform, matrix_scaling
from asap_jax.solvers.closures import Closures

BLOCK = 128
"""Query rows of a block. 64 to 256 are equally fast on CPUs."""


class Blocks(NamedTuple):
    """Problems cut into blocks of queries.

    Attributes:
      scanned: q ``(T, ..., B, d)``, live ``(T, ..., B, 1)``, bias and mask ``(T, ..., B, M)``, for
        T blocks. ``live`` is False at padding rows, None without padding. Bias and mask are None
        here if they have no row per query; then they are those of ``problem``.
      problem: the problems; all blocks use their keys.
      epsilon: entropic regularisation.
    """

    scanned: tuple
    problem: Problem
    epsilon: float

    def sums(self, function: Callable[[jax.Array], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Two trees of ``function(log kernel of a block)``.

        The first is added up over the blocks. The second is joined, from ``(..., B, c)`` to
        ``(..., N, c)``.
        """
        on_block = jax.checkpoint(lambda block: function(self._kernel(*block)))
        like, _ = jax.eval_shape(on_block, jax.tree.map(lambda a: a[0], self.scanned))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

        def add(carry, block):
            part, rows = on_block(block)
            return jax.tree.map(jnp.add, carry, part), rows

        total, rows = jax.lax.scan(add, zeros, self.scanned)
        return total, jax.tree.map(lambda a: _joined(a, self.problem.q.shape[-2]), rows)

    def _kernel(self, q, live, bias, mask):
        p = self.problem
        bias, mask = (a if b is None else b for a, b in ((p.bias, bias), (p.mask, mask)))
        mask = masks.combine(mask, live)
        return dataclasses.replace(p, q=q, bias=bias, mask=mask).log_kernel(self.epsilon)


def make_blocks(p: Problem, epsilon: float, block: int = BLOCK) -> Blocks:
    """Cuts ``p`` into blocks of queries; the last block is padded with masked rows."""
    count = p.q.shape[-2]
    size = min(block, count)
    padding = -count % size

    def rows(a):
        return None if a is None or a.shape[-2] != count else _cut(a, size, padding)

    # Not joined with the mask here: if the mask has no row per query, the result would be N x M.
    live = jnp.ones((1,) * (p.q.ndim - 2) + (count, 1), bool) if padding else None
    return Blocks(tuple(map(rows, (p.q, live, p.bias, p.mask))), p, epsilon)


def _cut(a: jax.Array, size: int, padding: int) -> jax.Array:
    """``(..., N, c)`` as ``(T, ..., B, c)``."""
    a = jnp.pad(a, [(0, padding if axis == a.ndim - 2 else 0) for axis in range(a.ndim)])
    a = a.reshape(*a.shape[:-2], a.shape[-2] // size, size, a.shape[-1])
    return jnp.moveaxis(a, -3, 0)


def _joined(a: jax.Array, count: int) -> jax.Array:
    """``(T, ..., B, c)`` as ``(..., N, c)``, the inverse of ``_cut``."""
    a = jnp.moveaxis(a, 0, -3)
    return a.reshape(*a.shape[:-3], a.shape[-3] * a.shape[-2], a.shape[-1])[..., :count, :]


def apply(
    p: Problem,
    start: jax.Array,
    log_target: jax.Array,
    closures: Closures,
    *,
    block: int = BLOCK,
) -> jax.Array:
    """As ``log_domain.apply``, with ``block`` rows at a time if there are values."""
    if p.v is None:
        return matrix_scaling.apply(p, start, log_target, closures)
    s = Sides.of(p, log_target, closures.epsilon, block)
    if closures.side == "key":
        return _from_column(s, start, closures.num_steps)
    column = log_target - log_sum_exp(s.columns, start)
    if closures.num_steps > 1:
        return _from_column(s, column, closures.num_steps - 1)
    return _column_closed(s, start, column)


class Sides(NamedTuple):
    """The problems in blocks of queries, in blocks of keys, and the log column target."""

    rows: Blocks
    columns: Blocks
    log_target: jax.Array

    @classmethod
    def of(cls, p: Problem, log_target: jax.Array, epsilon: float, block: int = BLOCK) -> Sides:
        """Cuts ``p`` both ways."""
        rows, columns = (make_blocks(x, epsilon, block) for x in (p, p.swapped()))
        return cls(rows, columns, log_target)


def flash(rows: Blocks, column: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``softmax(kernel + column) values (..., N, d_v)``, and the log-sum-exp ``(..., N)`` of it.

    ``kernel`` is the log kernel of the problems, ``column (..., M)`` a log scaling. Rows that are
    masked everywhere give 0, and 0.
    """

    def attend(kernel):
        mass, total, peak, _ = ctransform.closure_masses(kernel, column, -1)
        out = ctransform.mixture(mass, values, rows.problem.precision) / total
        return None, (out, jnp.log(total) + peak)

    _, (out, lse) = rows.sums(attend)
    return out, lse[..., 0]


def log_sum_exp(rows: Blocks, column: jax.Array) -> jax.Array:
    """The second result of ``flash``."""

    def lse(kernel):
        _, total, peak, _ = ctransform.closure_masses(kernel, column, -1)
        return None, jnp.log(total) + peak

    return rows.sums(lse)[1][..., 0]


def _from_column(s: Sides, start: jax.Array, num_steps: int) -> jax.Array:
    """``A v`` after closures from the log column scaling ``start``."""
    values = s.rows.problem.v
    assert values is not None
    if num_steps == 1:
        return flash(s.rows, start, values)[0]
    pairs, ends_on_rows = (num_steps - 1) // 2, num_steps % 2 == 1

    def fast():
        before, ok = _repeat(row_and_column_by_sums, s, start, pairs)
        if ends_on_rows:
            return flash(s.rows, before, values)[0], ok
        last, last_ok = jax.checkpoint(lambda column: row_and_column_by_sums(s, column))(before)
        factor = jnp.exp(last - before)[..., None]
        return flash(s.rows, before, factor * values)[0], ok & last_ok

    @jax.checkpoint
    def robust():
        before, _ = _repeat(row_and_column_by_flash, s, start, pairs)
        if ends_on_rows:
            return flash(s.rows, before, values)[0]
        row = -log_sum_exp(s.rows, before)
        return _column_closed(s, row, s.log_target - log_sum_exp(s.columns, row))

    out, ok = fast()
    return jax.lax.cond(matrix_scaling.shared_across_vmap(ok), lambda: out, robust)


def _column_closed(s: Sides, row: jax.Array, column: jax.Array) -> jax.Array:
    """``exp(row + kernel + column) v``, where the columns have their sums."""
    assert s.rows.problem.v is not None
    out, lse = flash(s.rows, column, s.rows.problem.v)
    return jnp.exp(row + lse)[..., None] * out


def _repeat(step: Callable, s: Sides, column: jax.Array, times: int) -> tuple[jax.Array, jax.Array]:
    """The log column scaling after ``times`` steps, and whether all of them can be trusted."""
    # Without it reverse mode would save the blocks, which never change, at every step.
    once = jax.checkpoint(lambda column: step(s, column))

    def update(_, state):
        column, ok = state
        column, step_ok = once(column)
        return column, ok & step_ok

    return jax.lax.fori_loop(0, times, update, (column, jnp.all(jnp.isfinite(column))))


def row_and_column_by_sums(s: Sides, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The log column scaling after a row and a column closure, in one sweep; and its trust."""

    def column_sums(kernel):
        mass, total, _, _ = ctransform.closure_masses(kernel, column, -1)
        weights = jnp.squeeze(1 / total, -1)
        return jnp.einsum("...nm,...n->...m", mass, weights, precision="highest"), None

    sums, _ = s.rows.sums(column_sums)
    active = s.rows.problem.active("key")
    ok = jnp.all((sums > matrix_scaling.FLOOR) | ~active)
    sums = jnp.maximum(jnp.where(active, sums, jnp.ones_like(sums)), matrix_scaling.FLOOR)
    return column + s.log_target - jnp.log(sums), ok


def row_and_column_by_flash(s: Sides, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As ``row_and_column_by_sums``, in two sweeps; it can always be trusted."""
    row = -log_sum_exp(s.rows, column)
    return s.log_target - log_sum_exp(s.columns, row), jnp.bool_(True)
