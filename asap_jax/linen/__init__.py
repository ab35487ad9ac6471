"""Sinkhorn attention for Flax linen."""

from asap_jax.linen.attention import CAPTURE, STATE, Calibration, SinkhornAttention, compile
from asap_jax.linen.baselines import DiffAttention, EspAttention

__all__ = [
    "CAPTURE",
    "STATE",
    "Calibration",
    "DiffAttention",
    "EspAttention",
    "SinkhornAttention",
    "compile",
]
