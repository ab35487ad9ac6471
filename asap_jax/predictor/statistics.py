"""Calibration statistics: what the features of a layer depend on, measured while calibrating.

A predictor extrapolates when the tokens of a call differ in size from those it was fitted to. Four
numbers of a problem (one head of one example) say how large its tokens and scores are; the
predictor stores mean and spread of their logarithms over the calibration problems.

    score_rms   root mean square of the scores over epsilon, after row and column means are
                subtracted: ``scale / epsilon sqrt(tr(C_q C_k))``
    query_rms   ``sqrt(scale tr C_q)``
    key_rms     ``sqrt(scale tr C_k)``
    num_keys    active keys

``C_q`` and ``C_k`` are the covariances of the active queries and keys. Row and column means of the
scores change no plan, so ``score_rms`` is what Sinkhorn depends on. It is exact if the mask leaves
out whole tokens. Biases are not counted. This is not in the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks, masks
from asap_jax.problem import Problem
from asap_jax.spec import SinkhornSpec

NAMES = ("score_rms", "query_rms", "key_rms", "num_keys")
LIMITS = "limits"
REACH = 1.5
"""Limits of a guarded predictor: the calibration's mean plus this many standard deviations ..."""
MARGIN = 0.1
"""... plus this, both of the logarithm."""
LINEAR = 2.0
"""Up to this shrinkage of the scores the dual of the shrunk problem is scaled back in full."""


@flax.struct.dataclass
class Sums:
    """Sums over problems, per head: they add up over batches and processes.

    Attributes:
      count ``(H,)``: problems with two or more different tokens on both sides.
      first, second ``(H, 4)``: of the logarithms of ``NAMES``, and of their squares.
      featureless ``(H,)``: queries that take part in the closures under a key mask while they are
        padding as keys, so that ``padding="self"`` gives them no features.
    """

    count: jax.Array
    first: jax.Array
    second: jax.Array
    featureless: jax.Array

    def statistics(self, scales: Sequence[float] = (1.0,)) -> dict[str, Any]:
        """``{name: {"mean": (H,), "std": (H,)}}`` of the logarithms, for a ``count`` above 0.

        ``scales``: the fit saw these multiples of all queries.
        """
        count, first, second = (np.asarray(x) for x in (self.count, self.first, self.second))
        mean = first / count[..., None]
        square = np.maximum(second / count[..., None] - np.square(mean), 0)
        log_scales, grow = np.log(scales), np.isin(NAMES, ("score_rms", "query_rms"))
        mean = mean + grow * log_scales.mean()
        std = np.sqrt(square + grow * log_scales.var())
        array = lambda x: jnp.asarray(x.astype(first.dtype))
        return {
            name: {"mean": array(mean[..., i]), "std": array(std[..., i])}
            for i, name in enumerate(NAMES)
        }


def logs(p: Problem, spec: SinkhornSpec) -> tuple[jax.Array, jax.Array]:
    """The logarithms of ``NAMES`` for each problem ``(..., H, 4)``, and which are defined.

    They are not defined, and 0, for problems without two different active tokens on both sides.
    """
    c_q, c_k = _covariance(p, "query"), _covariance(p, "key")
    trace = lambda x: p.scale * jnp.trace(x, axis1=-2, axis2=-1)
    score_square = (p.scale / spec.epsilon) ** 2 * jnp.sum(c_q * c_k, (-2, -1))
    keys = jnp.broadcast_to(p.active("key"), p.k.shape[:-1]).sum(-1, dtype=c_k.dtype)
    squares = jnp.stack([score_square, trace(c_q), trace(c_k), jnp.square(keys)], -1)
    tiny = jnp.finfo(squares.dtype).tiny
    defined = (squares > tiny).all(-1) | ~jnp.isfinite(squares).all(-1)  # NaN stays visible
    values = 0.5 * jnp.log(jnp.where(squares <= tiny, jnp.ones_like(squares), squares))
    return jnp.where(defined[..., None], values, jnp.zeros_like(values)), defined


def sums(p: Problem, spec: SinkhornSpec) -> Sums:
    """The sums of the problems of one record."""
    values, defined = logs(p, spec)
    over = tuple(range(defined.ndim - 1))
    featureless = jnp.zeros(defined.shape[-1:], values.dtype)
    with_features = masks.feature_validity(p.validity, "self")
    if with_features is not None and p.validity is not None:
        lost = p.validity.query & ~with_features.query
        featureless = lost.sum((*over, -1), dtype=values.dtype)
    return Sums(
        defined.sum(over, dtype=values.dtype),
        values.sum(over),
        jnp.square(values).sum(over),
        featureless,
    )


