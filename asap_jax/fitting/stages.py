"""Fitting one way of predicting in stages, on the records of one layer.

A stage is one least-squares fit whose features depend on the fits before it: the rounds of a
codebook on alternating sides, then the corrections after the closures.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import masks
from asap_jax.features import Codebook, kmeans
from asap_jax.fitting import targets
from asap_jax.fitting.least_squares import NormalEquations, Regression
from asap_jax.predictor import corrections, starting_dual
from asap_jax.predictor.predictor import Correction, LinearHead, Predictor
from asap_jax.records import Record, problem
from asap_jax.solvers import ctransform, log_domain
from asap_jax.spec import SinkhornSpec

NUM_TOKENS = 8192  # tokens per head and side that a codebook is made from


class Fitted(NamedTuple):
    """A predictor, figures of the dual it predicts, and what whitens each head's features."""

    predictor: Predictor
    figures: dict[str, Any]
    whitenings: tuple[jax.Array, ...]


def half_step(spec: SinkhornSpec, before_end: int) -> int:
    """``before_end``, moved by whole iterations to a half-step that the teacher takes."""
    while before_end > spec.num_steps - 1:
        before_end -= 2
    return before_end


def fit_rounds(
    records: Sequence[Record],
    features: tuple,
    num_closures: int,
    regression: Regression,
    *,
    padding: str | None = None,
    rounds: int = 0,
    num_centres: int = 16,
    damping: float | None = None,
    seed: int = 0,
) -> Fitted:
    """The predictor of the dual that ``num_closures`` closures start from.

    Args:
      records: the layer's calibration records, not stacked, already with ``padding``.
      features: feature families of every round.
      num_closures: n, ``1 <= n <= num_steps - 1``.
      regression: settings of every round's least squares.
      padding: which tokens carry features, see ``Predictor``.
      rounds: rounds after the first one; each adds a codebook that uses the round before.
      num_centres: R of a codebook.
      damping: None, or the last round is weighted by the curvature of its KL objective.
      seed: of the codebooks.

    Raises:
      ValueError: no active token, or values that are not finite.
    """
    spec = records[0].spec
    centres = _centres(records, num_centres, seed) if rounds else {}
    fitted = None
    for left in range(rounds, -1, -1):
        before_end = half_step(spec, num_closures + left)
        side, families = spec.side_before_end(before_end), features
        if fitted is not None:
            ours, others = centres[side], centres[log_domain.OTHER[side]]
            book = Codebook(ours, others, fitted.predictor, epsilon=spec.epsilon)
            families = (*features, book)
        target = before_end or ("final_query" if side == "query" else "final_key")
        settings = dict(target=target, rows=regression.rows, damping=None if left else damping)
        sums = [targets.layer_sums(record, families, **settings) for record in records]
        fitted = solve(regression, sums, families, side, padding)
    return fitted


def solve(
    regression: Regression,
    sums: Sequence[NormalEquations],
    families: tuple,
    side: str,
    padding: str | None,
) -> Fitted:
    """The predictor of one stage, from the normal equations of its batches."""
    sums, coefficients, figures = regression.solve(functools.reduce(operator.add, sums))
    predictor = Predictor(families, LinearHead(coefficients), side=side, padding=padding)
    return Fitted(predictor, figures, (sums.whitening(regression.ridge),))


def add_corrections(
    fitted: Fitted,
    records: Sequence[Record],
    features: tuple,
    num_closures: int,
    regression: Regression,
) -> Fitted:
    """``fitted`` with a correction of the dual after every closure but the last."""
    predictor, whitenings = fitted.predictor, fitted.whitenings
    for taken in range(1, num_closures):
        settings = dict(before_end=num_closures - taken, rows=regression.rows)
        sums = [correction_sums(record, predictor, features, **settings) for record in records]
        total, coefficients, _ = regression.solve(functools.reduce(operator.add, sums))
        correction = Correction(features, LinearHead(coefficients))
        predictor = predictor.replace(corrections=(*predictor.corrections, correction))
        whitenings = (*whitenings, total.whitening(regression.ridge))
    return Fitted(predictor, fitted.figures, whitenings)


@functools.partial(jax.jit, static_argnames=("before_end", "rows"))
def correction_sums(
    record: Record, predictor: Predictor, families: tuple, *, before_end: int, rows: str
) -> NormalEquations:
    """Normal equations of the next correction of a chain, per head.

    The closure after those that ``predictor`` corrects is taken; the correction, on the features
    of ``families``, is to bring its dual to the teacher's own, ``before_end`` half-steps before
    the end.
    """
    p, spec = problem(record), record.spec
    kernel, target = log_domain.terms(p, spec)
    scaling, side = starting_dual.predicted_scaling(predictor, p, spec)
    log_target = target if side == "query" else jnp.zeros((), kernel.dtype)
    scaling = ctransform.closure_step(kernel, scaling, log_domain.AXIS[side], log_target)
    y, side, _ = targets.target_dual(p, spec, before_end)
    x, dual, valid = corrections.design(families, p, spec, scaling, side)
    zero = NormalEquations.zero(x.shape[-1], num_heads=x.shape[-3], dtype=x.dtype)
    return zero.add(x, y - dual, targets.regression_rows(p, side, valid, rows))


def _centres(records: Sequence[Record], num_centres: int, seed: int) -> dict[str, jax.Array]:
    """Centres ``(H, R, d)`` of either side, from up to ``NUM_TOKENS`` tokens a head."""
    gathered = [tokens(record) for record in records]
    centres = {}
    for i, side in enumerate(("query", "key")):
        x, valid = (np.concatenate([np.asarray(g[side][j]) for g in gathered], 1) for j in (0, 1))
        places = np.flatnonzero(valid.any(0))
        if len(places) > NUM_TOKENS:
            places = np.random.default_rng(seed).choice(places, NUM_TOKENS, replace=False)
        rng = jax.random.fold_in(jax.random.key(seed), i)
        x, valid = jnp.asarray(x[:, places]), jnp.asarray(valid[:, places])
        centres[side] = kmeans.kmeans(rng, x, valid, num_centres=num_centres)
    return centres


@jax.jit
def tokens(record: Record) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Per side, the tokens ``(H, T, d)`` of a record and which of them carry features."""
    p = problem(record)
    validity = masks.feature_validity(p.validity, record.spec.padding)
    heads = lambda x, rest: jnp.moveaxis(x, -1 - rest, 0).reshape(
        x.shape[-1 - rest], -1, *x.shape[x.ndim - rest + 1 :]
    )
    result = {}
    for side, x in (("query", p.q), ("key", p.k)):
        valid = jnp.ones(x.shape[:-1], bool) if validity is None else getattr(validity, side)
        result[side] = heads(x, 2), heads(valid, 1)
    return result
