"""Tuning a fitted predictor by the divergence of the finished plans, through all closures.

Least squares fits every stage to an intermediate dual of the teacher, but the goal is the plan
after the last closure. The last marginal of a plan is exact, so its generalised divergence from
the teacher's plan needs only duals: with row and column sums r, c of the teacher and log scalings
u, v (u*, v* of the teacher), ``KL = sum r (u* - u) + sum c (v* - v)``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from asap_jax.fitting import lbfgs
from asap_jax.fitting.least_squares import einsum
from asap_jax.predictor import MLPHead, Predictor
from asap_jax.predictor.starting_dual import starting_scaling
from asap_jax.records import Record, problem
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import Closures

PATIENCE = 10  # stop after this many accepted steps without a better validation value
VALIDATION = 4  # one record in four is for validation


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
      predictor: the fitted predictor; all heads are linear.
      records: the layer's records. One in four is for validation; with fewer than four records
        the first is, and a single record serves for training too.
      whitenings: ``(H, F, F)`` or ``(F, F)`` per head, the predictor's first: the features times
        this matrix have unit covariance.
      closures: n.
      num_steps: cap on accepted steps.
      hidden: units of a hidden layer added to the predictor's head, 0 for none.
      seed: of the hidden layer.

    Returns:
      The predictor with the best validation value (the start if no step improves it), and the
      figures ``tuned_steps`` and ``validation_kl`` (before, after).
    """
    if hidden:
        head = MLPHead.around(predictor.head, whitenings[0], hidden, seed)
        predictor = dataclasses.replace(predictor, head=head)
    start = (predictor.head, *(correction.head for correction in predictor.corrections))
    zero, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, start))
    heads_at = lambda point: _moved(start, unravel(point), whitenings)
    targets = [plan_target(record) for record in records]
    validation = [i for i in range(len(records)) if i % VALIDATION == VALIDATION - 1] or [0]
    training = [i for i in range(len(records)) if i not in validation] or [0]

    def value_and_gradient(point):
        heads, back = jax.vjp(heads_at, point)
        total, gradient = 0.0, None
        for i in training:
            value, g = _value_and_gradient(heads, predictor, records[i], targets[i], closures)
            total = total + value / len(training)
            gradient = g if gradient is None else jax.tree.map(jnp.add, gradient, g)
        (gradient,) = back(jax.tree.map(lambda g: g / len(training), gradient))
        return total, gradient

    def validate(point):
        heads = heads_at(point)
        value = lambda i: _value(heads, predictor, records[i], targets[i], closures)
        return float(np.mean([np.asarray(value(i)) for i in validation]))

    search = lbfgs.start(zero, *value_and_gradient(zero))
    best = first = validate(zero)
    best_point, best_step, steps = zero, 0, 0
    while int(search.reason) == lbfgs.RUNNING and steps - best_step < PATIENCE:
        value, gradient = value_and_gradient(lbfgs.trial(search))
        search = lbfgs.tell(
            search, value, gradient, small_gradient=jnp.asarray(False), max_steps=num_steps
        )
        if int(search.num_steps) == steps:
            continue
        steps = int(search.num_steps)
        level = validate(search.point)
        if level < best:
            best, best_point, best_step = level, search.point, steps
    figures = dict(tuned_steps=steps, validation_kl=(first, best))
    return _with_heads(predictor, heads_at(best_point)), figures


@jax.jit
def plan_target(record: Record) -> PlanTarget:
    """The teacher's part of the divergence on one record (not stacked)."""
    p, spec = problem(record), record.spec
    kernel, log_target = p.log_kernel(spec.epsilon), p.log_key_target(spec.key_mass)
    start = jnp.zeros_like(kernel[..., 0, :])
    u, v = log_domain.alternate(kernel, start, Closures("key", spec.num_steps), log_target)
    plan = jnp.exp(kernel + u[..., :, None] + v[..., None, :])
    return PlanTarget(u, v, plan.sum(-1), plan.sum(-2))


def plan_divergence(
    predictor: Predictor, record: Record, target: PlanTarget, *, closures: int
) -> jax.Array:
    """Mean of ``KL(P || P_hat)`` over the problems of a record; rows of the plans sum to 1."""
    p, spec = problem(record), record.spec
    kernel, log_target = p.log_kernel(spec.epsilon), p.log_key_target(spec.key_mass)
    scaling, side = starting_scaling(predictor, p, spec)
    left = Closures(side, closures - len(predictor.corrections))
    u, v = log_domain.alternate(kernel, scaling, left, log_target)
    # A constant can move from u to v; subtracting it first keeps float32 digits.
    mass = jnp.maximum(target.rows.sum(-1, keepdims=True), 1e-30)
    gauge = jnp.sum(target.rows * (target.u - u), -1, keepdims=True) / mass
    row = jnp.sum(target.rows * (target.u - u - gauge), -1)
    column = jnp.sum(target.columns * (target.v - v + gauge), -1)
    return jnp.mean(row + column) / kernel.shape[-2]


@functools.partial(jax.jit, static_argnums=4)
def _value(heads, predictor, record, target, closures):
    return plan_divergence(_with_heads(predictor, heads), record, target, closures=closures)


_value_and_gradient = jax.jit(jax.value_and_grad(_value), static_argnums=4)


def _with_heads(predictor: Predictor, heads: tuple) -> Predictor:
    corrections = tuple(
        dataclasses.replace(correction, head=head)
        for correction, head in zip(predictor.corrections, heads[1:], strict=True)
    )
    return dataclasses.replace(predictor, head=heads[0], corrections=corrections)


def _moved(start: tuple, step: tuple, whitenings: Sequence[jax.Array]) -> tuple:
    """The heads after a step in whitened coordinates."""
    moved = []
    for head, z, whitening in zip(start, step, whitenings, strict=True):
        white = lambda x, t=whitening: einsum("...fg,...g->...f", t, x)
        if isinstance(head, MLPHead):
            hidden = jnp.einsum("...fg,...gk->...fk", whitening, z.hidden)
            z = z.replace(coefficients_in=white(z.coefficients_in), hidden=hidden)
        else:
            z = z.replace(coefficients=white(z.coefficients))
        moved.append(jax.tree.map(jnp.add, head, z))
    return tuple(moved)
