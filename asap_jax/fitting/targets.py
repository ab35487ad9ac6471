"""From one layer's record to what a fit regresses on: a dual of the teacher, and normal equations.

Pure functions of one record; over a stack of layers (from a scan) they are mapped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from asap_jax import checks, features, masks
from asap_jax.fitting.least_squares import NormalEquations, einsum
from asap_jax.predictor import statistics
from asap_jax.predictor.corrections import cost_dual
from asap_jax.predictor.predictor import first_step
from asap_jax.problem import Problem, Tokens
from asap_jax.records import Record, over_stack, problem
from asap_jax.solvers import ctransform, log_domain
from asap_jax.solvers.closures import AXIS, Closures
from asap_jax.solvers.duals import sinkhorn_duals
from asap_jax.spec import SinkhornSpec


def target_dual(p: Problem, spec: SinkhornSpec, target: str | int) -> tuple[jax.Array, str, Tokens]:
    """The teacher's dual that a fit regresses on, centred, in cost coordinates.

    Args:
      p, spec: the problems of one record, and the teacher's convention.
      target: ``"source"`` (the dual that the paper's closures start from), an int n (the dual n
        half-steps before the end), or ``"final_query"`` / ``"final_key"`` (after the last steps).

    Returns:
      The dual ``(..., N)``, its side, and the tokens, those of that side first.
    """
    before_end = target if isinstance(target, int) else None
    duals = sinkhorn_duals(p.scores, spec=spec, mask=p.mask, before_end=before_end)
    if isinstance(target, int):
        side, dual = spec.side_before_end(target), duals.aligned
    else:
        side = "key" if target == "final_key" else "query"
        dual = {"source": duals.source, "final_query": duals.query, "final_key": duals.key}[target]
    assert dual is not None  # it is None at num_steps=1 only, which Fit.check_teacher rejects
    tokens = p.tokens(side, spec.padding)
    return cost_dual(tokens, spec, dual / spec.epsilon), side, tokens


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

    Args:
      record: one batch of a layer; a stacked record gives a leading axis of layers.
      families: the feature families, F features in all.
      target: see ``target_dual``.
      baseline: ``"first_step"`` to regress on the residual to the first half-step.
      token_bias: whether one indicator column per token position follows the features.
      rows: ``"active"`` tokens, or ``"all"`` tokens that take part in the closures.
      damping: None, or the rows are weighted by ``gauss_newton`` with this damping.
    """

    def sums(record: Record) -> NormalEquations:
        p, spec = problem(record), record.spec
        dual, side, tokens = target_dual(p, spec, target)
        x, valid = design(families, tokens)
        y = dual
        if baseline == "first_step":
            first = first_step(p.scores, tokens, side, epsilon=spec.epsilon, mask=p.mask)
            y = dual - masks.center(first, valid)
        if token_bias:
            x = jnp.concatenate([x, positions(valid).astype(x.dtype)], axis=-1)
        zero = NormalEquations.zero(x.shape[-1], num_heads=x.shape[-3], dtype=x.dtype)
        valid = regression_rows(p, side, valid, rows)
        if damping is None:
            return zero.add(x, y, valid)
        scaling = (dual - tokens.shift()) / spec.epsilon
        weigh = gauss_newton(p.log_kernel(spec.epsilon), scaling, side, damping, valid)
        return zero.add_weighted(x, y, weigh, valid)

    return over_stack(sums, record)


@jax.jit
def statistics_sums(record: Record) -> statistics.Sums:
    """Sums of the calibration statistics; a stacked record gives a leading axis of layers."""
    return over_stack(lambda record: statistics.sums(problem(record), record.spec), record)


@functools.partial(jax.jit, static_argnames="rows")
def row_mass_sums(record: Record, families: tuple, *, rows: str = "active") -> NormalEquations:
    """Normal equations of the log row sums of a teacher that ends on columns, per head.

    ``record.spec`` is that teacher continued by one row step (ValueError otherwise). Arguments and
    result as ``layer_sums``.
    """
    if record.spec.last_step != "row":
        raise ValueError(
            f"row masses need records of the continued teacher, spec.ended('row'), got "
            f"num_steps={record.spec.num_steps}"
        )

    def sums(record: Record) -> NormalEquations:
        spec = dataclasses.replace(record.spec, num_steps=record.spec.num_steps - 1)
        p = problem(record)
        x, valid = design(families, p.tokens("query", spec.padding))
        zero = NormalEquations.zero(x.shape[-1], num_heads=x.shape[-3], dtype=x.dtype)
        return zero.add(x, log_row_sums(p, spec), regression_rows(p, "query", valid, rows))

    return over_stack(sums, record)


