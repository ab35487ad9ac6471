"""From an attention call to per-head problems: layout, dtypes, masks.

Attention functions take Flax's layout ``(..., length, heads, head_dim)``; everything behind
them works on ``(..., heads, length, head_dim)``.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, masks
from asap_jax.scores import accumulation_dtype
from asap_jax.scores import scores as make_scores

IMPLEMENTATIONS = ("auto", "log", "scaling", "streaming")


@flax.struct.dataclass
class Problem:
    """One attention call, per head: axes ``(..., heads, tokens, ...)``.

    Attributes:
      q ``(..., H, N, d)``, k ``(..., H, M, d)``, v ``(..., H, M, d_v)``: float32 at least, rows
        of inactive tokens set to 0.
      bias: broadcasts to the scores, 0 at masked places, or None.
      mask: bool, broadcasting to the scores, or None.
      validity: closure validities, or None for "all".
      scale: the score scale.
      dtype: dtype of the output.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    validity: masks.Validity | None
    scale: float = flax.struct.field(pytree_node=False)
    dtype: Any = flax.struct.field(pytree_node=False)
    precision: Any = flax.struct.field(pytree_node=False, default=None)

    @property
    def score_shape(self) -> tuple[int, ...]:
        """``(..., H, N, M)``."""
        return (*self.q.shape[:-1], self.k.shape[-2])

    @property
    def scores(self) -> jax.Array:
        """``(..., H, N, M)``: with the bias, finite entries at masked places too."""
        return make_scores(
            self.q, self.k, scale=self.scale, bias=self.bias, precision=self.precision
        )


def make_problem(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale: float | None,
    dtype=None,
    precision=None,
    is_causal=False,
    implementation="auto",
    implementations=IMPLEMENTATIONS,
    einsums=(),
) -> Problem:
    """Checks one attention call and brings it to per-head form.

    Raises:
      ValueError: ranks, lengths, head counts, masks or biases that do not fit; a causal call;
        an unknown implementation.
      TypeError: dtypes that are not real floating; settings that are not static.
    """
    checks.one_of("implementation", implementation, implementations)
    refuse_causal(is_causal)
    if any(einsum is not None for einsum in einsums):
        raise ValueError(
            "qk_attn_weights_einsum and attn_weights_value_einsum are not supported: "
            "scores and closures are computed in float32 at least"
        )
    query, key, value = promote(query, key, value, dtype=dtype)
    key, value = match_heads(query, key, value)
    out_dtype = query.dtype
    inner = accumulation_dtype(query)
    q, k, v = (jnp.swapaxes(x, -2, -3).astype(inner) for x in (query, key, value))
    shape = (*q.shape[:-1], k.shape[-2])
    bias, bias_mask = masks.as_bias(bias, shape)
    mask = masks.combine(masks.as_mask(mask, shape), bias_mask)
    validity = masks.closure_validity(mask, shape)
    if validity is not None:
        q = masks.zero_inactive(q, validity.query)
        k = masks.zero_inactive(k, validity.key)
        v = masks.zero_inactive(v, validity.key)
        if bias is not None:
            bias = jnp.where(mask, bias, jnp.zeros_like(bias))
    scale = 1.0 / q.shape[-1] ** 0.5 if scale is None else scale
    return Problem(q, k, v, bias, mask, validity, scale, out_dtype, precision)


def refuse_causal(is_causal) -> None:
    """Raises ValueError for causal attention, with the reason."""
    if checks.static_bool("is_causal", is_causal):
        raise ValueError(
            "is_causal=True is refused: the only lower-triangular matrix with unit row and column "
            "sums is the identity, and a key closure reads later queries, so no causal "
            "doubly-stochastic attention exists"
        )


def promote(query, key, value, *, dtype=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three inputs in one real floating dtype (``dtype`` if given)."""
    arrays = [
        checks.real_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    ]
    if dtype is None:
        dtype = arrays[0].dtype
        for x in arrays[1:]:
            dtype = jnp.promote_types(dtype, x.dtype)
    else:
        dtype = checks.float_dtype("dtype", dtype)
    return tuple(x.astype(dtype) for x in arrays)


def match_heads(query, key, value) -> tuple[jax.Array, jax.Array]:
    """Checks shapes and repeats grouped key/value heads up to the query heads."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value must be (..., length, heads, head_dim) of equal "
            f"rank >= 3, got {shapes}"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"batch axes of query, key and value differ: {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"head_dim of query and key differ: {shapes}")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"lengths of key and value differ: {shapes}")
    if key.shape[-2] != value.shape[-2] or key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"heads of key and value must be equal and divide those of query: {shapes}"
        )
    if 0 in query.shape[-3:] or 0 in key.shape[-3:]:
        raise ValueError(f"query, key and value must hold a token, a head and a channel: {shapes}")
    repeats = query.shape[-2] // key.shape[-2]
    if repeats == 1:
        return key, value
    return jnp.repeat(key, repeats, axis=-2), jnp.repeat(value, repeats, axis=-2)
