"""Attention functions in Flax's layout."""

from asap_jax.attention.functions import CLOSURES, num_closures

__all__ = ["CLOSURES", "num_closures"]
