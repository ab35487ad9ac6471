"""From a plan to an attention call's result: dropout, value mixing, layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.problem import Problem
from asap_jax.solvers import plan as plans


def drops(name: str, rate, deterministic) -> bool:
    """Whether dropout is on.

    Raises:
      ValueError: a rate outside [0, 1).
      TypeError: a traced or non-bool ``deterministic``.
    """
    rate = checks.non_negative_float(name, rate)
    if rate >= 1:
        raise ValueError(f"{name} must be in [0, 1), got {rate}")
    return rate > 0 and not checks.static_bool("deterministic", deterministic)


def dropout(weights: jax.Array, *, rng, rate: float, broadcast: bool) -> jax.Array:
    """Attention dropout after normalisation; it breaks the marginals by design.

    ``broadcast`` shares one mask over the batch axes, as in Flax.

    Raises:
      ValueError: no rng; TypeError: another thing than a random key.
    """
    if rng is None:
        raise ValueError("dropout_rng is needed when dropout_rate > 0 and deterministic=False")
    checks.random_key("dropout_rng", rng)
    shape = weights.shape
    if checks.static_bool("broadcast_dropout", broadcast):
        shape = (1,) * max(0, len(shape) - 3) + shape[-3:]
    keep = jax.random.bernoulli(rng, 1 - rate, shape)
    return jnp.where(keep, weights / (1 - rate), jnp.zeros_like(weights))


def finish(
    problem: Problem,
    plan: plans.Plan,
    *,
    dropout_rng=None,
    dropout_rate=0.0,
    broadcast_dropout=True,
    deterministic=True,
    precision=None,
    module=None,
    return_weights=False,
):
    """Dropout, value mixing and layout; ``(..., N, H, d_v)`` or ``(out, weights)``.

    The weights are formed only where they are asked for, dropped from or sown: with ``module``
    they are sown under Flax's name ``attention_weights``.
    """
    return_weights = checks.static_bool("return_weights", return_weights)
    dropping = drops("dropout_rate", dropout_rate, deterministic)
    weights = plan.weights() if return_weights or dropping or module is not None else None
    if module is not None:
        _sow(module, weights.astype(problem.dtype))
    if dropping:
        mixed = dropout(weights, rng=dropout_rng, rate=dropout_rate, broadcast=broadcast_dropout)
        plan = plans.Dense(mixed)
    elif weights is not None:
        plan = plans.Dense(weights)
    out = plan.mix(problem.v, precision)
    out = jnp.swapaxes(out, -2, -3).astype(problem.dtype)
    if not return_weights:
        return out
    return out, weights.astype(problem.dtype)


def _sow(module, weights) -> None:
    import flax.linen
    import flax.nnx

    known = (flax.linen.Module, flax.nnx.Module)
    checks.instance("module", module, known, "a linen or nnx Module")
    kind = "intermediates" if isinstance(module, flax.linen.Module) else flax.nnx.Intermediate
    module.sow(kind, "attention_weights", weights)
