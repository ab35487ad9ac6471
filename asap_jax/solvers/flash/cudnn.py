"""cuDNN's attention through ``jax.nn``, with the bias folded: layers of one call on CUDA.

The public function rounds the log-sum-exp to half precision and drops its gradient, so there is no
``flash`` here. The stock gradient of the folded call is right in the bias too.

Tested on CPUs with the same function on XLA, and lowered for CUDA. It has not run on a card.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from asap_jax.solvers.flash import fold, padding, platform
from asap_jax.solvers.flash.facts import Facts
from asap_jax.solvers.flash.kernel import Kernel

DTYPES = ("bfloat16", "float16")
MULTIPLE = 2
"""JAX refuses the gradient of odd lengths."""
WIDEST = 128
"""Most channels before Hopper (compute capability 9.0)."""
WIDEST_HOPPER = 256


def kernel(implementation: Literal["cudnn", "xla"] = "cudnn") -> Kernel:
    """The kernel by an implementation of ``jax.nn.dot_product_attention``."""

    def attend(q, k, v, key_bias):
        count, channels = q.shape[-2], v.shape[-1]
        q, k, v, key_bias = padding.pad(q, k, v, key_bias, MULTIPLE)
        folded, wide = fold.fold(q, k, key_bias), _width(q.shape[-1], channels)
        arrays = (fold.widen(x, wide) for x in (folded.q, folded.k, v))
        out = jax.nn.dot_product_attention(
            *map(_batched, arrays), scale=1.0, implementation=implementation
        )
        out = jnp.swapaxes(out, 1, 2).reshape(*q.shape[:-1], wide)
        return out[..., :count, :channels]

    return Kernel(attend)


def _width(channels: int, value_channels: int) -> int:
    """The channels of all arrays, which the public function wants to be as many."""
    return max(fold.width(channels), fold.width(value_channels - fold.PARTS))


def _batched(x: jax.Array) -> jax.Array:
    """``(..., H, N, c)`` as ``(B, N, H, c)``."""
    lead = x.shape[:-2]
    heads = lead[-1] if lead else 1
    return jnp.swapaxes(x.reshape(math.prod(lead[:-1]), heads, *x.shape[-2:]), 1, 2)


def refusal(facts: Facts) -> str | None:
    """The reason why cuDNN cannot compute the call, or None if it can."""
    capability = platform.cuda_capability()
    if capability is None:
        return f"cuDNN needs a CUDA device, the platform is {platform.name()!r}"
    if facts.calls != 1:
        return (
            f"cuDNN gives no accurate log-sum-exp, so it serves layers of one attention call (one "
            f"closure from a key dual that ends on rows); this one takes {facts.calls}"
        )
    if facts.dtype not in DTYPES:
        return f"cuDNN computes in {' or '.join(DTYPES)}, the inputs are {facts.dtype}"
    widest = WIDEST_HOPPER if capability >= (9, 0) else WIDEST
    wide = _width(facts.channels, facts.value_channels)
    if wide > widest:
        return (
            f"cuDNN takes at most {widest} channels on this device; head_dim={facts.channels} with "
            f"the bias folded in and value_dim={facts.value_channels} need {wide}"
        )
    return None
