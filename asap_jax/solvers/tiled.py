"""Closures tile by tile: nothing of size N^2 is stored, in either mode of differentiation.

A tile is a block of query rows against all keys. A row closure lies within its tile, so a row
closure and the column closure after it take one sweep over the tiles: with ``P`` the row-closed
plan, ``v + log(target / sum_i P_ij)`` is the next column scaling. Where a column sum is too small
to be trusted, all sweeps are done again with running maxima.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.problem import Problem
from asap_jax.solvers import ctransform, matrix_scaling
from asap_jax.solvers.closures import Closures

BLOCK = 128
"""Query rows of a tile: 64 to 256 run equally fast on CPUs."""


class Tiles(NamedTuple):
    """One group of problems cut into blocks of query rows.

    Attributes:
      scanned: arrays with a leading axis of tiles: queries ``(T, ..., B, d)``, which rows are
        queries ``(T, ..., B, 1)`` (None for all), and where they have one row per query: start
        ``(T, ..., B)``, bias and mask ``(T, ..., B, M)``; else None.
      shared: start, bias and mask, where they have no row per query; else None.
      problem: the group; its keys serve every tile.
      epsilon: entropic regularisation.
    """

    scanned: tuple
    shared: tuple
    problem: Problem
    epsilon: float

    def sweep(self, function: Callable, carry):
        """``function(carry, log kernel of the tile)`` over all tiles, as in ``lax.scan``."""

        @jax.checkpoint
        def body(carry, tile):
            return function(carry, self._kernel(*tile))

        return jax.lax.scan(body, carry, self.scanned)

    def without_start(self) -> Tiles:
        """The tiles of the bare kernel."""
        q, live, _, *rest = self.scanned
        return self._replace(scanned=(q, live, None, *rest), shared=(None, *self.shared[1:]))

    def _kernel(self, q, live, *own):
        start, bias, mask = (a if b is None else b for a, b in zip(self.shared, own, strict=True))
        mask = masks.combine(mask, live)
        kernel = self.problem.replace(q=q, bias=bias, mask=mask).log_kernel(self.epsilon)
        return kernel if start is None else kernel + start[..., :, None]


def make_tiles(
    p: Problem, start: jax.Array | None, closures: Closures, block: int = BLOCK
) -> Tiles:
    """The tiles; rows that fill up the last one are masked.

    ``start (..., N)`` is a log scaling of the query side, added to the kernel, or None.
    """
    count = p.q.shape[-2]
    size = min(block, count)
    short = -count % size
    rows = lambda a, at: None if a is None or a.shape[at] != count else _tiles(a, at, size, short)
    whole = ((start, -1), (p.bias, -2), (p.mask, -2))
    own = tuple(rows(a, axis) for a, axis in whole)
    shared = tuple(a if b is None else None for (a, _), b in zip(whole, own, strict=True))
    # Apart from the mask, which may have no row per query: their product would be N x M.
    live = jnp.ones((1,) * (p.q.ndim - 2) + (count, 1), bool) if short else None
    return Tiles((rows(p.q, -2), rows(live, -2), *own), shared, p, closures.epsilon)


def _tiles(a: jax.Array, axis: int, size: int, short: int) -> jax.Array:
    axis += a.ndim
    a = jnp.pad(a, [(0, short if i == axis else 0) for i in range(a.ndim)])
    a = a.reshape(*a.shape[:axis], a.shape[axis] // size, size, *a.shape[axis + 1 :])
    return jnp.moveaxis(a, axis, 0)


def apply(
    p: Problem,
    start: jax.Array,
    log_target: jax.Array,
    closures: Closures,
    *,
    mix: bool,
    block: int = BLOCK,
) -> jax.Array:
    """As ``log_domain.apply``, ``block`` rows at a time. Whole weights have no use for tiles."""
    if not mix:
        return matrix_scaling.apply(p, start, log_target, closures, mix=False)
    own = start if closures.side == "query" else None
    tiles = make_tiles(p, own, closures, block)
    first = jnp.zeros_like(p.k[..., 0]) + (0 if own is not None else start)
    run = functools.partial(_run, tiles, first, log_target, closures)
    out, ok = run(robust=False)
    if closures.num_steps > (2 if own is not None else 1):
        robust = jax.checkpoint(lambda: run(robust=True)[0])
        out = jax.lax.cond(matrix_scaling.shared_across_vmap(ok), lambda: out, robust)
    out = jnp.moveaxis(out, 0, -3)
    count = out.shape[-3] * out.shape[-2]
    return out.reshape(*out.shape[:-3], count, out.shape[-1])[..., : p.q.shape[-2], :]


def _run(tiles: Tiles, column, log_target, closures: Closures, *, robust: bool):
    """Output tiles ``(T, ..., B, d_v)`` and whether the column sums may be trusted."""
    p, steps = tiles.problem, closures.num_steps
    active = p.active("key")
    ok = jnp.all(jnp.isfinite(column))
    if closures.side == "query":
        column = log_target - _column_lse(tiles, lambda kernel: kernel, column)
        if steps == 1:
            closed = lambda kernel: (jnp.exp(kernel + column[..., None, :]), 1.0)
            return _output(tiles, p.v, closed), ok
        steps -= 1
        tiles = tiles.without_start()

    # Without it reverse mode would save the tiles' kernels, which never change, at every step.
    @jax.checkpoint
    def update(_, state):
        column, ok = state
        after, fine = _row_then_column(tiles, column, log_target, active, robust)
        return after, ok & fine

    column, ok = jax.lax.fori_loop(0, (steps - 1) // 2, update, (column, ok))
    rows_closed = lambda kernel: _row_closed(kernel, column)
    if steps % 2:
        return _output(tiles, p.v, rows_closed), ok
    last, fine = _row_then_column(tiles, column, log_target, active, robust)
    if robust:
        whole = lambda kernel: jnp.exp(kernel + _row(kernel, column) + last[..., None, :])
        return _output(tiles, p.v, lambda kernel: (whole(kernel), 1.0)), ok & fine
    factor = jnp.exp(last - column)
    return _output(tiles, factor[..., None] * p.v, rows_closed), ok & fine


def _output(tiles: Tiles, values, closed: Callable) -> jax.Array:
    """Output tiles; ``closed(kernel)`` gives a matrix and what multiplies its rows."""

    def product(_, kernel):
        matrix, rows = closed(kernel)
        return None, rows * ctransform.mixture(matrix, values, tiles.problem.precision)

    return tiles.sweep(product, None)[1]


def _row_closed(kernel, column) -> tuple[jax.Array, jax.Array]:
    """The plan closed on rows from the log column scaling: a matrix and factors ``(..., B, 1)``."""
    mass, total, _ = ctransform.closure_parts(kernel, column, -1, 0.0)
    return mass, 1 / total


def _row(kernel, column) -> jax.Array:
    """The log row scaling of a row closure, ``(..., B, 1)``."""
    return ctransform.closure_step(kernel, column, -1, jnp.zeros((), kernel.dtype))[..., None]


def _row_then_column(tiles: Tiles, column, log_target, active, robust: bool):
    """The log column scaling after a row and a column closure, and whether it may be trusted."""
    if robust:
        lse = _column_lse(tiles, lambda kernel: kernel + _row(kernel, column), column)
        return log_target - lse, jnp.bool_(True)

    def add(sums, kernel):
        matrix, rows = _row_closed(kernel, column)
        part = jnp.einsum("...nm,...n->...m", matrix, rows[..., 0], precision="highest")
        return sums + part, None

    sums, _ = tiles.sweep(add, jnp.zeros_like(column))
    ok = jnp.all((sums > matrix_scaling.FLOOR) | ~active)
    sums = jnp.maximum(jnp.where(active, sums, jnp.ones_like(sums)), matrix_scaling.FLOOR)
    return column + log_target - jnp.log(sums), ok


def _column_lse(tiles: Tiles, of: Callable, like) -> jax.Array:
    """Log-sum-exp over all rows of ``of(kernel)``, with a running maximum; 0 where all is -inf."""

    def add(state, kernel):
        peak, total = state
        x = of(kernel)
        after = jnp.maximum(peak, jax.lax.stop_gradient(x.max(-2)))
        at = jnp.where(after == -jnp.inf, jnp.zeros_like(after), after)
        return (after, total * jnp.exp(peak - at) + jnp.exp(x - at[..., None, :]).sum(-2)), None

    start = (jnp.full_like(like, -jnp.inf), jnp.zeros_like(like))
    (peak, total), _ = tiles.sweep(add, start)
    empty = peak == -jnp.inf
    total = jnp.where(empty, jnp.ones_like(total), total)
    return jnp.log(total) + jnp.where(empty, jnp.zeros_like(peak), peak)
