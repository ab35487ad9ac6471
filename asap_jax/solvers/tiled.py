"""Closures block by block, so that no N x M array is stored, in forward or reverse mode.

A block, or tile, is some of one side's tokens with all tokens of the other side. ``flash`` is
softmax attention with a bias on the keys, and gives the log-sum-exp of every row: a row closure. A
column closure is the same with queries and keys exchanged. In a loop, a row closure and the next
column closure take one sweep: with ``P`` the row-closed plan, the next column scaling is
``v + log(target / sum_i P_ij)``. If a column sum is too small, or a scaling or score too large, to
be trusted, the closures are repeated with ``flash`` alone.

Only sums over blocks are carried from block to block. The work on a block is checkpointed without
them, therefore reverse mode stores the inputs of the blocks and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
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
PLAIN_FLOOR = 1e-20
"""Smallest trusted sum beside a kernel that is exponentiated as it is."""
LARGEST_EXPONENT = 80.0
"""Largest exponent of a sum in float32."""
LARGE = 1e4
"""Largest exponent whose rounding in float32, 0.001, is left alone. See ``_column_corrected``."""
RANGE = 40.0
"""Largest trusted log column scaling beside a kernel that is exponentiated as it is: row sums then
lie within float32, for up to a million keys."""


class Blocks(NamedTuple):
    """Problems cut into blocks of queries.

    Attributes:
      scanned: q ``(T, ..., B, d)``, live ``(T, ..., B, 1)``, bias and mask ``(T, ..., B, M)``, for
        T blocks. ``live`` is False at rows of padding and of inactive queries, None without any.
        Bias and mask are None here if they have no row per query; then they are those of
        ``problem``.
      problem: the problems; all blocks use their keys.
      epsilon: entropic regularisation.
      plain: exponentiate the log kernel as it is. Otherwise the peaks of rows are divided out.
    """

    scanned: tuple
    problem: Problem
    epsilon: float
    plain: bool

    def sums(
        self, function: Callable[..., tuple[Any, Any]], zero: Any = None, *by_row: jax.Array
    ) -> tuple[Any, Any]:
        """Two trees of ``function(log kernel of a block, *by_row of the block)``.

        The first is added up over the blocks, from ``zero``. The second is joined, from
        ``(..., B, c)`` to ``(..., N, c)``. ``by_row`` are arrays ``(..., N, c)``.
        """
        count, (blocks, *_, size, _) = self.problem.q.shape[-2], self.scanned[0].shape
        cut = tuple(_cut(a, size, blocks * size - count) for a in by_row)
        on_block = jax.checkpoint(lambda block, rows: function(self._kernel(*block), *rows))

        def add(carry, block):
            part, rows = on_block(*block)
            return jax.tree.map(jnp.add, carry, part), rows

        total, rows = jax.lax.scan(add, zero, (self.scanned, cut))
        return total, jax.tree.map(lambda a: _joined(a, count), rows)

    def masses(
        self, kernel: jax.Array, column: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``mass (..., B, M)``, and ``total`` and ``peak`` of its rows, ``(..., B, 1)``.

        ``exp(kernel + column)`` is ``exp(peak) * mass * weights(column)``, and has the row sums
        ``exp(peak) * total``. For rows that are masked everywhere the total is 1 and the peak 0.
        """
        if not self.plain:
            mass, total, peak, empty = ctransform.closure_masses(kernel, column, -1)
            return mass, jnp.where(empty, 1, total), jnp.where(empty, 0, peak)
        mass = jnp.exp(kernel)
        total = jnp.einsum("...nm,...m->...n", mass, jnp.exp(column), precision="highest")
        total = jnp.where(total == 0, jnp.ones_like(total), total)[..., None]
        return mass, total, jnp.zeros_like(total)

    def weights(self, column: jax.Array) -> jax.Array:
        """Factors ``(..., M)`` of the columns of ``mass``, see ``masses``."""
        return jnp.exp(column) if self.plain else jnp.ones_like(column)

    def _kernel(self, q, live, bias, mask):
        p = self.problem
        bias, mask = (a if b is None else b for a, b in ((p.bias, bias), (p.mask, mask)))
        mask = masks.combine(mask, live)
        return dataclasses.replace(p, q=q, bias=bias, mask=mask).log_kernel(self.epsilon)


