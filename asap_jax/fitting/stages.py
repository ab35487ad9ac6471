"""Fitting a predictor in stages, on the records of one layer.

A stage is one least-squares fit whose features depend on earlier fits: first the rounds of a
codebook on alternating sides, then the corrections after the closures.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks
from asap_jax.features import Codebook, kmeans
from asap_jax.fitting import targets
from asap_jax.fitting.least_squares import NormalEquations, Regression, rows_by_head
from asap_jax.predictor import Correction, LinearHead, Predictor, corrections
from asap_jax.predictor.row_mass import RowMass
from asap_jax.predictor.starting_dual import starting_scaling
from asap_jax.records import Record, problem
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import OTHER
from asap_jax.spec import SinkhornSpec

NUM_TOKENS = 8192  # most tokens per head and side from which a codebook is computed


class Fitted(NamedTuple):
    """A predictor, figures of its fit, and a whitening of the features of each of its heads."""

    predictor: Predictor
    figures: dict[str, Any]
    whitenings: tuple[jax.Array, ...]


def half_step(spec: SinkhornSpec, before_end: int) -> int:
    """``before_end``, reduced by whole iterations until the teacher has that half-step."""
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
      damping: None, or the damping of ``targets.gauss_newton`` for the rows of the last round.
      seed: of the codebooks.

    Raises:
      ValueError: no active token, or values that are not finite.
    """
    spec = records[0].spec
    centres = _centres(records, num_centres, seed) if rounds else {}

    def fit(later_rounds: int) -> Fitted:
        before_end = half_step(spec, num_closures + later_rounds)
        side, families = spec.side_before_end(before_end), features
        if later_rounds < rounds:
            previous = fit(later_rounds + 1).predictor
            book = Codebook(centres[side], centres[OTHER[side]], previous, epsilon=spec.epsilon)
            families = (*features, book)
        settings = dict(
            target=before_end or f"final_{side}",
            rows=regression.rows,
            damping=None if later_rounds else damping,
        )
        sums = [targets.layer_sums(record, families, **settings) for record in records]
        return solve(regression, sums, families, side, padding)

    return fit(0)


def solve(
    regression: Regression,
    sums: Sequence[NormalEquations],
    families: tuple,
    side: str,
    padding: str | None,
) -> Fitted:
    """The predictor of one stage, from the normal equations of its batches."""
    total, coefficients, figures = regression.solve(functools.reduce(operator.add, sums))
    predictor = Predictor(families, LinearHead(coefficients), side=side, padding=padding)
    return Fitted(predictor, figures, (total.whitening(regression.ridge),))


def solve_row_mass(
    regression: Regression, sums: Sequence[NormalEquations], families: tuple
) -> RowMass:
    """The row masses, from the normal equations of their batches."""
    _, coefficients, _ = regression.solve(functools.reduce(operator.add, sums))
    return RowMass(families, LinearHead(coefficients))


def add_corrections(
    fitted: Fitted,
    records: Sequence[Record],
    features: tuple,
    num_closures: int,
    regression: Regression,
) -> Fitted:
    """``fitted`` with a correction of the dual after every closure except the last."""
    predictor, whitenings = fitted.predictor, fitted.whitenings
    for closure in range(1, num_closures):
        settings = dict(before_end=num_closures - closure, rows=regression.rows)
        sums = [correction_sums(record, predictor, features, **settings) for record in records]
        total, coefficients, _ = regression.solve(functools.reduce(operator.add, sums))
        correction = Correction(features, LinearHead(coefficients))
        chain = (*predictor.corrections, correction)
        predictor = dataclasses.replace(predictor, corrections=chain)
        whitenings = (*whitenings, total.whitening(regression.ridge))
    return Fitted(predictor, fitted.figures, whitenings)


@functools.partial(jax.jit, static_argnames=("before_end", "rows"))
def correction_sums(
    record: Record, predictor: Predictor, families: tuple, *, before_end: int, rows: str
) -> NormalEquations:
    """Normal equations of the next correction of a chain, per head.

    The predictor's corrected closures are run, and then one more. The correction is regressed on
    the dual after that closure and the features ``families``; its target is the teacher's dual
    ``before_end`` half-steps before the end, minus the dual after that closure.
    """
    p, spec = problem(record), record.spec
    scaling, side = starting_scaling(predictor, p, spec)
    log_target = p.log_key_target(spec.key_mass)
    scaling = log_domain.half_step(p.log_kernel(spec.epsilon), scaling, side, log_target)
    y, side, _ = targets.target_dual(p, spec, before_end)
    x, dual, valid = corrections.design(families, p, spec, scaling, side)
    zero = NormalEquations.zero(x.shape[-1], num_heads=x.shape[-3], dtype=x.dtype)
    return zero.add(x, y - dual, targets.regression_rows(p, side, valid, rows))


def _centres(records: Sequence[Record], num_centres: int, seed: int) -> dict[str, jax.Array]:
    """Centres ``(H, R, d)`` of each side, from up to ``NUM_TOKENS`` tokens per head."""
    centres = {}
    for i, side in enumerate(("query", "key")):
        parts = [_feature_tokens(record, side=side) for record in records]
        tokens, valid = (np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True))
        places = np.flatnonzero(valid.any(0))
        if len(places) > NUM_TOKENS:
            places = np.random.default_rng(seed).choice(places, NUM_TOKENS, replace=False)
        rng = jax.random.fold_in(jax.random.key(seed), i)
        x, x_valid = jnp.asarray(tokens[:, places]), jnp.asarray(valid[:, places])
        centres[side] = kmeans.kmeans(rng, x, x_valid, num_centres=num_centres)
    return centres


@functools.partial(jax.jit, static_argnames="side")
def _feature_tokens(record: Record, *, side: str) -> tuple[jax.Array, jax.Array]:
    """The tokens ``(H, T, d)`` of one side of a record, and which of them carry features."""
    tokens = problem(record).tokens(side, record.spec.padding)
    valid = checks.validity("valid", tokens.own_valid, tokens.own[..., 0])
    return rows_by_head(tokens.own, 1), rows_by_head(valid, 0)
