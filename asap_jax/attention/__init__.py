"""Attention functions in Flax's layout."""

from asap_jax.attention.functions import (
    CLOSURES,
    asap_attention,
    num_closures,
    sinkhorn_attention,
    softmax_attention,
)

__all__ = [
    "CLOSURES",
    "asap_attention",
    "num_closures",
    "sinkhorn_attention",
    "softmax_attention",
]
