"""The baselines as ``attention_fn`` modules of Flax linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.attention.flax_call import Call, Result, attention_method
from asap_jax.baselines.diff import VECTORS, diff_attention
from asap_jax.baselines.esp import esp_attention


class DiffAttention(nn.Module):
    """Differential attention as ``attention_fn`` of stock linen attention.

    Use ``nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=DiffAttention(depth=2))``, with
    one instance per layer. It adds parameters to those of stock attention: ``lambda_q1``,
    ``lambda_k1``, ``lambda_q2``, ``lambda_k2`` ``(head_dim,)``, initially normal with deviation
    0.1, and the norm's ``scale`` ``(2 value_dim,)``, initially ones.

    Attributes:
      depth: static index of the layer from 0; sets lambda_init.
      norm_epsilon: added to the mean square in the norm.
      param_dtype: dtype of the parameters.
      implementation: see ``diff_attention``.
    """

    depth: int
    norm_epsilon: float = 1e-5
    param_dtype: Any = jnp.float32
    implementation: str = "auto"

    @nn.compact
    @attention_method
    def __call__(self, call: Call) -> Result:
        """Arguments and result as ``diff_attention``."""
        param_dtype = checks.float_dtype("param_dtype", self.param_dtype)
        normal, ones = nn.initializers.normal(0.1), nn.initializers.ones_init()
        width = checks.real_array("query", call.query).shape[-1:]
        value_dim = checks.real_array("value", call.value).shape[-1]
        vectors = {name: self.param(name, normal, width, param_dtype) for name in VECTORS}
        return diff_attention.core(
            call,
            **vectors,
            depth=self.depth,
            norm_scale=self.param("scale", ones, (2 * value_dim,), param_dtype),
            norm_epsilon=self.norm_epsilon,
            implementation=self.implementation,
        )


class EspAttention(nn.Module):
    """ESP attention as ``attention_fn`` of stock linen attention; it has no parameters.

    To anneal, build the model inside the jitted step; ``temperature`` may be traced there::

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
    @attention_method
    def __call__(
        self, call: Call, *, temperature: Any = None, inverse_temperature: Any = None
    ) -> Result:
        """Arguments and result as ``esp_attention``; temperatures override the attributes."""
        or_else = lambda value, default: default if value is None else value
        return esp_attention.core(
            call,
            directions=self.directions,
            mode=self.mode,
            temperature=or_else(temperature, self.temperature),
            inverse_temperature=or_else(inverse_temperature, self.inverse_temperature),
            scale=self.scale,
            padding=self.padding,
            implementation=self.implementation,
        )
