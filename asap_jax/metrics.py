"""Fidelity and balance of attention weights and outputs.

Weights are ``(..., heads, N, M)`` on attention scale. Functions of two arguments take the
approximation first and the reference second.

Every metric is a mean over what is active, so it is NaN if nothing is: an example whose keys are
all masked has no error, neither a small nor a large one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks
from asap_jax.scores import accumulation_dtype


def attention_rel_l2(
    weights: ArrayLike, reference: ArrayLike, *, pooled: bool = False
) -> jax.Array:
    """``|A_hat - A|_F / |A|_F`` over a batch, mean over heads (one norm if ``pooled``).

    Args:
      weights, reference: ``(..., heads, N, M)``, or ``(N, M)`` for one head.
      pooled: one Frobenius norm over all axes.

    Returns:
      A scalar.
    """
    a, b = _pair("weights", weights, reference, 2)
    return _rel_l2(a, b, None if checks.static_bool("pooled", pooled) else a.ndim - 3)


def output_rel_l2(output: ArrayLike, reference: ArrayLike) -> jax.Array:
    """``|A_hat v - A v| / |A v|`` over a batch, mean over heads: a scalar.

    Head outputs are ``(..., N, heads, head_dim)``; those of inactive queries are 0.
    """
    a, b = _pair("output", output, reference, 3)
    return _rel_l2(a, b, a.ndim - 2)


def output_rmse(
    output: ArrayLike, reference: ArrayLike, *, query_valid: ArrayLike | None = None
) -> jax.Array:
    """Root mean square difference of head outputs ``(..., N, heads, head_dim)``.

    ``query_valid`` (bool, broadcasting to ``(..., N)``) restricts the mean to those queries.
    """
    a, b = _pair("output", output, reference, 3)
    valid = checks.validity("query_valid", query_valid, a[..., 0, 0])[..., None, None]
    square = jnp.where(valid, jnp.square(a - b), jnp.zeros_like(a))
    count = valid.sum(dtype=a.dtype) * (a.shape[-1] * a.shape[-2])
    return jnp.sqrt(square.sum() / count)


def row_error(weights: ArrayLike, query_valid: ArrayLike | None = None) -> jax.Array:
    """Mean ``|row sum - 1|`` over all queries, or over ``query_valid`` (paper, e_row)."""
    return _marginal_error(weights, -1, query_valid, "query_valid", 1.0)


def column_error(
    weights: ArrayLike, key_valid: ArrayLike | None = None, target: ArrayLike = 1.0
) -> jax.Array:
    """Mean ``|column sum - target|`` over all keys, or over ``key_valid`` (paper, e_col).

    ``target`` is a number or broadcasts to ``(..., M)``; the balanced target is N / M.
    """
    return _marginal_error(weights, -2, key_valid, "key_valid", target)


def agreement(logits: ArrayLike, reference: ArrayLike) -> jax.Array:
    """Fraction of examples with the same class predicted; logits ``(..., classes)``.

    Example:
      >>> reference = jnp.array([[0.0, 1.0], [3.0, 1.0]])
      >>> float(agreement(jnp.array([[0.0, 5.0], [0.0, 5.0]]), reference))
      0.5
    """
    a, b = _pair("logits", logits, reference, 1)
    return jnp.mean(a.argmax(-1) == b.argmax(-1), dtype=jnp.float32)


def plan_kl(weights: ArrayLike, reference: ArrayLike) -> jax.Array:
    """Generalised ``KL(P || P_hat)`` of plans ``P = A / N``, reference to approximation.

    Mean over the leading axes. 0 log 0 = 0; infinite where the reference has mass and the
    approximation none.
    """
    a, b = _pair("weights", weights, reference, 2)
    size = a.shape[-2]
    safe = lambda x: jnp.where(b > 0, x, jnp.ones_like(x))
    terms = b * (jnp.log(safe(b)) - jnp.log(safe(a))) - b + a
    return _or_nan(jnp.mean(jnp.sum(terms, (-1, -2)) / size), b)


def entropy(weights: ArrayLike, query_valid: ArrayLike | None = None) -> jax.Array:
    """Mean entropy of the normalised rows, in nats; rows without mass count as 0."""
    a = _weights("weights", weights)
    total = a.sum(-1, keepdims=True)
    p = a / jnp.where(total > 0, total, jnp.ones_like(total))
    h = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, jnp.ones_like(p))), -1)
    return _or_nan(_valid_mean(h, query_valid, "query_valid"), a)


def _or_nan(value: jax.Array, weights: jax.Array) -> jax.Array:
    """``value``; NaN if no weight is above 0."""
    return jnp.where(jnp.max(weights) > 0, value, jnp.nan)


def _rel_l2(a: jax.Array, b: jax.Array, head: int | None) -> jax.Array:
    """Mean over the axis ``head`` of the relative distance over all other axes."""
    axes = None if head is None else tuple(i for i in range(a.ndim) if i != head)
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=axes))
    return jnp.mean(norm(a - b) / norm(b))


def _marginal_error(weights: Any, axis: int, valid: Any, name: str, target: Any) -> jax.Array:
    sums = _weights("weights", weights).sum(axis)
    target = checks.to_rank("target", checks.array("target", target, sums.dtype), sums.shape)
    return _valid_mean(jnp.abs(sums - target), valid, name)


def _valid_mean(x: jax.Array, valid: Any, name: str) -> jax.Array:
    keep = checks.validity(name, valid, x)
    return jnp.where(keep, x, jnp.zeros_like(x)).sum() / keep.sum(dtype=x.dtype)


def _weights(name: str, weights: Any) -> jax.Array:
    a = checks.at_least_f32(checks.real_array(name, weights))
    if a.ndim < 2:
        raise ValueError(f"{name} of shape {a.shape} must be (..., heads, N, M)")
    return a


def _pair(name: str, a: Any, reference: Any, min_rank: int) -> tuple[jax.Array, jax.Array]:
    a = checks.at_least_f32(checks.real_array(name, a))
    b = checks.at_least_f32(checks.real_array("reference", reference))
    if a.shape != b.shape or a.ndim < min_rank:
        raise ValueError(
            f"{name} of shape {a.shape} and reference of shape {b.shape} must be equal in shape, "
            f"with at least {min_rank} axes"
        )
    dtype = accumulation_dtype(a, b)
    return a.astype(dtype), b.astype(dtype)
