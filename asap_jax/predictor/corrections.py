"""Corrected closures: after a closure, a small correction of the dual before the next one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from asap_jax import checks, features, masks, problem
from asap_jax.predictor.predictor import Correction, LinearHead
from asap_jax.scores import query_shift
from asap_jax.solvers import ctransform, log_domain
from asap_jax.spec import SinkhornSpec


def checked(corrections: tuple, num_steps: int) -> tuple:
    """``corrections`` as they are.

    Raises:
      TypeError: another thing than a tuple of Corrections with linear heads.
      ValueError: the last closure would be corrected too.
    """
    checks.instance("corrections", corrections, tuple, "a tuple of Corrections")
    for correction in corrections:
        checks.instance("corrections", correction, Correction, "a tuple of Corrections")
        features.check_families("features of corrections", correction.features)
        checks.instance("head of corrections", correction.head, LinearHead, "a LinearHead")
    if len(corrections) >= max(num_steps, 1):
        raise ValueError(
            f"{len(corrections)} correction(s) need more than {num_steps} closure(s): the last "
            f"closure is never corrected, or its marginal would not hold"
        )
    return corrections


def advance(
    corrections: tuple[Correction, ...],
    p: problem.Problem,
    spec: SinkhornSpec,
    scaling: jax.Array,
    side: str,
) -> tuple[jax.Array, str]:
    """One closure and its correction after another, from the log ``scaling`` of ``side``.

    Returns the last corrected log scaling and its side, those given without ``corrections``.
    """
    if not corrections:
        return scaling, side
    kernel, log_target = log_domain.terms(p, spec)
    for correction in corrections:
        target = log_target if side == "query" else jnp.zeros((), kernel.dtype)
        scaling = ctransform.closure_step(kernel, scaling, log_domain.AXIS[side], target)
        side = log_domain.OTHER[side]
        scaling = apply(correction, p, spec, scaling, side)
    return scaling, side


def apply(correction: Correction, p, spec, scaling: jax.Array, side: str) -> jax.Array:
    """The corrected log scaling of ``side``; 0 at tokens that the closures leave out."""
    t = _tokens(p, spec, scaling, side)
    w = checks.array("coefficients", correction.head.coefficients)
    first = LinearHead(w[..., :1])(t.dual[..., None])
    rest = features.evaluate(
        correction.features, LinearHead(w[..., 1:]), t.own, t.other, **t.settings
    )
    moved = scaling + (first + rest).astype(scaling.dtype) / spec.epsilon
    if p.validity is None:
        return moved
    return jnp.where(getattr(p.validity, side), moved, jnp.zeros_like(moved))


def design(families: tuple[Any, ...], p, spec, scaling: jax.Array, side: str):
    """What a correction is fitted on: ``(x (..., N, 1 + F), dual (..., N), valid (..., N))``.

    ``dual`` is the centred cost dual that the correction is added to.
    """
    t = _tokens(p, spec, scaling, side)
    x = features.concatenate(families, t.own, t.other, **t.settings)
    valid = t.settings["query_valid"]
    valid = jnp.ones_like(t.dual, bool) if valid is None else valid
    return jnp.concatenate([t.dual[..., None], x], -1), t.dual, valid


class _tokens:
    """Both sides' tokens, own first, and the centred cost dual of the own side."""

    def __init__(self, p: problem.Problem, spec: SinkhornSpec, scaling: jax.Array, side: str):
        validity = masks.feature_validity(p.validity, spec.padding) or masks.Validity(None, None)
        self.own, self.other = (p.q, p.k) if side == "query" else (p.k, p.q)
        valid, other_valid = validity if side == "query" else validity[::-1]
        self.settings = dict(scale=p.scale, query_valid=valid, key_valid=other_valid)
        shift = query_shift(self.own, scale=p.scale)
        self.dual = masks.center(spec.epsilon * scaling, valid) + masks.center(shift, valid)
