"""How close an operator is to its teacher, on one record of a layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from asap_jax import checks, masks, metrics
from asap_jax.attention import functions
from asap_jax.attention.flax_call import AttentionFunction
from asap_jax.features import SlicedPotentials
from asap_jax.fitting import targets
from asap_jax.predictor import DualPair, Predictor, row_mass
from asap_jax.predictor.starting_dual import predicted_dual
from asap_jax.problem import Problem
from asap_jax.records import CompiledState, Record, call, over_stack, problem
from asap_jax.solvers import ctransform, log_domain
from asap_jax.solvers.closures import Closures
from asap_jax.spec import SinkhornSpec

CONTINUED = "teacher, one more row step"


@jax.jit
def layer_balance(record: Record) -> jax.Array:
    """Total mass of the teacher's weights on one record.

    It is 0 if no token is active, and not finite if weights or output are not. A stacked record
    gives an array over its layers.
    """

    def mass(record):
        out, weights = call(record, functions.sinkhorn_attention, spec=record.spec)
        return jnp.sum(weights) + 0 * jnp.sum(out).astype(weights.dtype)

    return over_stack(mass, record)


@functools.partial(jax.jit, static_argnames="budgets")
def layer_fidelity(
    record: Record, state: CompiledState, *, budgets: tuple[int, ...]
) -> dict[str, dict[str, jax.Array]]:
    """Fidelity of every operator to the teacher on one record.

    The operators are those of ``operators``, Sinkhorn at each of ``budgets``, and the teacher. If
    the layer ends on rows but the teacher on columns, they include the teacher after one more row
    step: its distance is the error that remains for every dual, unless row masses are predicted.

    Returns:
      Operator name to scalars ``calls``, ``rel_l2``, ``output_rel_l2``, ``output_rmse``,
      ``row_error`` and ``column_error``. Entry ``"fit"`` holds ``r_squared`` of the predicted dual.
      A stacked record gives arrays over its layers.
    """

    def fidelity(record, predictor):
        spec = record.spec
        run = functools.partial(call, record)
        p = problem(record)
        target = jnp.exp(p.log_key_target(spec.key_mass))

        def measure(num_calls, weights, out, reference):
            valid = p.validity or masks.Validity(None, None)
            tokens = None if valid.query is None else valid.query.any(-2)
            return dict(
                calls=jnp.asarray(num_calls, weights.dtype),
                rel_l2=metrics.attention_rel_l2(weights, reference[0]),
                output_rel_l2=metrics.output_rel_l2(out, reference[1]),
                output_rmse=metrics.output_rmse(out, reference[1], query_valid=tokens),
                row_error=metrics.row_error(weights, valid.query),
                column_error=metrics.column_error(weights, valid.key, target),
            )

        result, reference = _sinkhorn(p, spec, budgets, measure)
        for name, closures in operators(state.closures, state.ending, predictor).items():
            calls = compiled_calls(predictor, spec, closures, state.ending)
            settings = dict(spec=spec, closures=closures, ending=state.ending, predictor=predictor)
            out, weights = run(functions.asap_attention, **settings)
            result[name] = measure(calls, weights, out, reference)
        continued = spec.ended(state.ending)
        if continued != spec:
            out, weights = run(functions.sinkhorn_attention, spec=continued)
            rows = row_mass.row_sums(p, spec)
            out = jnp.swapaxes(rows * jnp.swapaxes(out, -2, -3), -2, -3)
            calls = sinkhorn_calls(continued.num_steps)
            result[CONTINUED] = measure(calls, rows * weights, out, reference)
        result["fit"] = dict(r_squared=_r_squared(p, spec, state, predictor))
        return result

    return over_stack(fidelity, record, state.predictor)


def _sinkhorn(
    p: Problem, spec: SinkhornSpec, budgets: tuple[int, ...], measure: Any
) -> tuple[dict, tuple[jax.Array, jax.Array]]:
    """``measure`` of the teacher and of Sinkhorn at each budget, by name, and the teacher itself.

    The teacher is its weights ``(..., H, N, M)`` and output ``(..., N, H, d_v)``, in float32 at
    least. All run in the log domain, in one loop, so that they are compiled once.
    """
    kernel, log_target = p.log_kernel(spec.epsilon), p.log_key_target(spec.key_mass)
    row = lambda v: log_domain.half_step(kernel, v, "key", log_target)
    column = lambda u: log_domain.half_step(kernel, u, "query", log_target)
    on_rows = lambda u, v: ctransform.closure_weights(kernel, v, -1, 0.0)
    on_columns = lambda u, v: ctransform.closure_weights(kernel, u, -2, log_target)

    def half_step(step, scalings):
        one_side = (lambda u, v: (row(v), v)), (lambda u, v: (u, column(u)))
        return jax.lax.cond(step % 2 == 0, *one_side, *scalings)

    def attend(steps):
        zero = jnp.zeros_like(kernel[..., 0]), jnp.zeros_like(kernel[..., 0, :])
        scalings = jax.lax.fori_loop(0, steps - 1, half_step, zero)
        weights = jax.lax.cond(steps % 2 == 1, on_rows, on_columns, *scalings)
        out = jnp.swapaxes(ctransform.mixture(weights, p.v, p.precision), -2, -3)
        return weights, out

    def figures(reference, budget):
        number, steps, calls = budget
        own = attend(steps)
        reference = jax.tree.map(lambda *x: jnp.where(number == 0, *x), own, reference)
        return reference, measure(calls, *own, reference)

    every = [spec.num_steps, *budgets]  # the teacher first, since all are compared with it
    calls = [sinkhorn_calls(steps) for steps in every]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(attend, 1))
    counts = jnp.arange(len(every)), jnp.asarray(every), jnp.asarray(calls)
    reference, rows = jax.lax.scan(figures, zeros, counts)
    names = "teacher", *(f"Sinkhorn S={steps}" for steps in budgets)
    return {n: jax.tree.map(lambda x, i=i: x[i], rows) for i, n in enumerate(names)}, reference


def sinkhorn_calls(num_steps: int) -> int:
    """Attention calls of a Sinkhorn layer, see ``Closures.num_calls``."""
    return Closures("key", num_steps).num_calls


def compiled_calls(predictor: Any, spec: SinkhornSpec, closures: str | int, ending: str) -> int:
    """Attention calls of a compiled layer, see ``Closures.num_calls``."""
    if closures == "none":
        return 1
    number = functions.num_closures(closures, predictor.side, spec, ending)
    before = int(predictor.baseline == "first_step")  # a half-step on its own
    return before + Closures(predictor.side, number).num_calls


def operators(
    closures: str | int, ending: str, predictor: Predictor | DualPair
) -> dict[str, str | int]:
    """Name in reports to closures, for the operators that a fit to ``closures`` gives.

    A fit of the source dual gives both operators of the paper. They are called ASAP if the
    predictor is the paper's own: a linear map of sliced potentials and nothing else.
    """
    suffix = ", row ending" if ending == "row" else ""
    if closures == "none":
        return {"both duals predicted": "none"}
    if isinstance(closures, str):
        asap = isinstance(predictor, Predictor) and _is_of_the_paper(predictor)
        two = "ASAP" if asap else "compiled, two-sided"
        if suffix:
            return {f"{two}{suffix}": closures}
        return {"ASAP-0" if asap else "compiled, one-sided": "one_sided", two: "two_sided"}
    return {f"compiled, {closures} closure{'s' if closures > 1 else ''}{suffix}": closures}


def _is_of_the_paper(predictor: Predictor) -> bool:
    sliced = all(isinstance(family, SlicedPotentials) for family in predictor.features)
    return sliced and predictor.baseline == "none" and predictor.token_bias is None


@functools.partial(jax.jit, static_argnames=("function", "of_outputs", "closures", "ending"))
def rel_l2(
    record: Record, function: AttentionFunction, *, of_outputs: bool = False, **settings: Any
) -> jax.Array:
    """Relative distance of ``function`` with keywords ``settings`` from the record's teacher.

    It is that of the weights, or of the head outputs. The record is of one layer.
    """
    out, weights = call(record, function, **settings)
    return _rel_l2(record, out, weights, of_outputs)


@functools.partial(jax.jit, static_argnames=("closures", "ending", "of_outputs"))
def zero_rel_l2(
    record: Record, *, closures: int, ending: str = "teacher", of_outputs: bool = False
) -> jax.Array:
    """As ``rel_l2``, of ``closures`` closures from the dual 0."""
    p, spec = problem(record), record.spec
    continued = spec.ended(ending)
    side, log_target = continued.side_before_end(closures), p.log_key_target(spec.key_mass)
    zero = jnp.zeros_like(p.tokens(side, spec.padding).own[..., 0])
    scored = dataclasses.replace(p, v=None)
    weights = log_domain.apply(scored, zero, log_target, Closures(side, closures, spec.epsilon))
    assert p.v is not None
    if continued != spec:
        weights = row_mass.row_sums(p, spec) * weights
    out = jnp.swapaxes(ctransform.mixture(weights, p.v, p.precision), -2, -3)
    return _rel_l2(record, out, weights, of_outputs)


def _rel_l2(record: Record, out: jax.Array, weights: jax.Array, of_outputs: bool) -> jax.Array:
    true_out, true_weights = call(record, functions.sinkhorn_attention, spec=record.spec)
    if of_outputs:
        return metrics.output_rel_l2(out, true_out)
    return metrics.attention_rel_l2(weights, true_weights)


def _r_squared(p, spec, state, predictor):
    """R^2 of the predicted dual; of the query dual if both are predicted."""
    target = state.closures if isinstance(state.closures, int) else "source"
    if state.closures == "none":
        target, predictor = "final_query", predictor.query
    spec = spec.ended(state.ending).with_padding(predictor.padding)
    y, _, tokens = targets.target_dual(p, spec, target)
    dual = masks.center(predicted_dual(predictor, p, spec) + tokens.shift(), tokens.own_valid)
    valid = checks.validity("valid", tokens.own_valid, y)
    square = lambda x: jnp.sum(jnp.square(jnp.where(valid, x, jnp.zeros_like(x))))
    return 1 - square(y - dual) / square(y)
