"""What a fit regresses on: from a layer's record to a dual of its teacher and normal equations.

Pure functions of one record; layers stacked by a scan are mapped over.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.fitting import gauss_newton
from asap_jax.fitting.least_squares import NormalEquations
from asap_jax.predictor.predictor import design_matrix, first_step
from asap_jax.problem import Problem
from asap_jax.records import Record, over_stack, problem
from asap_jax.scores import query_shift
from asap_jax.solvers import ctransform
from asap_jax.solvers.duals import sinkhorn_duals
from asap_jax.spec import SinkhornSpec


def target_dual(
    p: Problem, spec: SinkhornSpec, target: str | int
) -> tuple[jax.Array, str, masks.Validity | None]:
    """A dual of the teacher in cost coordinates, centred, and its side.

    ``target``: ``"source"`` (closure-ready), an int n (aligned, n half-steps before the end), or
    ``"final_query"`` / ``"final_key"`` (the duals after the last steps). Dual and shift are
    centred apart before they are added, which keeps float32 digits. Returns
    ``(dual (..., N), side, validity)``; ``validity`` are the tokens with features.
    """
    before_end = target if isinstance(target, int) else None
    duals = sinkhorn_duals(p.scores, spec=spec, mask=p.mask, before_end=before_end)
    side, dual = {
        "source": ("query", duals.source),
        "final_query": ("query", duals.query),
        "final_key": ("key", duals.key),
    }.get(target, (duals.aligned_side, duals.aligned))
    validity = masks.feature_validity(p.validity, spec.padding)
    valid = None if validity is None else getattr(validity, side)
    shift = query_shift(p.q if side == "query" else p.k, scale=p.scale)
    return masks.center(dual, valid) + masks.center(shift, valid), side, validity


@functools.partial(jax.jit, static_argnames=("target", "baseline", "token_bias", "rows", "damping"))
def layer_sums(
    record: Record,
    families: tuple,
    *,
    target: str | int,
    baseline: str = "none",
    token_bias: bool = False,
    rows: str = "active",
    damping: float | None = None,
) -> NormalEquations:
    """Normal equations of one record, per head: ``gram (H, F, F)`` (paper, algorithm 1, LS).

    With ``token_bias`` one column per position follows the features. ``rows="all"`` takes every
    token of the closures as a row. With ``damping`` rows are weighted by the curvature of one
    closure's KL objective, see ``gauss_newton``. A stacked record gives a leading axis of layers.
    """

    def sums(record):
        p = problem(record)
        y, side, validity = target_dual(p, record.spec, target)
        exact = y
        x, valid = design(families, side, p, validity)
        if baseline == "first_step":
            y = y - masks.center(_first_step(p, record.spec, side), valid)
        if token_bias:
            x = jnp.concatenate([x, positions(valid).astype(x.dtype)], axis=-1)
        zero = NormalEquations.zero(x.shape[-1], num_heads=x.shape[-3], dtype=x.dtype)
        keep = regression_rows(p, side, valid, rows)
        if damping is None:
            return zero.add(x, y, keep)
        shift = query_shift(p.q if side == "query" else p.k, scale=p.scale)
        kernel = ctransform.log_kernel(p.scores, record.spec.epsilon, p.mask)
        scaling = (exact - shift) / record.spec.epsilon
        weigh = gauss_newton.gauss_newton(kernel, scaling, side, damping, keep)
        return zero.add_weighted(x, y, weigh, keep)

    return over_stack(sums, record)


def regression_rows(p: Problem, side: str, valid: jax.Array, rows: str) -> jax.Array:
    """Validity ``(..., N)`` of the regression rows of ``side``; ``valid`` has the features'."""
    return valid if rows == "active" or p.validity is None else getattr(p.validity, side)


@jax.jit
def key_offset(record: Record) -> tuple[jax.Array, jax.Array]:
    """Sum and count of ``g + mean(f)`` over active keys, cost coordinates, per head.

    Added to a centred key dual it makes the pair's sum absolute while f stays centred.
    """

    def sums(record):
        p = problem(record)
        duals = sinkhorn_duals(p.scores, spec=record.spec, mask=p.mask)
        validity = masks.feature_validity(p.validity, record.spec.padding)
        q_valid, k_valid = (None, None) if validity is None else validity
        f = duals.query + query_shift(p.q, scale=p.scale)
        g = duals.key + query_shift(p.k, scale=p.scale)
        g = g + masks.masked_mean(f, q_valid, -1)
        keep = jnp.ones_like(g, bool) if k_valid is None else k_valid
        by_head = tuple(i for i in range(g.ndim) if i != g.ndim - 2)
        total = jnp.sum(jnp.where(keep, g, jnp.zeros_like(g)), axis=by_head)
        return total, jnp.sum(keep, axis=by_head, dtype=g.dtype)

    return over_stack(sums, record)


def positions(valid: jax.Array) -> jax.Array:
    """Centred indicator of every token position, ``(..., N, N)``: the columns of a token bias."""
    size = valid.shape[-1]
    one_hot = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (*valid.shape, size))
    return jnp.swapaxes(masks.center(jnp.swapaxes(one_hot, -1, -2), valid[..., None, :]), -1, -2)


def design(
    families: tuple, side: str, p: Problem, validity: masks.Validity | None
) -> tuple[jax.Array, jax.Array]:
    """Features ``(..., N, F)`` of the tokens of ``side``, and which of them have any."""
    valid = validity or masks.Validity(None, None)
    tokens = dict(scale=p.scale, query_valid=valid.query, key_valid=valid.key)
    return design_matrix(families, side, p.q, p.k, **tokens)


def _first_step(p, spec, side):
    return first_step(p.scores, side, p.q, p.k, scale=p.scale, epsilon=spec.epsilon, mask=p.mask)
