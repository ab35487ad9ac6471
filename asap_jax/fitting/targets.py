"""Calibration of one layer: from a record to normal equations and to fidelity figures.

Pure functions of one layer's record; layers stacked by a scan are mapped over.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, features, masks, metrics
from asap_jax.attention import functions
from asap_jax.fitting import gauss_newton, kl_objective
from asap_jax.fitting.least_squares import NormalEquations
from asap_jax.predictor.corrections import cost_dual
from asap_jax.predictor.predictor import first_step
from asap_jax.predictor.starting_dual import predicted_dual
from asap_jax.problem import Problem, Tokens, make_problem
from asap_jax.records import CompiledState, Record
from asap_jax.scores import query_shift
from asap_jax.scores import scores as make_scores
from asap_jax.solvers.duals import sinkhorn_duals
from asap_jax.spec import SinkhornSpec


def settle(record: Record, padding: str | None) -> Record:
    """The record with another ``padding`` in its spec; as it is for None."""
    return record.replace(spec=record.spec.with_padding(padding))


def target_dual(p: Problem, spec: SinkhornSpec, target: str | int):
    """A dual of the teacher in cost coordinates, centred, and its side.

    ``target``: ``"source"`` (closure-ready), an int n (aligned, n half-steps before the end), or
    ``"final_query"`` / ``"final_key"`` (the duals after the last steps). Returns the dual
    ``(..., N)``, its side, and the tokens, that side first, that carry features.
    """
    before_end = target if isinstance(target, int) else None
    duals = sinkhorn_duals(p.scores, spec=spec, mask=p.mask, before_end=before_end)
    side, dual = {
        "source": ("query", duals.source),
        "final_query": ("query", duals.query),
        "final_key": ("key", duals.key),
    }.get(target, (duals.aligned_side, duals.aligned))
    tokens = p.tokens(side, spec.padding)
    return cost_dual(tokens, spec, dual / spec.epsilon), side, tokens


@functools.partial(jax.jit, static_argnames=("target", "baseline", "token_bias", "rows", "damping"))
def layer_sums(
    record: Record,
    families,
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
    closure's KL objective, see ``curvature``. A stacked record gives a leading axis of layers.
    """

    def sums(record):
        p = problem(record)
        y, side, tokens = target_dual(p, record.spec, target)
        exact = y
        x, valid = design(families, tokens)
        if baseline == "first_step":
            epsilon = record.spec.epsilon
            first = first_step(p.scores, tokens, side, epsilon=epsilon, mask=p.mask)
            y = y - masks.center(first, valid)
        if token_bias:
            x = jnp.concatenate([x, positions(valid).astype(x.dtype)], axis=-1)
        zero = NormalEquations.zero(x.shape[-1], num_heads=x.shape[-3], dtype=x.dtype)
        keep = regression_rows(p, side, valid, rows)
        if damping is None:
            return zero.add(x, y, keep)
        kernel = p.log_kernel(record.spec.epsilon)
        scaling = (exact - tokens.shift()) / record.spec.epsilon
        weigh = gauss_newton.gauss_newton(kernel, scaling, side, damping, keep)
        return zero.add_weighted(x, y, weigh, keep)

    return over_stack(sums, record)


def regression_rows(p: Problem, side: str, valid, rows: str):
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


