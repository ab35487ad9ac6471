"""Corrections: after a closure, a small change of its dual before the next closure."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, features, masks
from asap_jax.predictor.heads import LinearHead
from asap_jax.problem import Problem, Tokens
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import OTHER
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class Correction:
    """What is added to the dual that a closure gave, to bring it nearer to the teacher's.

    Attributes:
      features: tuple of feature families of that side.
      head: linear, on the closure's centred cost dual and then the features.
    """

    features: tuple[Any, ...]
    head: Any


def check_corrections(corrections: Any, num_closures: int) -> None:
    """Raises TypeError or ValueError unless the corrections fit between ``num_closures``.

    The last closure is never corrected: its marginal would no longer hold.
    """
    checks.instance("corrections", corrections, tuple, "a tuple of Corrections")
    for correction in corrections:
        checks.instance("corrections", correction, Correction, "a tuple of Corrections")
        features.check_families("features of corrections", correction.features)
        checks.instance("head of corrections", correction.head, LinearHead, "a LinearHead")
    if len(corrections) >= max(num_closures, 1):
        raise ValueError(
            f"{len(corrections)} correction(s) need more than {num_closures} closure(s): the last "
            f"closure is never corrected, or its marginal would not hold"
        )


def advance(
    corrections: tuple[Correction, ...],
    p: Problem,
    spec: SinkhornSpec,
    scaling: jax.Array,
    side: str,
) -> tuple[jax.Array, str]:
    """Takes one closure for each correction and corrects it, from the log ``scaling`` of ``side``.

    Returns the last corrected log scaling and its side.
    """
    kernel, log_target = p.log_kernel(spec.epsilon), p.log_key_target(spec.key_mass)
    for correction in corrections:
        scaling = log_domain.half_step(kernel, scaling, side, log_target)
        side = OTHER[side]
        scaling = corrected(correction, p, spec, scaling, side)
    return scaling, side


def corrected(
    correction: Correction, p: Problem, spec: SinkhornSpec, scaling: jax.Array, side: str
) -> jax.Array:
    """The corrected log scaling of ``side``; 0 at tokens that the closures leave out."""
    tokens = p.tokens(side, spec.padding)
    w = checks.array("coefficients", correction.head.coefficients)
    dual = cost_dual(tokens, spec, scaling)
    change = LinearHead(w[..., :1])(dual[..., None]) + features.evaluate(
        correction.features, LinearHead(w[..., 1:]), tokens
    )
    moved = scaling + change.astype(scaling.dtype) / spec.epsilon
    return jnp.where(p.active(side), moved, jnp.zeros_like(moved))


def design(
    families: tuple[Any, ...], p: Problem, spec: SinkhornSpec, scaling: jax.Array, side: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a correction is fitted on: ``(x (..., N, 1 + F), dual (..., N), valid (..., N))``.

    ``dual`` is the centred cost dual that the correction is added to.
    """
    tokens = p.tokens(side, spec.padding)
    dual = cost_dual(tokens, spec, scaling)
    x = features.concatenate(families, tokens)
    valid = checks.validity("valid", tokens.own_valid, dual)
    return jnp.concatenate([dual[..., None], x], -1), dual, valid


def cost_dual(tokens: Tokens, spec: SinkhornSpec, scaling: jax.Array) -> jax.Array:
    """The centred cost dual ``(..., N)`` of a log scaling of the own side.

    Dual and shift are centred apart before they are added, which keeps float32 digits.
    """
    dual = masks.center(spec.epsilon * scaling, tokens.own_valid)
    return dual + masks.center(tokens.shift(), tokens.own_valid)