def log_row_sums(p: Problem, spec: SinkhornSpec) -> jax.Array:
    """Centred log row sums of a column-ending teacher, ``(..., N)``; 0 at inactive queries."""
    kernel, log_target = p.log_kernel(spec.epsilon), p.log_key_target(spec.key_mass)
    start = jnp.zeros_like(kernel[..., 0, :])
    u, v = log_domain.alternate(kernel, start, Closures("key", spec.num_steps), log_target)
    # The next row closure would divide every row by its sum.
    rows = u - log_domain.half_step(kernel, v, "key", log_target)
    return masks.center(rows, p.tokens("query", spec.padding).own_valid)


def gauss_newton(
    kernel: jax.Array, scaling: jax.Array, side: str, damping: float, valid: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """The product with the damped curvature of one closure's KL objective.

    Near the teacher's dual the objective is quadratic with Hessian ``H = Diag(A 1) - A A'``, where
    A are the weights after one closure, transposed on the key side. Two factors are left out,
    epsilon and the target mass, because they are the same for all tokens of a problem.

    Args:
      kernel: log kernel ``(..., N, M)``.
      scaling: the teacher's log scaling of ``side``, ``(..., N)`` or ``(..., M)``; a constant
        added to it changes nothing.
      damping: share of plain least squares, in [0, 1].
      valid: bool, of the shape of ``scaling``: the rows of plain least squares.

    Returns:
      ``z -> (1 - damping) H z + damping Diag(valid) z`` for z ``(..., N, F)``.
    """
    a = ctransform.closure_weights(kernel, scaling, AXIS[side], 0.0)
    if side == "key":
        a = jnp.swapaxes(a, -1, -2)
    mass = a.sum(-1)[..., None]

    def weigh(z: jax.Array) -> jax.Array:
        curved = mass * z - einsum("...nm,...mf->...nf", a, einsum("...nm,...nf->...mf", a, z))
        plain = jnp.where(valid[..., None], z, jnp.zeros_like(z))
        return (1 - damping) * curved + damping * plain

    return weigh


def regression_rows(p: Problem, side: str, valid: jax.Array, rows: str) -> jax.Array:
    """Regression rows of ``side``, bool ``(..., N)``; ``valid`` are its tokens with features."""
    return valid if rows == "active" or p.validity is None else getattr(p.validity, side)


@jax.jit
def key_offset(record: Record) -> tuple[jax.Array, jax.Array]:
    """Sum and count of ``g + mean(f)`` over active keys, cost coordinates, per head.

    Both predicted duals are centred. With the mean of this offset added to the key dual, their
    sum has the teacher's absolute level.
    """

    def sums(record: Record) -> tuple[jax.Array, jax.Array]:
        p = problem(record)
        duals = sinkhorn_duals(p.scores, spec=record.spec, mask=p.mask)
        keys = p.tokens("key", record.spec.padding)
        f = duals.query + keys.swapped().absolute_shift()
        g = duals.key + keys.absolute_shift() + masks.masked_mean(f, keys.other_valid, -1)
        valid = checks.validity("valid", keys.own_valid, g)
        all_but_heads = tuple(i for i in range(g.ndim) if i != g.ndim - 2)
        total = jnp.sum(jnp.where(valid, g, jnp.zeros_like(g)), axis=all_but_heads)
        return total, jnp.sum(valid, axis=all_but_heads, dtype=g.dtype)

    return over_stack(sums, record)


def positions(valid: jax.Array) -> jax.Array:
    """Centred indicator of every token position, ``(..., N, N)``: the columns of a token bias."""
    size = valid.shape[-1]
    one_hot = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (*valid.shape, size))
    return jnp.swapaxes(masks.center(one_hot, valid[..., None, :]), -1, -2)


def design(families: tuple, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Features ``(..., N, F)`` of the own tokens, and the validity ``(..., N)`` of the tokens."""
    x = features.concatenate(families, tokens)
    return x, checks.validity("valid", tokens.own_valid, x[..., 0])