def design(families: tuple, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Features ``(..., N, F)`` of the own tokens, and which of them are valid ``(..., N)``."""
    x = features.concatenate(families, tokens)
    return x, checks.validity("valid", tokens.own_valid, x[..., 0])


@flax.struct.dataclass
class KLItem:
    """What the KL objective keeps of one record: nothing of size N^2 but the layer's own bias.

    Attributes:
      q ``(..., H, N, d)``, k ``(..., H, M, d)``; bias, mask: rank of the scores, or None.
      features ``(..., H, N, F)``, target ``(..., H, N)``: cost coordinates.
    """

    q: jax.Array
    k: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    features: jax.Array
    target: jax.Array


@jax.jit
def kl_item(record: Record, families) -> KLItem:
    """The KL item of an unstacked record, for the closure-ready source dual."""
    p = problem(record)
    y, _, tokens = target_dual(p, record.spec, "source")
    x, _ = design(families, tokens)
    if p.validity is not None:
        x = masks.zero_inactive(x, p.validity.query)
        y = jnp.where(p.validity.query, y, jnp.zeros_like(y))
    return KLItem(p.q, p.k, p.bias, p.mask, x, y)


@dataclasses.dataclass(frozen=True)
class KLBlocks:
    """From a KLItem to the Block of its microbatch; scores are formed anew each time."""

    spec: SinkhornSpec

    def __call__(self, item: KLItem) -> kl_objective.Block:
        """The Block of ``item``."""
        scale = self.spec.score_scale(item.q.shape[-1])
        s = make_scores(item.q, item.k, scale=scale, bias=item.bias)
        shift = query_shift(item.q, scale=scale)
        return kl_objective.make_block(
            item.features,
            item.target,
            s,
            shift,
            item.mask,
            epsilon=self.spec.epsilon,
            key_mass=self.spec.key_mass,
        )


@jax.jit
def layer_balance(record: Record) -> jax.Array:
    """Total mass of the teacher's weights on one record: 0 without tokens, NaN with NaN in any."""

    def mass(record):
        out, weights = call(record, functions.sinkhorn_attention, spec=record.spec)
        return jnp.sum(weights) + 0 * jnp.sum(out).astype(weights.dtype)

    return over_stack(mass, record)


@functools.partial(jax.jit, static_argnames="budgets")
def layer_fidelity(record: Record, state: CompiledState, *, budgets: tuple[int, ...]):
    """Fidelity of every operator to the teacher on one record (one *case*).

    Operators: the compiled layer with its own closures, the paper's other operator when the
    source dual was predicted, and Sinkhorn at each of ``budgets``.

    Returns a dict from operator name to a dict of scalars: ``rel_l2``, ``output_rmse``,
    ``row_error``, ``column_error``; ``"fit"`` holds ``r_squared`` of the predicted dual.
    A stacked record gives arrays over its layers.
    """

    def fidelity(record, predictor):
        spec = record.spec
        run = functools.partial(call, record)
        reference = run(functions.sinkhorn_attention, spec=spec)
        p = problem(record)
        target = jnp.exp(p.log_key_target(spec.key_mass))

        def measure(operator):
            out, weights = operator
            valid = p.validity or masks.Validity(None, None)
            tokens = None if valid.query is None else valid.query.any(-2)
            return dict(
                rel_l2=metrics.attention_rel_l2(weights, reference[1]),
                output_rmse=metrics.output_rmse(out, reference[0], query_valid=tokens),
                row_error=metrics.row_error(weights, valid.query),
                column_error=metrics.column_error(weights, valid.key, target),
            )

        result = {}
        for name, closures in operators(state.closures).items():
            result[name] = measure(
                run(functions.asap_attention, spec=spec, closures=closures, predictor=predictor)
            )
        for steps in budgets:
            small = SinkhornSpec(steps, spec.epsilon, spec.key_mass, spec.padding, spec.scale)
            result[f"Sinkhorn S={steps}"] = measure(run(functions.sinkhorn_attention, spec=small))
        result["teacher"] = measure(reference)
        result["fit"] = dict(r_squared=_r_squared(p, spec, state, predictor))
        return result

    return over_stack(fidelity, record, state.predictor)


def operators(closures) -> dict:
    """The compiled operators a fit gives, by their names in reports."""
    if closures == "none":
        return {"both duals predicted": "none"}
    if isinstance(closures, str):
        return {"ASAP-0": "one_sided", "ASAP": "two_sided"}
    return {f"ASAP n={closures}": closures}


def problem(record: Record) -> Problem:
    """The per-head problem of a record."""
    return make_problem(
        record.query, record.key, record.value, record.bias, record.mask, scale=record.spec.scale
    )


def over_stack(function, record: Record, *rest):
    """``function(record, *rest)``, mapped one by one over the layer axes of a stacked record."""
    if not record.stack:
        return function(record, *rest)
    inner = lambda args: over_stack(function, *args)
    return jax.lax.map(inner, (record, *rest))


def call(record, function, **settings):
    """Output and weights of an operator on a record, in float32 at least."""
    inputs_ = (checks.at_least_f32(x) for x in (record.query, record.key, record.value))
    return function(*inputs_, record.bias, record.mask, return_weights=True, **settings)


def _r_squared(p, spec, state, predictor):
    """Of the predicted dual; of the query dual where both are predicted."""
    target = state.closures if isinstance(state.closures, int) else "source"
    if state.closures == "none":
        target, predictor = "final_query", predictor.query
    spec = spec.with_padding(predictor.padding)
    y, _, tokens = target_dual(p, spec, target)
    dual = masks.center(predicted_dual(predictor, p, spec) + tokens.shift(), tokens.own_valid)
    valid = checks.validity("valid", tokens.own_valid, y)
    square = lambda x: jnp.sum(jnp.square(jnp.where(valid, x, jnp.zeros_like(x))))
    return 1 - square(y - dual) / square(y)
