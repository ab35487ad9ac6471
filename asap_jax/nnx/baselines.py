"""The baselines as ``attention_fn`` modules of Flax nnx."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from asap_jax import checks
from asap_jax.attention.flax_call import Call, Result, attention_method
from asap_jax.baselines.diff import VECTORS, diff_attention
from asap_jax.baselines.esp import esp_attention


class DiffAttention(nnx.Module):
    """Differential attention as ``attention_fn`` of stock nnx attention.

    Use ``nnx.MultiHeadAttention(8, 128, attention_fn=DiffAttention(16, depth=2, rngs=rngs), ...)``,
    with one instance per layer.

    Attributes:
      depth: static index of the layer from 0; sets lambda_init.
      lambda_q1, lambda_k1, lambda_q2, lambda_k2: ``nnx.Param`` ``(head_dim,)``, initially normal
        with deviation 0.1.
      scale: ``nnx.Param`` ``(2 value_dim,)`` of the norm, initially ones.
      norm_epsilon, implementation: see ``diff_attention``.
    """

    def __init__(
        self,
        head_dim: int,
        value_dim: int | None = None,
        *,
        depth: int,
        rngs: nnx.Rngs,
        norm_epsilon: float = 1e-5,
        param_dtype: Any = jnp.float32,
        implementation: str = "auto",
    ):
        checks.instance("rngs", rngs, nnx.Rngs, "an nnx.Rngs")
        param_dtype = checks.float_dtype("param_dtype", param_dtype)
        head_dim = checks.positive_int("head_dim", head_dim)
        value_dim = head_dim if value_dim is None else checks.positive_int("value_dim", value_dim)
        normal = nnx.initializers.normal(0.1)
        for name in VECTORS:
            setattr(self, name, nnx.Param(normal(rngs.params(), (head_dim,), param_dtype)))
        self.scale = nnx.Param(jnp.ones((2 * value_dim,), param_dtype))
        self.depth = depth
        self.norm_epsilon = norm_epsilon
        self.implementation = implementation

    @attention_method
    def __call__(self, call: Call) -> Result:
        """Arguments and result as ``diff_attention``."""
        return diff_attention.core(
            call,
            **{name: getattr(self, name).get_value() for name in VECTORS},
            depth=self.depth,
            norm_scale=self.scale.get_value(),
            norm_epsilon=self.norm_epsilon,
            implementation=self.implementation,
        )


class EspSetting(nnx.Variable):
    """State of ``EspAttention`` that is not an ``nnx.Param``."""


class EspAttention(nnx.Module):
    """ESP attention as ``attention_fn`` of stock nnx attention; it has no ``nnx.Param``.

    The two temperatures are variables: to anneal, also inside ``nnx.jit`` and without compiling
    again, use ``layer.temperature.set_value(schedule(step))``, or ``set_esp_temperature`` for all
    layers of a model.

    Attributes:
      temperature, inverse_temperature: ``EspSetting`` scalars, float32.
      directions: None, or ``EspSetting`` ``(L, head_dim)``.
      mode, scale, padding, implementation: see ``esp_attention``.
    """

    def __init__(
        self,
        *,
        mode: str = "soft",
        directions: ArrayLike | None = None,
        temperature: float = 1e-3,
        inverse_temperature: float = 0.1,
        scale: float | None = None,
        padding: str = "self",
        implementation: str = "auto",
    ):
        temperature = checks.positive_float("temperature", temperature)
        inverse_temperature = checks.non_negative_float("inverse_temperature", inverse_temperature)
        self.temperature = EspSetting(jnp.asarray(temperature, jnp.float32))
        self.inverse_temperature = EspSetting(jnp.asarray(inverse_temperature, jnp.float32))
        setting = lambda x: None if x is None else EspSetting(checks.real_array("directions", x))
        self.directions: EspSetting | None = setting(directions)
        self.mode = mode
        self.scale = scale
        self.padding = padding
        self.implementation = implementation

    @attention_method
    def __call__(self, call: Call) -> Result:
        """Arguments and result as ``esp_attention``."""
        return esp_attention.core(
            call,
            directions=None if self.directions is None else self.directions.get_value(),
            mode=self.mode,
            temperature=self.temperature.get_value(),
            inverse_temperature=self.inverse_temperature.get_value(),
            scale=self.scale,
            padding=self.padding,
            implementation=self.implementation,
        )


def set_esp_temperature(model: nnx.Module, temperature: ArrayLike) -> None:
    """Sets SoftSort's temperature in every ``EspAttention`` of ``model``, in place.

    ``temperature`` is a number or a scalar array, and may be traced.

    Raises:
      TypeError, ValueError: not an nnx.Module; a temperature that is not a number > 0.
    """
    checks.instance("model", model, nnx.Module, "an nnx.Module")
    temperature = checks.scalar("temperature", temperature, jnp.float32, checks.positive_float)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, EspAttention):
            module.temperature.set_value(temperature)
