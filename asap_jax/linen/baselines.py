"""The baselines as ``attention_fn`` modules of Flax linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.baselines.diff import VECTORS, diff_attention
from asap_jax.baselines.esp import esp_attention


class DiffAttention(nn.Module):
    """Differential attention as ``attention_fn`` of stock linen attention.

    ``nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=DiffAttention(depth=2))``: one
    instance per layer. It adds to the parameters of stock attention, which are unchanged, the
    vectors ``lambda_q1``, ``lambda_k1``, ``lambda_q2``, ``lambda_k2`` ``(head_dim,)``, normal
    with deviation 0.1, and the norm's ``scale`` ``(2 value_dim,)``, ones.

    Attributes:
      depth: index of the layer from 0, static; sets lambda_init.
      norm_epsilon: added to the mean square in the norm.
      param_dtype: dtype of the parameters.
      implementation: see ``diff_attention``.
    """

    depth: int
    norm_epsilon: float = 1e-5
    param_dtype: Any = jnp.float32
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self,
        query,
        key,
        value,
        bias=None,
        mask=None,
        *,
        return_weights=False,
        dropout_rng=None,
        dropout_rate=0.0,
        broadcast_dropout=True,
        deterministic=True,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):
        """Arguments and result as ``diff_attention``."""
        param_dtype = checks.float_dtype("param_dtype", self.param_dtype)
        normal, ones = nn.initializers.normal(0.1), nn.initializers.ones_init()
        query, value = checks.real_array("query", query), checks.real_array("value", value)
        width = query.shape[-1:]
        vectors = {name: self.param(name, normal, width, param_dtype) for name in VECTORS}
        return diff_attention(
            query,
            key,
            value,
            bias,
            mask,
            **vectors,
            depth=self.depth,
            norm_scale=self.param("scale", ones, (2 * value.shape[-1],), param_dtype),
            norm_epsilon=self.norm_epsilon,
            implementation=self.implementation,
            return_weights=return_weights,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            module=module,
            is_causal=is_causal,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )


class EspAttention(nn.Module):
    """ESP attention as ``attention_fn`` of stock linen attention; it has no parameters.

    To anneal, build the model inside the jitted step, where ``temperature`` may be traced::

      def loss(params, x, step):
          attention = EspAttention(temperature=schedule(step))
          layer = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention)
          ...

    Attributes:
      mode, directions, temperature, inverse_temperature, scale, padding, implementation: see
        ``esp_attention``.
    """

    mode: str = "soft"
    directions: Any = None
    temperature: Any = 1e-3
    inverse_temperature: Any = 0.1
    scale: float | None = None
    padding: str = "self"
    implementation: str = "auto"

    @nn.compact
    def __call__(
        self,
        query,
        key,
        value,
        bias=None,
        mask=None,
        *,
        temperature=None,
        inverse_temperature=None,
        return_weights=False,
        dropout_rng=None,
        dropout_rate=0.0,
        broadcast_dropout=True,
        deterministic=True,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):
        """Arguments and result as ``esp_attention``; temperatures override the attributes."""
        if temperature is None:
            temperature = self.temperature
        if inverse_temperature is None:
            inverse_temperature = self.inverse_temperature
        return esp_attention(
            query,
            key,
            value,
            bias,
            mask,
            directions=self.directions,
            mode=self.mode,
            temperature=temperature,
            inverse_temperature=inverse_temperature,
            scale=self.scale,
            padding=self.padding,
            implementation=self.implementation,
            return_weights=return_weights,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            module=module,
            is_causal=is_causal,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
