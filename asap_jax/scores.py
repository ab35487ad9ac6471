"""Scores and the shift between score and cost coordinates (paper, eq. 1 and eq. 5)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks, masks


def scores(
    q: ArrayLike,
    k: ArrayLike,
    *,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    precision: Any = None,
) -> jax.Array:
    """Scores ``s_ij = scale <q_i, k_j> + bias_ij`` (paper, eq. scaled_dot_product_score).

    Args:
      q: queries ``(..., N, d)``.
      k: keys ``(..., M, d)``.
      scale: > 0; ``1 / sqrt(d)`` when None.
      bias: additive, with the rank of the scores, and broadcasts to them; entries <= -1e8 are
        masked and give the score -inf.
      precision: matmul precision, as in ``jax.lax.Precision``.

    Returns:
      ``(..., N, M)`` in float32; in float64 if q or k is float64.

    Raises:
      TypeError: a dtype that is not real floating.
      ValueError: shapes that do not fit, ``scale <= 0``.

    Example:
      >>> scores(jnp.eye(2), 2.0 * jnp.eye(2), scale=1.0)
      Array([[2., 0.],
             [0., 2.]], dtype=float32)
    """
    q, k = checks.real_array("q", q), checks.real_array("k", k)
    checks.heads_last_dim(q, k)
    dtype = accumulation_dtype(q, k)
    s = checks.score_scale(scale, q.shape[-1]) * jnp.einsum(
        "...nd,...md->...nm", q.astype(dtype), k.astype(dtype), precision=precision
    )
    finite, allowed = masks.as_bias(bias, s.shape)
    if finite is not None:
        s = s + finite.astype(dtype)
    return s if allowed is None else jnp.where(allowed, s, -jnp.inf)


def largest_score(
    q: jax.Array, k: jax.Array, scale: float, bias: jax.Array | None = None
) -> jax.Array:
    """An upper bound ``()`` of all ``|scores|``, by Cauchy-Schwarz from the norms of q and k."""
    longest = lambda x: jnp.sqrt(jnp.max(squared_norm(x), -1, initial=0))
    bound = jnp.max(longest(q) * longest(k), initial=0) * scale
    return bound if bias is None else bound + jnp.max(jnp.abs(bias), initial=0)


def query_shift(q: ArrayLike, *, scale: float | None = None) -> jax.Array:
    """The shift ``rho_i = scale |q_i|^2 / 2`` of shape ``(..., N)`` (paper, eq. quadratic cost).

    A cost-coordinate dual is the score-coordinate dual plus this shift. For the key side, pass k.
    """
    q = checks.at_least_f32(checks.real_array("q", q))
    if q.ndim == 0:
        raise ValueError("q of shape () must be (..., N, d)")
    return 0.5 * checks.score_scale(scale, q.shape[-1]) * squared_norm(q)


def squared_norm(x: jax.Array) -> jax.Array:
    """``|x|^2`` of vectors ``x (..., d)``: ``(...)``."""
    return dot(x, x)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """``<x, y>`` of vectors ``(..., d)``: ``(...)``.

    A matrix product, because on XLA's CPU backend ``sum(x * y)`` takes several times as long.
    """
    return jnp.einsum("...d,...d->...", x, y, precision=jax.lax.Precision.HIGHEST)


def accumulation_dtype(*arrays: jax.Array) -> Any:
    """float64 if any of the arrays is float64, float32 otherwise."""
    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32
