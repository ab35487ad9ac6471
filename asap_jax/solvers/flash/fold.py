"""A bias on the keys as further channels of queries and keys, for kernels without such a bias.

Ones stand beside the queries, parts of the bias beside the keys. Half-precision products of one
with the other are exact, so only the last part is rounded: the bias keeps 24 bits in bfloat16, and
so it does where products of float32 arrays run in bfloat16 or TF32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax.solvers.flash.kernel import MASKED

PARTS = 3
MULTIPLE = 8
"""Kernels want a head width that is a multiple of this."""


class Folded(NamedTuple):
    """Queries ``(..., N, c)`` and keys ``(..., M, c)`` whose products have the bias.

    Only ``q k' + centre`` has it: ``centre (..., 1)`` belongs to the log-sum-exp, the weights do
    not change by it.
    """

    q: jax.Array
    k: jax.Array
    centre: jax.Array


def width(channels: int) -> int:
    """The width of ``fold``'s arrays for queries and keys of this many channels."""
    return math.ceil((channels + PARTS) / MULTIPLE) * MULTIPLE


def fold(q: jax.Array, k: jax.Array, key_bias: jax.Array) -> Folded:
    """Folds ``key_bias (..., M)`` into q ``(..., N, d)`` and k ``(..., M, d)``.

    All of the bias's gradient comes from its first channel.
    """
    centre = _centre(key_bias)
    columns = jnp.stack(parts(key_bias - centre, k.dtype), -1).astype(k.dtype)
    columns = jnp.broadcast_to(columns, (*k.shape[:-1], PARTS))
    ones = jnp.ones((*q.shape[:-1], PARTS), q.dtype)
    joined = lambda *x: widen(jnp.concatenate(x, -1), width(q.shape[-1]))
    return Folded(joined(q, ones), joined(k, columns), centre)


def widen(x: jax.Array, channels: int) -> jax.Array:
    """``x`` with zeros after its last channel, up to this many."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, channels - x.shape[-1])])


def parts(bias: jax.Array, dtype) -> list[jax.Array]:
    """``PARTS`` arrays that add up to the bias, each exact in float16 or else in bfloat16.

    The gradient goes through the first. In float16 they leave out what is below its smallest normal
    number, 6e-5, and a masked bias becomes its most negative numbers.
    """
    narrow = jnp.finfo(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)
    largest = float(narrow.max)
    rest, result = jax.lax.stop_gradient(bias), []
    for _ in range(PARTS):
        # A pair of conversions would do the same, but compilers may leave it out.
        part = jax.lax.reduce_precision(
            jnp.clip(rest, -largest, largest), narrow.nexp, narrow.nmant
        )
        result.append(part)
        rest = rest - part
    first, *others = result
    return [first + (bias - jax.lax.stop_gradient(bias)), *others]


def _centre(bias: jax.Array) -> jax.Array:
    """The middle ``(..., 1)`` of the range of the biases that are not masked; 0 if all are."""
    bias = jax.lax.stop_gradient(bias)
    active = bias > MASKED / 2
    low = jnp.min(jnp.where(active, bias, jnp.inf), -1, keepdims=True)
    high = jnp.max(jnp.where(active, bias, -jnp.inf), -1, keepdims=True)
    return jnp.where(low <= high, (low + high) / 2, jnp.zeros_like(low))
