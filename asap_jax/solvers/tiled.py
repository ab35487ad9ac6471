"""Closures tile by tile, so that no N x M array is stored, in forward or reverse mode.

A tile is a block of query rows and all keys. A row closure needs its own tile only, so a row
closure and the next column closure take one sweep over the tiles: with ``P`` the row-closed plan,
the next column scaling is ``v + log(target / sum_i P_ij)``. If a column sum is too small to be
trusted, all sweeps are repeated with running maxima.
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
"""Query rows of a tile. 64 to 256 are equally fast on CPUs."""


class Tiles(NamedTuple):
    """Problems cut into blocks of query rows.

    Attributes:
      scanned: q ``(T, ..., B, d)``, live ``(T, ..., B, 1)``, start ``(T, ..., B)``, bias and mask
        ``(T, ..., B, M)``, for T tiles. ``live`` is False at padding rows, None without padding.
        Start, bias and mask are None here if they are in ``shared``.
      shared: start, bias and mask if they have no row per query; otherwise None.
      problem: the problems; all tiles use their keys.
      epsilon: entropic regularisation.
    """

    scanned: tuple
    shared: tuple
    problem: Problem
    epsilon: float

    def sweep(self, function: Callable[[Any, jax.Array], tuple[Any, Any]], carry: Any) -> Any:
        """``lax.scan`` of ``function(carry, log kernel of a tile)`` over the tiles."""

        @jax.checkpoint
        def body(carry, tile):
            return function(carry, self._kernel(*tile))

        return jax.lax.scan(body, carry, self.scanned)

    def without_start(self) -> Tiles:
        """The tiles of the kernel without the start."""
        q, live, _, *rest = self.scanned
        return self._replace(scanned=(q, live, None, *rest), shared=(None, *self.shared[1:]))

    def _kernel(self, q, live, *scanned):
        pairs = zip(self.shared, scanned, strict=True)
        start, bias, mask = (a if b is None else b for a, b in pairs)
        mask = masks.combine(mask, live)
        p = dataclasses.replace(self.problem, q=q, bias=bias, mask=mask)
        kernel = p.log_kernel(self.epsilon)
        return kernel if start is None else kernel + start[..., :, None]


def make_tiles(
    p: Problem, start: jax.Array | None, closures: Closures, block: int = BLOCK
) -> Tiles:
    """Cuts ``p`` into tiles of ``block`` rows; the last tile is padded with masked rows.

    ``start (..., N)`` is a log scaling of the query side, added to the kernel, or None.
    """
    count = p.q.shape[-2]
    size = min(block, count)
    padding = -count % size
    rows = lambda a, at: None if a is None or a.shape[at] != count else _tiles(a, at, size, padding)
    arrays = ((start, -1), (p.bias, -2), (p.mask, -2))
    scanned = tuple(rows(a, axis) for a, axis in arrays)
    shared = tuple(a if b is None else None for (a, _), b in zip(arrays, scanned, strict=True))
    # Not joined with the mask here: if the mask has no row per query, the result would be N x M.
    live = jnp.ones((1,) * (p.q.ndim - 2) + (count, 1), bool) if padding else None
    return Tiles((rows(p.q, -2), rows(live, -2), *scanned), shared, p, closures.epsilon)


def _tiles(a: jax.Array, axis: int, size: int, padding: int) -> jax.Array:
    axis += a.ndim
    a = jnp.pad(a, [(0, padding if i == axis else 0) for i in range(a.ndim)])
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
    """As ``log_domain.apply``, with ``block`` rows at a time if ``mix``."""
    if not mix:
        return matrix_scaling.apply(p, start, log_target, closures, mix=False)
    from_query = closures.side == "query"
    tiles = make_tiles(p, start if from_query else None, closures, block)
    column = jnp.zeros_like(p.k[..., 0]) + (0 if from_query else start)
    run = functools.partial(_run, tiles, column, log_target, closures)
    out, ok = run(robust=False)
    if closures.num_steps > (2 if from_query else 1):
        robust = jax.checkpoint(lambda: run(robust=True)[0])
        out = jax.lax.cond(matrix_scaling.shared_across_vmap(ok), lambda: out, robust)
    out = jnp.moveaxis(out, 0, -3)
    count = out.shape[-3] * out.shape[-2]
    return out.reshape(*out.shape[:-3], count, out.shape[-1])[..., : p.q.shape[-2], :]


def _run(tiles: Tiles, column, log_target, closures: Closures, *, robust: bool):
    """Output tiles ``(T, ..., B, d_v)`` and whether the column sums can be trusted."""
    values, steps = tiles.problem.values, closures.num_steps
    active = tiles.problem.active("key")
    ok = jnp.all(jnp.isfinite(column))
    if closures.side == "query":
        column = log_target - _column_lse(tiles, lambda kernel: kernel, column)
        if steps == 1:
            closed = lambda kernel: (jnp.exp(kernel + column[..., None, :]), 1.0)
            return _output(tiles, values, closed), ok
        steps -= 1
        tiles = tiles.without_start()

    # Without it reverse mode would save the tiles' kernels, which never change, at every step.
    @jax.checkpoint
    def update(_, state):
        column, ok = state
        column, step_ok = _row_then_column(tiles, column, log_target, active, robust)
        return column, ok & step_ok

    column, ok = jax.lax.fori_loop(0, (steps - 1) // 2, update, (column, ok))
    rows_closed = lambda kernel: _row_closed(kernel, column)
    if steps % 2:
        return _output(tiles, values, rows_closed), ok
    last, step_ok = _row_then_column(tiles, column, log_target, active, robust)
    if robust:
        plan = lambda kernel: jnp.exp(kernel + _row(kernel, column) + last[..., None, :])
        return _output(tiles, values, lambda kernel: (plan(kernel), 1.0)), ok & step_ok
    factor = jnp.exp(last - column)
    return _output(tiles, factor[..., None] * values, rows_closed), ok & step_ok


def _output(tiles: Tiles, values: jax.Array, closed: Callable) -> jax.Array:
    """Output tiles; ``closed(kernel)`` gives a matrix and the factors of its rows."""

    def product(_, kernel):
        matrix, rows = closed(kernel)
        return None, rows * ctransform.mixture(matrix, values, tiles.problem.precision)

    return tiles.sweep(product, None)[1]


def _row_closed(kernel, column) -> tuple[jax.Array, jax.Array]:
    """The plan after a row closure, as a matrix and the factors ``(..., B, 1)`` of its rows."""
    mass, total, _ = ctransform.closure_parts(kernel, column, -1, 0.0)
    return mass, 1 / total


def _row(kernel, column) -> jax.Array:
    """The log row scaling of a row closure, ``(..., B, 1)``."""
    return ctransform.closure_step(kernel, column, -1, jnp.zeros((), kernel.dtype))[..., None]


def _row_then_column(tiles: Tiles, column, log_target, active, robust: bool):
    """The log column scaling after a row and a column closure, and whether to trust it."""
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


def _column_lse(tiles: Tiles, entries: Callable, like: jax.Array) -> jax.Array:
    """Log-sum-exp over all rows of ``entries(kernel)``; 0 in a column of -inf."""

    def add(state, kernel):
        peak, total = state
        x = entries(kernel)
        after = jnp.maximum(peak, jax.lax.stop_gradient(x.max(-2)))
        at = jnp.where(after == -jnp.inf, jnp.zeros_like(after), after)
        return (after, total * jnp.exp(peak - at) + jnp.exp(x - at[..., None, :]).sum(-2)), None

    start = (jnp.full_like(like, -jnp.inf), jnp.zeros_like(like))
    (peak, total), _ = tiles.sweep(add, start)
    empty = peak == -jnp.inf
    total = jnp.where(empty, jnp.ones_like(total), total)
    return jnp.log(total) + jnp.where(empty, jnp.zeros_like(peak), peak)