def make_blocks(p: Problem, epsilon: float, *, plain: bool = False, block: int = BLOCK) -> Blocks:
    """Cuts ``p`` into blocks of queries; the last block is padded with masked rows."""
    count = p.q.shape[-2]
    size = min(block, count)
    p, live = _without_token_mask(p)
    padding = -count % size

    def rows(a):
        return None if a is None or a.shape[-2] != count else _cut(a, size, padding)

    # Not joined with the mask here: if the mask has no row per query, the result would be N x M.
    if live is None and padding:
        live = jnp.ones((1,) * (p.q.ndim - 2) + (count, 1), bool)
    return Blocks(tuple(map(rows, (p.q, live, p.bias, p.mask))), p, epsilon, plain)


def _without_token_mask(p: Problem) -> tuple[Problem, jax.Array | None]:
    """Splits an N x M mask that leaves out whole tokens.

    Returns the problem with a mask of the keys alone, and which queries are active,
    ``(..., N, 1)``. Any other problem comes back unchanged, with None.
    """
    if p.mask is None or p.validity is None or not p.whole_tokens or 1 in p.mask.shape[-2:]:
        return p, None
    query, key = p.validity
    return dataclasses.replace(p, mask=key[..., None, :]), query[..., None]


def _cut(a: jax.Array, size: int, padding: int) -> jax.Array:
    """``(..., N, c)`` as ``(T, ..., B, c)``; block t has the rows t, T + t, 2T + t, ...

    With N sharded over devices, every device then has a part of every block.
    """
    a = jnp.pad(a, [(0, padding if axis == a.ndim - 2 else 0) for axis in range(a.ndim)])
    a = a.reshape(*a.shape[:-2], size, a.shape[-2] // size, a.shape[-1])
    return jnp.moveaxis(a, -2, 0)


def _joined(a: jax.Array, count: int) -> jax.Array:
    """``(T, ..., B, c)`` as ``(..., N, c)``, the inverse of ``_cut``."""
    a = jnp.moveaxis(a, 0, -2)
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
    sides = lambda plain: Sides.of(p, log_target, closures.epsilon, plain=plain, block=block)
    centred = matrix_scaling.centred_range(start, p.active(closures.side))
    largest = matrix_scaling.largest_exponent(p, start, closures)
    out, ok = jax.lax.cond(
        matrix_scaling.shared_across_vmap(largest <= matrix_scaling.REACH),
        lambda: _closed(sides(True), centred, closures, row_and_column, _column_closed),
        lambda: _closed(sides(False), start, closures, row_and_column, _column_closed),
    )
    if closures.num_steps == (2 if closures.side == "query" else 1):
        return out  # it ends on rows and there is no loop, so it can be trusted either way

    @jax.checkpoint
    def robust():
        steps = row_and_column_by_flash, _column_corrected
        return _closed(sides(False), start, closures, *steps)[0]

    ok &= largest <= LARGE
    return jax.lax.cond(matrix_scaling.shared_across_vmap(ok), lambda: out, robust)


class Sides(NamedTuple):
    """The problems in blocks of queries, in blocks of keys, and the log column target."""

    rows: Blocks
    columns: Blocks
    log_target: jax.Array

    @classmethod
    def of(
        cls,
        p: Problem,
        log_target: jax.Array,
        epsilon: float,
        *,
        plain: bool = False,
        block: int = BLOCK,
    ) -> Sides:
        """Cuts ``p`` both ways."""
        cut = functools.partial(make_blocks, epsilon=epsilon, plain=plain, block=block)
        return cls(cut(p), cut(p.swapped()), log_target)


def flash(rows: Blocks, column: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``softmax(kernel + column) values (..., N, d_v)``, and the log-sum-exp ``(..., N)`` of it.

    ``kernel`` is the log kernel of the problems, ``column (..., M)`` a log scaling. Rows that are
    masked everywhere give 0, and 0.
    """
    values = rows.weights(column)[..., None] * values

    def attend(kernel):
        mass, total, peak = rows.masses(kernel, column)
        out = ctransform.mixture(mass, values, rows.problem.precision) / total
        return None, (out, jnp.log(total) + peak)

    _, (out, lse) = rows.sums(attend)
    return out, lse[..., 0]


def log_sum_exp(rows: Blocks, column: jax.Array) -> jax.Array:
    """The second result of ``flash``."""

    def lse(kernel):
        _, total, peak = rows.masses(kernel, column)
        return None, jnp.log(total) + peak

    return rows.sums(lse)[1][..., 0]


def _closed(
    s: Sides,
    start: jax.Array,
    closures: Closures,
    step: Callable[[Sides, jax.Array], Step],
    end: Callable[[Sides, jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """``A v (..., N, d_v)`` after the closures, and ``()`` whether to trust it.

    ``start``: log scaling ``(..., N)`` or ``(..., M)`` of ``closures.side``; ``step``: a row and a
    column closure; ``end``: the output after a column closure.
    """
    column, num_steps = start, closures.num_steps
    if closures.side == "query":
        column = s.log_target - log_sum_exp(s.columns, start)
        num_steps -= 1
        if num_steps == 0:
            return end(s, start, column), jnp.bool_(True)

    # Without it reverse mode would save the kernel's blocks, which are the same in every pass.
    once = jax.checkpoint(lambda column: step(s, column))

    def update(_, state):
        column, ok = state
        after = once(column)
        return after.column, ok & after.ok

    state = column, jnp.all(jnp.isfinite(column))
    column, ok = jax.lax.fori_loop(0, (num_steps - 1) // 2, update, state)
    if num_steps % 2:
        assert s.rows.problem.v is not None
        return flash(s.rows, column, s.rows.problem.v)[0], ok
    last = step(s, column)
    return end(s, last.row, last.column), ok & last.ok


def _column_closed(s: Sides, row: jax.Array, column: jax.Array) -> jax.Array:
    """``exp(row + kernel + column) v``, where the columns have their sums."""
    assert s.rows.problem.v is not None
    out, lse = flash(s.rows, column, s.rows.problem.v)
    return jnp.exp(row + lse)[..., None] * out


def _column_corrected(s: Sides, row: jax.Array, column: jax.Array) -> jax.Array:
    """As ``_column_closed``, with exact column sums whatever rounding has done to the scalings.

    Scores and scalings of 1e8 are rounded to 8, and blocks of keys round other than blocks of
    queries. Weights may be as wrong as that, but no column may have a thousand times its sum. So
    the sums are taken again, in the very terms of the output.
    """
    values, precision = s.rows.problem.v, s.rows.problem.precision
    assert values is not None

    def mass(kernel, row):
        # The two large terms come first: their sum is small where weights are not.
        return jnp.exp(jnp.minimum(kernel + row + column[..., None, :], LARGEST_EXPONENT))

    def sums(kernel, row):
        return jnp.sum(mass(kernel, row), -2), None

    total, _ = s.rows.sums(sums, jnp.zeros_like(column), row[..., None])
    total = jnp.where(total > 0, total, jnp.exp(s.log_target))
    values = (jnp.exp(s.log_target) / total)[..., None] * values

    def mix(kernel, row):
        return None, ctransform.mixture(mass(kernel, row), values, precision)

    return s.rows.sums(mix, None, row[..., None])[1]


class Step(NamedTuple):
    """After a row and a column closure: log scalings ``row (..., N)`` and ``column (..., M)``.

    ``ok ()``: whether to trust them.
    """

    row: jax.Array
    column: jax.Array
    ok: jax.Array


def row_and_column(s: Sides, column: jax.Array) -> Step:
    """A row and a column closure in one sweep, from a log column scaling."""
    rows = s.rows

    def sums_and_lse(kernel):
        mass, total, peak = rows.masses(kernel, column)
        inverse = jnp.squeeze(1 / total, -1)
        sums = jnp.einsum("...nm,...n->...m", mass, inverse, precision="highest")
        return sums, jnp.log(total) + peak

    sums, lse = rows.sums(sums_and_lse, jnp.zeros_like(column))
    active = rows.problem.active("key")
    # Without underflow in the kernel, the range of the scalings is what limits the sums.
    floor = jnp.asarray(PLAIN_FLOOR if rows.plain else matrix_scaling.FLOOR, sums.dtype)
    safe = jnp.maximum(jnp.where(active, sums, jnp.ones_like(sums)), floor)
    after, ok = s.log_target - jnp.log(safe), sums > floor
    if rows.plain:
        ok &= jnp.abs(after) < RANGE
    else:
        after = column + after
    return Step(-lse[..., 0], after, jnp.all(ok | ~active))


def row_and_column_by_flash(s: Sides, column: jax.Array) -> Step:
    """As ``row_and_column``, in two sweeps; the result can always be trusted."""
    row = -log_sum_exp(s.rows, column)
    return Step(row, s.log_target - log_sum_exp(s.columns, row), jnp.bool_(True))
