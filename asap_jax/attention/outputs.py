"""The result of an attention call from its plan: dropout, product with the values, layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.attention.flax_call import Call, Result
from asap_jax.problem import Problem
from asap_jax.solvers.plan import DensePlan, Plan


def finish(call: Call, p: Problem, plan: Plan) -> Result:
    """The result of a call: ``(..., N, H, d_v)`` or ``(out, weights)``."""
    return_weights = checks.static_bool("return_weights", call.return_weights)
    rate = checks.dropout_rate(call.dropout_rate)
    out, weights = output_and_weights(call, p, plan, rate, return_weights)
    return (out, weights) if return_weights and weights is not None else out


def output_and_weights(
    call: Call, p: Problem, plan: Plan, rate: float, return_weights: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The output ``(..., N, H, d_v)``, and the weights if they were computed.

    They are if they are returned, needed for dropout of a ``rate`` above 0, or sown into
    ``call.module`` under Flax's name ``attention_weights``.
    """
    weights = None
    dropping = rate > 0 and not checks.static_bool("deterministic", call.deterministic)
    if return_weights or dropping or call.module is not None:
        matrix = plan.weights(p)
        weights = matrix.astype(p.dtype)
        plan = DensePlan(dropout(call, matrix) if dropping else matrix)
    if call.module is not None:
        _sow(call.module, weights)
    return jnp.swapaxes(plan.mix(p), -2, -3).astype(p.dtype), weights


def dropout(call: Call, weights: jax.Array) -> jax.Array:
    """Dropout on normalised weights, so marginals no longer hold.

    ``broadcast_dropout`` shares one dropout mask over the batch axes, as in Flax.

    Raises:
      ValueError: no ``dropout_rng``.
      TypeError: ``dropout_rng`` is not a random key.
    """
    if call.dropout_rng is None:
        raise ValueError("dropout_rng is needed when dropout_rate > 0 and deterministic=False")
    checks.random_key("dropout_rng", call.dropout_rng)
    shape, rate = weights.shape, call.dropout_rate
    if checks.static_bool("broadcast_dropout", call.broadcast_dropout):
        shape = (1,) * max(0, len(shape) - 3) + shape[-3:]
    keep = jax.random.bernoulli(call.dropout_rng, 1 - rate, shape)
    return jnp.where(keep, weights / (1 - rate), jnp.zeros_like(weights))


def _sow(module: Any, weights: jax.Array | None) -> None:
    import flax.linen
    import flax.nnx

    known = (flax.linen.Module, flax.nnx.Module)
    checks.instance("module", module, known, "a linen or nnx Module")
    kind = "intermediates" if isinstance(module, flax.linen.Module) else flax.nnx.Intermediate
    module.sow(kind, "attention_weights", weights)
