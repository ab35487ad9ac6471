"""Squared-Euclidean transport cost as dot-product scores and a bias.

With ``C_ij = scale |q_i - k_j|^2 / 2`` the kernel ``exp(-C / epsilon)`` is that of the scores

  -C_ij = scale q_i . k_j - scale |q_i|^2 / 2 - scale |k_j|^2 / 2.

The query term is constant along each row, so the first half-step, a row normalisation, cancels it.
It is left out; later query duals are then in score coordinates (cost dual = score dual + rho). The
key term changes the plan of any finite number of steps, so it becomes a bias on the keys. For unit
vectors it is the same for all keys, and the first row step cancels it too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks
from asap_jax.scores import query_shift


class CostInputs(NamedTuple):
    """Query, key and bias for an attention function; the bias is None or ``(..., heads, 1, M)``."""

    query: jax.Array
    key: jax.Array
    bias: jax.Array | None


def squared_euclidean_inputs(
    query: ArrayLike, key: ArrayLike, *, scale: float | None = None, normalize: bool = True
) -> CostInputs:
    """Attention inputs whose plan is that of the cost ``scale |q_i - k_j|^2 / 2``.

    Pass the result to ``sinkhorn_attention`` or ``asap_attention`` with
    ``SinkhornSpec(scale=scale)``::

      query, key, bias = squared_euclidean_inputs(query, key)
      out = sinkhorn_attention(query, key, value, bias, mask, spec=spec)

    Add any other bias to ``bias``. ``scale=2`` is the cost ``|q_i - k_j|^2``.

    Args:
      query: ``(..., N, heads, head_dim)``.
      key: ``(..., M, heads, head_dim)``; its number of heads may divide that of the query.
      scale: > 0, the same as in the spec; ``1 / sqrt(head_dim)`` when None.
      normalize: static; first scale every query and key to unit length (the convention of the
        paper's fused control). A zero vector stays zero and is treated like one of unit length.

    Returns:
      CostInputs: query and key in their own dtypes; ``bias`` is None if ``normalize``, else
      ``-scale |k_j|^2 / 2`` in float32 at least.

    Raises:
      TypeError: dtypes that are not real floating.
      ValueError: shapes that do not fit, ``scale <= 0``.
    """
    query, key = checks.real_array("query", query), checks.real_array("key", key)
    shapes = f"query {query.shape}, key {key.shape}"
    if query.ndim < 3 or key.ndim != query.ndim or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must be (..., length, heads, head_dim) of equal rank >= 3 and equal "
            f"head_dim, got {shapes}"
        )
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"heads of key must divide those of query: {shapes}")
    scale = None if scale is None else checks.score_factor("scale", scale)
    if checks.static_bool("normalize", normalize):
        return CostInputs(unit_tokens(query), unit_tokens(key), None)
    kappa = jnp.swapaxes(query_shift(key, scale=scale), -1, -2)
    kappa = jnp.repeat(kappa, query.shape[-2] // key.shape[-2], axis=-2)
    return CostInputs(query, key, -kappa[..., :, None, :])


def unit_tokens(x: jax.Array) -> jax.Array:
    """Vectors ``x (..., d)`` scaled to unit length; zero vectors stay zero, gradients finite."""
    wide = checks.at_least_f32(x)
    # Divide by the largest entry first, so that squares neither overflow nor underflow.
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(wide), axis=-1, keepdims=True))
    zero = largest == 0
    wide = wide / jnp.where(zero, jnp.ones_like(largest), largest)
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.where(zero, jnp.ones_like(square), square))).astype(x.dtype)
