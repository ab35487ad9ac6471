"""Sinkhorn attention for Flax linen."""

from asap_jax.linen.amortized import AmortizedTraining
from asap_jax.linen.attention import CAPTURE, STATE, SinkhornAttention
from asap_jax.linen.baselines import DiffAttention, EspAttention
from asap_jax.linen.calibration import Calibration, compile, diagnose, state_tree

__all__ = [
    "CAPTURE",
    "STATE",
    "AmortizedTraining",
    "Calibration",
    "DiffAttention",
    "EspAttention",
    "SinkhornAttention",
    "compile",
    "diagnose",
    "state_tree",
]
