"""Tokamax's flash attention on CUDA, with the bias folded, for any number of closures.

An optional extra, ``asap_jax[fused]``. The operator is the public one of ``tokamax.ops.gpu``, which
gives the row maxima and sums in float32; ``tokamax.dot_product_attention`` does not. It drops their
cotangents, hence ``gradient``.

Tested on CPUs by lowering it for CUDA, output and gradient. It has not run on a card.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp

from asap_jax.solvers.flash import fold, layout, platform
from asap_jax.solvers.flash.facts import Facts
from asap_jax.solvers.flash.kernel import Kernel

DTYPES = ("bfloat16", "float16")
CAPABILITIES = (9, 10)
"""Major compute capabilities for which the operator has a gradient: Hopper, and Blackwell."""


def operator() -> Any:
    """The operator of Tokamax; ImportError if it or what it imports is not installed."""
    return importlib.import_module("tokamax.ops.gpu").PallasMosaicFlashAttention()


def kernel() -> Kernel:
    """The kernel; ImportError without the extra."""
    attention = operator()

    def arrays(q, k, v, key_bias):
        x = fold.fold(q, k, key_bias)
        return [layout.batched(a) for a in (x.q, x.k, v)], x.centre

    def flash(q, k, v, key_bias):
        values = jnp.zeros((*k.shape[:-1], fold.MULTIPLE), k.dtype) if v is None else v
        operands, centre = arrays(q, k, values, key_bias)
        out, (peak, total) = attention(*operands, logits_scale=1.0, return_residuals=True)
        lse = (peak + jnp.log(total)).reshape(q.shape[:-1]).astype(key_bias.dtype) + centre
        return None if v is None else layout.per_head(out, q.shape[:-2]), lse

    def attend(q, k, v, key_bias):
        operands, _ = arrays(q, k, v, key_bias)
        return layout.per_head(attention(*operands, logits_scale=1.0), q.shape[:-2])

    return Kernel(attend, flash)


def refusal(facts: Facts) -> str | None:
    """The reason why the operator cannot compute the call, or None if it can."""
    capability = platform.cuda_capability()
    if capability is None:
        return f"Tokamax's kernel needs a CUDA device, the platform is {platform.name()!r}"
    if capability[0] not in CAPABILITIES:
        known = " or ".join(map(str, CAPABILITIES))
        have = ".".join(map(str, capability))
        return f"Tokamax's kernel needs compute capability {known}, the device has {have}"
    if facts.dtype not in DTYPES:
        return f"Tokamax's kernel computes in {' or '.join(DTYPES)}, the inputs are {facts.dtype}"
    try:
        operator()
    except (ImportError, AttributeError) as error:
        return (
            f"Tokamax's kernel needs the extra asap_jax[fused] (Python 3.12 or later), but: {error}"
        )
    return None
