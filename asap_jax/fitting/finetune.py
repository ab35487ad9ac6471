"""Tuning a fitted predictor by the divergence of the finished plans, through all closures.

Least squares fits every stage to the teacher's dual there; what counts is the plan after the last
closure. Its generalised divergence from the teacher's needs no matrix but the kernel: the last
marginal is exact, so with row and column sums r, c of the teacher and log scalings u, v,
``KL = sum r (u* - u) + sum c (v* - v)``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from asap_jax.fitting import lbfgs
from asap_jax.predictor import starting_dual
from asap_jax.predictor.predictor import MLPHead, Predictor
from asap_jax.records import Record, problem
from asap_jax.solvers import log_domain as closing

PATIENCE = 10  # accepted steps without a better validation value
VALIDATION = 4  # one record in so many validates


@flax.struct.dataclass
class PlanTarget:
    """The teacher's final log scalings ``(..., N)``, ``(..., M)`` and its plan's marginals."""

    u: jax.Array
    v: jax.Array
    rows: jax.Array
    columns: jax.Array


def tune(
    predictor: Predictor,
    records: Sequence[Record],
    whitenings: Sequence[jax.Array],
    *,
    closures: int,
    num_steps: int,
    hidden: int = 0,
    seed: int = 0,
) -> tuple[Predictor, dict[str, Any]]:
    """L-BFGS on the heads of a predictor and its corrections, with early stopping.

    Args:
      predictor: the fitted predictor, linear heads throughout.
      records: the layer's records; one in four validates (the first does if it is the only one).
      whitenings: one ``(H, F, F)`` or ``(F, F)`` a head, predictor first: features times it have
        unit covariance.
      closures: n.
      num_steps: cap on accepted steps.
      hidden: units of a hidden layer added to the predictor's head, 0 for none.
      seed: of the hidden layer.

    Returns:
      The predictor that validated best, possibly the one given, and ``tuned_steps``,
      ``validation_kl`` before and after.
    """
    if hidden:
        head = MLPHead.around(predictor.head, whitenings[0], hidden, seed)
        predictor = predictor.replace(head=head)
    start = _heads(predictor)
    zero, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, start))
    whitenings = tuple(whitenings)
    place = lambda point: _moved(start, unravel(point), whitenings)
    targets = [plan_target(record) for record in records]
    validation = [i for i in range(len(records)) if i % VALIDATION == VALIDATION - 1] or [0]
    training = [i for i in range(len(records)) if i not in validation] or [0]

    def slope(point):
        moved, back = jax.vjp(place, point)
        total, gradient = 0.0, None
        for i in training:
            value, g = _value_and_slope(moved, predictor, records[i], targets[i], closures)
            total = total + value / len(training)
            gradient = g if gradient is None else jax.tree.map(jnp.add, gradient, g)
        (gradient,) = back(jax.tree.map(lambda g: g / len(training), gradient))
        return total, gradient

    def validate(point):
        moved = place(point)
        values = [
            _value(moved, predictor, records[i], targets[i], closures=closures) for i in validation
        ]
        return float(np.mean([np.asarray(value) for value in values]))

    search = lbfgs.start(zero, *slope(zero))
    best = first = validate(zero)
    kept, since, seen = zero, 0, 0
    while int(search.reason) == lbfgs.RUNNING and since < PATIENCE:
        value, gradient = slope(lbfgs.trial(search))
        search = lbfgs.tell(
            search, value, gradient, small_gradient=jnp.asarray(False), max_steps=num_steps
        )
        if int(search.num_steps) == seen:
            continue
        seen, since = int(search.num_steps), since + 1
        level = validate(search.point)
        if level < best:
            best, kept, since = level, search.point, 0
    figures = dict(tuned_steps=seen, validation_kl=(first, best))
    return _with_heads(predictor, place(kept)), figures


@jax.jit
def plan_target(record: Record) -> PlanTarget:
    """The teacher's side of the divergence, of one record that is not stacked."""
    p, spec = problem(record), record.spec
    kernel, log_target = closing.terms(p, spec)
    start = jnp.zeros_like(kernel[..., 0, :])
    u, v = closing.alternate(
        kernel, start, side="key", num_steps=spec.num_steps, log_target=log_target
    )
    plan = jnp.exp(kernel + u[..., :, None] + v[..., None, :])
    return PlanTarget(u, v, plan.sum(-1), plan.sum(-2))


def plan_divergence(
    predictor: Predictor, record: Record, target: PlanTarget, *, closures: int
) -> jax.Array:
    """Mean of ``KL(P || P_hat)``, plans of unit mass per query, over the problems of a record."""
    p, spec = problem(record), record.spec
    kernel, log_target = closing.terms(p, spec)
    scaling, side = starting_dual.predicted_scaling(predictor, p, spec)
    left = closures - len(predictor.corrections)
    u, v = closing.alternate(kernel, scaling, side=side, num_steps=left, log_target=log_target)
    # One constant moves between u and v: taking it out keeps float32 digits.
    some = jnp.maximum(target.rows.sum(-1, keepdims=True), 1e-30)
    gauge = jnp.sum(target.rows * (target.u - u), -1, keepdims=True) / some
    row = jnp.sum(target.rows * (target.u - u - gauge), -1)
    column = jnp.sum(target.columns * (target.v - v + gauge), -1)
    return jnp.mean(row + column) / kernel.shape[-2]


@functools.partial(jax.jit, static_argnames="closures")
def _value(heads, predictor, record, target, *, closures):
    return plan_divergence(_with_heads(predictor, heads), record, target, closures=closures)


@functools.partial(jax.jit, static_argnums=4)
def _value_and_slope(heads, predictor, record, target, closures):
    function = functools.partial(_value, closures=closures)
    return jax.value_and_grad(function)(heads, predictor, record, target)


def _heads(predictor: Predictor) -> tuple:
    return (predictor.head, *(correction.head for correction in predictor.corrections))


def _with_heads(predictor: Predictor, heads: tuple) -> Predictor:
    corrections = tuple(
        correction.replace(head=head)
        for correction, head in zip(predictor.corrections, heads[1:], strict=True)
    )
    return predictor.replace(head=heads[0], corrections=corrections)


def _moved(start: tuple, step: tuple, whitenings: tuple) -> tuple:
    """The heads after a step in whitened coordinates."""
    moved = []
    for head, z, whitening in zip(start, step, whitenings, strict=True):
        if isinstance(head, MLPHead):
            z = z.replace(
                coefficients_in=_white(whitening, z.coefficients_in),
                hidden=jnp.einsum("...fg,...gk->...fk", whitening, z.hidden),
            )
        else:
            z = z.replace(coefficients=_white(whitening, z.coefficients))
        moved.append(jax.tree.map(jnp.add, head, z))
    return tuple(moved)


def _white(whitening, z):
    return jnp.einsum("...fg,...g->...f", whitening, z, precision=jax.lax.Precision.HIGHEST)
