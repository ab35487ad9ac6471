"""Sinkhorn attention for Flax nnx."""

from asap_jax.nnx.attention import (
    AsapCapture,
    AsapState,
    Calibration,
    SinkhornAttention,
    compile,
)
from asap_jax.nnx.baselines import DiffAttention, EspAttention, EspSetting, set_esp_temperature

__all__ = [
    "AsapCapture",
    "AsapState",
    "Calibration",
    "DiffAttention",
    "EspAttention",
    "EspSetting",
    "SinkhornAttention",
    "compile",
    "set_esp_temperature",
]
