"""Sinkhorn attention for Flax nnx."""

from asap_jax.nnx.amortized import AmortizedTraining
from asap_jax.nnx.attention import AsapCapture, AsapState, SinkhornAttention
from asap_jax.nnx.baselines import DiffAttention, EspAttention, EspSetting, set_esp_temperature
from asap_jax.nnx.calibration import Calibration, attach, compile, diagnose, sinkhorn_layers

__all__ = [
    "AmortizedTraining",
    "AsapCapture",
    "AsapState",
    "Calibration",
    "DiffAttention",
    "EspAttention",
    "EspSetting",
    "SinkhornAttention",
    "attach",
    "compile",
    "diagnose",
    "set_esp_temperature",
    "sinkhorn_layers",
]
