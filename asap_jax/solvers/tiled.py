"""Closures tile by tile: nothing of size N^2 is stored, in either mode of differentiation.

A tile is a block of query rows against all keys. A row closure lies within its tile, so a row
closure and the column closure after it take one sweep over the tiles: with ``P`` the row-closed
plan, ``v + log(target / sum_i P_ij)`` is the next column scaling. Where a column sum is too small
to be trusted, all sweeps are done again with running maxima.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.scores import scores as make_scores
from asap_jax.solvers import ctransform, matrix_scaling

BLOCK = 128
"""Query rows of a tile: 64 to 256 run equally fast on CPUs."""


class Tiles(NamedTuple):
    """One group of problems cut into blocks of query rows.

    Attributes:
      scanned: arrays with a leading axis of tiles: queries ``(T, ..., B, d)``, and where they have
        one row per query: start ``(T, ..., B)``, bias and mask ``(T, ..., B, M)``; else None.
      shared: the same three, where they have none.
      keys: ``(..., M, d)``.
      settings: see ``plans.Settings``; precision: of the scores.
    """

    scanned: tuple
    shared: tuple
    keys: jax.Array
    settings: Any
    precision: Any

    def sweep(self, function: Callable, carry):
        """``function(carry, log kernel of the tile)`` over all tiles, as in ``lax.scan``."""

        @jax.checkpoint
        def body(carry, tile):
            return function(carry, self._kernel(*tile))

        return jax.lax.scan(body, carry, self.scanned)

    def _kernel(self, q, *own):
        start, bias, mask = (a if b is None else b for a, b in zip(self.shared, own, strict=True))
        s = make_scores(
            q, self.keys, scale=self.settings.scale, bias=bias, precision=self.precision
        )
        kernel = ctransform.log_kernel(s, self.settings.epsilon, mask)
        return kernel if start is None else kernel + start[..., :, None]


def cut(q, k, bias, mask, start, settings, precision, block: int = BLOCK) -> Tiles:
    """The tiles; rows that fill the last one up are masked.

    ``start (..., N)`` is a log scaling of the query side, added to the kernel, or None.
    """
    count = q.shape[-2]
    size = min(block, count)
    short = -count % size
    if short:
        live = jnp.ones((1,) * (q.ndim - 2) + (count, 1), bool)  # filled up with False
        mask = live if mask is None else mask & live
    rows = lambda a, at: None if a is None or a.shape[at] != count else _tiles(a, at, size, short)
    given = ((start, -1), (bias, -2), (mask, -2))
    own = tuple(rows(a, axis) for a, axis in given)
    shared = tuple(a if b is None else None for (a, _), b in zip(given, own, strict=True))
    return Tiles((_tiles(q, -2, size, short), *own), shared, k, settings, precision)


def _tiles(a: jax.Array, axis: int, size: int, short: int) -> jax.Array:
    axis += a.ndim
    a = jnp.pad(a, [(0, short if i == axis else 0) for i in range(a.ndim)])
    a = a.reshape(*a.shape[:axis], a.shape[axis] // size, size, *a.shape[axis + 1 :])
    return jnp.moveaxis(a, axis, 0)


def mix(
    q, k, bias, mask, start, log_target, values, *, settings, precision, block: int = BLOCK
) -> jax.Array:
    """``A @ values (..., N, d_v)`` of the plan after ``settings.num_steps`` closures.

    Args:
      q: ``(..., N, d)``; k: ``(..., M, d)``; values: ``(..., M, d_v)``.
      bias, mask: broadcasting to ``(..., N, M)``, or None.
      start: log scaling of ``settings.side``; log_target: log column target ``(..., 1)``.
      settings, precision: as in ``plans``; precision of the scores and of the product.
      block: rows of a tile.
    """
    own = start if settings.side == "query" else None
    tiles = cut(q, k, bias, mask, own, settings, precision[0], block)
    active = (
        None if mask is None else masks.closure_validity(mask, (*q.shape[:-1], k.shape[-2])).key
    )
    first = jnp.zeros_like(k[..., 0]) + (0 if own is not None else start)
    run = functools.partial(_run, tiles, first, log_target, values, active, precision[1])
    out, ok = run(robust=False)
    if settings.num_steps > (2 if own is not None else 1):
        out = jax.lax.cond(
            matrix_scaling.one_for_all(ok), lambda: out, jax.checkpoint(lambda: run(robust=True)[0])
        )
    out = jnp.moveaxis(out, 0, -3)
    count = out.shape[-3] * out.shape[-2]
    return out.reshape(*out.shape[:-3], count, out.shape[-1])[..., : q.shape[-2], :]


def _run(tiles: Tiles, column, log_target, values, active, precision, *, robust: bool):
    """Output tiles ``(T, ..., B, d_v)`` and whether the column sums may be trusted."""
    side, steps = tiles.settings.side, tiles.settings.num_steps
    finish = functools.partial(_output, tiles, values, precision)
    ok = jnp.all(jnp.isfinite(column))
    if side == "query":
        column = log_target - _column_lse(tiles, lambda kernel: kernel, column)
        if steps == 1:
            return finish(lambda kernel: (jnp.exp(kernel + column[..., None, :]), 1.0)), ok
        steps -= 1
        tiles = tiles._replace(scanned=(tiles.scanned[0], None, *tiles.scanned[2:]))

    @jax.checkpoint  # or the tiles' kernels, which no step changes, would be kept for all steps
    def update(_, state):
        column, ok = state
        after, fine = _row_then_column(tiles, column, log_target, active, robust)
        return after, ok & fine

    column, ok = jax.lax.fori_loop(0, (steps - 1) // 2, update, (column, ok))
    rows_closed = lambda kernel: _row_closed(kernel, column)
    if steps % 2:
        return finish(rows_closed), ok
    last, fine = _row_then_column(tiles, column, log_target, active, robust)
    if robust:
        closed = lambda kernel: jnp.exp(kernel + _row(kernel, column) + last[..., None, :])
        return finish(lambda kernel: (closed(kernel), 1.0)), ok & fine
    factor = jnp.exp(last - column)
    return _output(tiles, factor[..., None] * values, precision, rows_closed), ok & fine


def _output(tiles: Tiles, values, precision, closed: Callable) -> jax.Array:
    """Output tiles; ``closed(kernel)`` gives a matrix and what multiplies its rows."""

    def product(_, kernel):
        matrix, rows = closed(kernel)
        out = jnp.einsum("...nm,...md->...nd", matrix, values, precision=precision)
        return None, rows * out

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
    alive = jnp.ones_like(sums, bool) if active is None else active
    ok = jnp.all((sums > matrix_scaling.FLOOR) | ~alive)
    sums = jnp.maximum(jnp.where(alive, sums, jnp.ones_like(sums)), matrix_scaling.FLOOR)
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
