"""Squared-Euclidean transport cost, brought to the dot-product scores of the library.

With ``C_ij = scale |q_i - k_j|^2 / 2`` the kernel ``exp(-C / epsilon)`` is that of the scores

  -C_ij = scale q_i . k_j - scale |q_i|^2 / 2 - scale |k_j|^2 / 2.

The query term multiplies a row of the kernel by a constant, which the first half-step, a row
normalisation, takes out again: it is dropped, and every later dual on the query side stays in
the library's score coordinates (cost dual = score dual + rho). The key term is not constant
along a row, so it changes every finite budget: it is kept, as a bias on the keys. On unit
vectors it is one constant for all keys, which the first row step takes out as well.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.scores import query_shift


class CostInputs(NamedTuple):
    """Inputs of an attention function: query, key and bias (None, or ``(..., heads, 1, M)``)."""

    query: jax.Array
    key: jax.Array
    bias: jax.Array | None


def squared_euclidean_inputs(
    query, key, *, scale: float | None = None, normalize: bool = True
) -> CostInputs:
    """Attention inputs whose plan is that of the cost ``scale |q_i - k_j|^2 / 2``.

    Pass the result to ``sinkhorn_attention`` or ``asap_attention`` with
    ``SinkhornSpec(scale=scale)``::

      query, key, bias = squared_euclidean_inputs(query, key)
      out = sinkhorn_attention(query, key, value, bias, mask, spec=spec)

    A bias of your own is added to ``bias``. ``scale=2`` is the cost ``|q_i - k_j|^2``.

    Args:
      query: ``(..., N, heads, head_dim)``.
      key: ``(..., M, heads, head_dim)``; fewer heads that divide those of the query are allowed.
      scale: > 0, that of the spec; ``1 / sqrt(head_dim)`` when None.
      normalize: static; first bring every query and key to unit length (the convention of the
        paper's fused control). A zero vector stays zero and counts as one of unit length.

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
    scale = None if scale is None else checks.positive_float("scale", scale)
    if checks.static_bool("normalize", normalize):
        return CostInputs(unit_tokens(query), unit_tokens(key), None)
    kappa = jnp.swapaxes(query_shift(key, scale=scale), -1, -2)
    kappa = jnp.repeat(kappa, query.shape[-2] // key.shape[-2], axis=-2)
    return CostInputs(query, key, -kappa[..., :, None, :])


def unit_tokens(x: jax.Array) -> jax.Array:
    """``x (..., d)`` with every vector at unit length; zero vectors stay zero, gradients finite.

    Computed in float32 at least and returned in the dtype of ``x``. Vectors are divided by their
    largest entry first, so that their squares neither overflow nor vanish.
    """
    wide = checks.at_least_f32(x)
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(wide), axis=-1, keepdims=True))
    zero = largest == 0
    wide = wide / jnp.where(zero, jnp.ones_like(largest), largest)
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.where(zero, jnp.ones_like(square), square))).astype(x.dtype)