def with_limits(statistics: dict[str, Any]) -> dict[str, Any]:
    """``statistics`` with the limits of ``inside``: the largest sizes of tokens, ``(H,)`` each."""
    limit = lambda x: jnp.exp(x["mean"] + REACH * x["std"] + MARGIN)
    limits = {side: limit(statistics[f"{side}_rms"]) for side in ("query", "key")}
    return {**statistics, LIMITS: limits}


def limits_only(statistics: Any) -> dict[str, Any] | None:
    """The part of ``statistics`` that a call needs: the limits, or None if there are none."""
    if not isinstance(statistics, Mapping) or LIMITS not in statistics:
        return None
    return {LIMITS: statistics[LIMITS]}


def inside(statistics: Any, p: Problem) -> tuple[Problem, jax.Array | None]:
    """``p`` with tokens shrunk to the limits of ``statistics``, and by how much its scores shrank.

    The second result is ``(..., H, 1)``, at most 1; it is None, and ``p`` unchanged, without
    limits. The mean of a side shrinks with it, so tokens that were multiplied by a number come back
    to where they were. The bias shrinks as the scores do.
    """
    limits = limits_only(statistics)
    if limits is None:
        return p, None
    factors = {}
    for side in ("query", "key"):
        limit = checks.array(f"limits of {side}", limits[LIMITS][side]).astype(p.q.dtype)
        rms = _rms(p, side)
        tiny = jnp.finfo(rms.dtype).tiny
        limit = jax.lax.broadcast_to_rank(limit, rms.ndim)
        factors[side] = jnp.minimum(1, limit / jnp.maximum(rms, tiny))[..., None]
    ratio = factors["query"] * factors["key"]
    wide = lambda x: x[..., None]
    q, k = wide(factors["query"]) * p.q, wide(factors["key"]) * p.k
    bias = None if p.bias is None else wide(ratio) * p.bias
    return dataclasses.replace(p, q=q, k=k, bias=bias), ratio


def growth(ratio: jax.Array) -> jax.Array:
    """By what a dual of a problem shrunk by ``ratio`` is multiplied, in score coordinates.

    For large scores a dual is nearly proportional to them, so ``1 / ratio`` is a better guess than
    what features of large tokens give: some grow as the fourth power of a token. Far away the dual
    grows as the square root only. Closures from the dual 0 are then as good, and a dual that is too
    large is worse than one that is too small.
    """
    back = 1 / ratio
    return jnp.where(back <= LINEAR, back, jnp.sqrt(LINEAR * back))


def complete(statistics: Any) -> bool:
    """Whether ``statistics`` have mean and spread of every number, as a fit makes them."""
    return isinstance(statistics, Mapping) and all(
        isinstance(statistics.get(name), Mapping) and {"mean", "std"} <= set(statistics[name])
        for name in NAMES
    )


def _rms(p: Problem, side: str) -> jax.Array:
    """``query_rms`` or ``key_rms`` of each problem, ``(..., H)``."""
    x, valid = _centred(p, side)
    square = masks.masked_mean(jnp.sum(jnp.square(x), -1), valid, -1, p.axis_name)
    return jnp.sqrt(p.scale * jnp.squeeze(square, -1))


def _covariance(p: Problem, side: str) -> jax.Array:
    """Covariance of the active tokens of ``side``, ``(..., H, d, d)``."""
    x, valid = _centred(p, side)
    total = jnp.einsum("...nd,...ne->...de", x, x, precision=jax.lax.Precision.HIGHEST)
    if valid is None:
        return total / x.shape[-2]
    return total / jnp.maximum(valid.sum(-1, dtype=x.dtype), 1)[..., None, None]


def _centred(p: Problem, side: str) -> tuple[jax.Array, jax.Array | None]:
    """The tokens of ``side`` minus the mean of its active ones, and which of them are active.

    Inactive tokens are 0.
    """
    x = p.q if side == "query" else p.k
    valid = None if p.validity is None else getattr(p.validity, side)
    return masks.zero_inactive(x - masks.token_mean(x, valid, p.axis_name), valid), valid
