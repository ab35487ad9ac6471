"""Corrections: after a closure, a small change of its dual before the next closure."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, features, masks
from asap_jax.predictor.heads import LinearHead
from asap_jax.predictor.statistics import growth
from asap_jax.problem import Problem, Tokens
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import OTHER
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class Correction:
    """A term added to the dual after a closure, to bring it closer to the teacher's.

    Attributes:
      features: tuple of feature families of the dual's side.
      head: LinearHead; its first input is the centred cost dual, the others are the features.
    """

    features: tuple[Any, ...]
    head: Any


def check_corrections(corrections: Any, num_closures: int) -> None:
    """Raises TypeError or ValueError unless there are fewer corrections than ``num_closures``."""
    checks.instance("corrections", corrections, tuple, "a tuple of Corrections")
    for correction in corrections:
        checks.instance("corrections", correction, Correction, "a tuple of Corrections")
        features.check_families("features of corrections", correction.features)
        checks.instance("head of corrections", correction.head, LinearHead, "a LinearHead")
    if len(corrections) >= max(num_closures, 1):
        raise ValueError(
            f"{len(corrections)} correction(s) need more than {num_closures} closure(s): the last "
            f"closure cannot be corrected, because its marginal would no longer hold"
        )


def advance(
    corrections: tuple[Correction, ...],
    p: Problem,
    spec: SinkhornSpec,
    scaling: jax.Array,
    side: str,
    inside: tuple[Problem, jax.Array | None],
) -> tuple[jax.Array, str]:
    """From the log ``scaling`` of ``side``: a closure and its correction, for each correction.

    ``inside`` is ``p`` within the limits of the predictor, see ``statistics.inside``. Returns the
    last corrected log scaling and its side.
    """
    kernel, log_target = p.log_kernel(spec.epsilon), p.log_key_target(spec.key_mass)
    within, ratio = inside
    for correction in corrections:
        scaling = log_domain.half_step(kernel, scaling, side, log_target)
        side = OTHER[side]
        if ratio is None:
            scaling = corrected(correction, p, spec, scaling, side)
        else:
            shrunk = ratio * scaling
            change = corrected(correction, within, spec, shrunk, side) - shrunk
            scaling = scaling + growth(ratio) * change
    return scaling, side


def corrected(
    correction: Correction, p: Problem, spec: SinkhornSpec, scaling: jax.Array, side: str
) -> jax.Array:
    """The corrected log scaling of ``side``; 0 at tokens that are inactive in the closures."""
    tokens = p.tokens(side, spec.padding)
    w = checks.array("coefficients", correction.head.coefficients)
    dual = cost_dual(tokens, spec, scaling)
    change = LinearHead(w[..., :1])(dual[..., None]) + features.evaluate(
        correction.features, LinearHead(w[..., 1:]), tokens
    )
    result = scaling + change.astype(scaling.dtype) / spec.epsilon
    return jnp.where(p.active(side), result, jnp.zeros_like(result))


def design(
    families: tuple[Any, ...], p: Problem, spec: SinkhornSpec, scaling: jax.Array, side: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The data to fit a correction: ``(x (..., N, 1 + F), dual (..., N), valid (..., N))``.

    ``x`` are the inputs of the head, ``dual`` is the centred cost dual before the correction.
    """
    tokens = p.tokens(side, spec.padding)
    dual = cost_dual(tokens, spec, scaling)
    x = features.concatenate(families, tokens)
    valid = checks.validity("valid", tokens.own_valid, dual)
    return jnp.concatenate([dual[..., None], x], -1), dual, valid


def cost_dual(tokens: Tokens, spec: SinkhornSpec, scaling: jax.Array) -> jax.Array:
    """The centred cost dual ``(..., N)`` of a log scaling of the own side."""
    # Centre dual and shift separately: both can be large, and float32 would lose digits.
    dual = masks.center(spec.epsilon * scaling, tokens.own_valid)
    return dual + masks.center(tokens.shift(), tokens.own_valid)
