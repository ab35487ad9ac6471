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
from asap_jax.fitting import targets
from asap_jax.predictor.starting_dual import predicted_dual
from asap_jax.records import CompiledState, Record, call, over_stack, problem
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import Closures


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

    The operators are those of ``operators``, Sinkhorn at each of ``budgets``, and the teacher.

    Returns:
      Operator name to scalars ``rel_l2``, ``output_rmse``, ``row_error``, ``column_error``. Entry
      ``"fit"`` holds ``r_squared`` of the predicted dual. A stacked record gives arrays over its
      layers.
    """

    def fidelity(record, predictor):
        spec = record.spec
        run = functools.partial(call, record)
        reference = run(functions.sinkhorn_attention, spec=spec)
        p = problem(record)
        target = jnp.exp(p.log_key_target(spec.key_mass))

        def measure(out, weights):
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
            settings = dict(spec=spec, closures=closures, predictor=predictor)
            result[name] = measure(*run(functions.asap_attention, **settings))
        for steps in budgets:
            small = dataclasses.replace(spec, num_steps=steps)
            result[f"Sinkhorn S={steps}"] = measure(*run(functions.sinkhorn_attention, spec=small))
        result["teacher"] = measure(*reference)
        result["fit"] = dict(r_squared=_r_squared(p, spec, state, predictor))
        return result

    return over_stack(fidelity, record, state.predictor)


def operators(closures: str | int) -> dict[str, str | int]:
    """Name in reports to closures, for the operators that a fit to ``closures`` gives.

    A fit of the source dual gives both operators of the paper.
    """
    if closures == "none":
        return {"both duals predicted": "none"}
    if isinstance(closures, str):
        return {"ASAP-0": "one_sided", "ASAP": "two_sided"}
    return {f"compiled, {closures} closure{'s' if closures > 1 else ''}": closures}


@functools.partial(jax.jit, static_argnames=("function", "closures"))
def rel_l2(record: Record, function: AttentionFunction, **settings: Any) -> jax.Array:
    """Attention rel-l2 of ``function`` with its keywords ``settings`` on one unstacked record."""
    return metrics.attention_rel_l2(call(record, function, **settings)[1], _teacher_weights(record))


@functools.partial(jax.jit, static_argnames="closures")
def zero_rel_l2(record: Record, *, closures: int) -> jax.Array:
    """Attention rel-l2 of ``closures`` closures from the dual 0 that end as the teacher does."""
    p, spec = problem(record), record.spec
    side, log_target = spec.side_before_end(closures), p.log_key_target(spec.key_mass)
    zero = jnp.zeros_like(p.tokens(side, spec.padding).own[..., 0])
    weights = log_domain.weights_after(p, zero, log_target, Closures(side, closures, spec.epsilon))
    return metrics.attention_rel_l2(weights, _teacher_weights(record))


def _teacher_weights(record):
    return call(record, functions.sinkhorn_attention, spec=record.spec)[1]


def _r_squared(p, spec, state, predictor):
    """R^2 of the predicted dual; of the query dual if both are predicted."""
    target = state.closures if isinstance(state.closures, int) else "source"
    if state.closures == "none":
        target, predictor = "final_query", predictor.query
    spec = spec.with_padding(predictor.padding)
    y, _, tokens = targets.target_dual(p, spec, target)
    dual = masks.center(predicted_dual(predictor, p, spec) + tokens.shift(), tokens.own_valid)
    valid = checks.validity("valid", tokens.own_valid, y)
    square = lambda x: jnp.sum(jnp.square(jnp.where(valid, x, jnp.zeros_like(x))))
    return 1 - square(y - dual) / square(y)
