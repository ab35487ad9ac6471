"""The layout ``(batch, length, heads, channels)`` of kernels, from per-head arrays and back."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def batched(x: jax.Array) -> jax.Array:
    """``(..., H, N, c)`` as ``(B, N, H, c)``."""
    lead = x.shape[:-2]
    heads = lead[-1] if lead else 1
    return jnp.swapaxes(x.reshape(math.prod(lead[:-1]), heads, *x.shape[-2:]), 1, 2)


def per_head(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """``(B, N, H, c)`` as ``(*lead, N, c)``, the inverse of ``batched``."""
    return jnp.swapaxes(x, 1, 2).reshape(*lead, x.shape[1], x.shape[-1])
