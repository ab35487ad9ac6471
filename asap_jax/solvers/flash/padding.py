"""Lengths padded to what a kernel takes: padded keys are masked, padded queries are cut off."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from asap_jax.solvers.flash.kernel import MASKED


def pad(
    q: jax.Array, k: jax.Array, v: jax.Array, key_bias: jax.Array, multiple: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The arrays of a kernel's call with lengths that are multiples of ``multiple``."""
    key_bias = jnp.broadcast_to(key_bias, k.shape[:-1])
    masked = _rows(key_bias[..., None], multiple, MASKED)[..., 0]
    q, k, v = (_rows(x, multiple, 0) for x in (q, k, v))
    return q, k, v, masked


def _rows(x: jax.Array, multiple: int, value: float) -> jax.Array:
    extra = -x.shape[-2] % multiple
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, extra), (0, 0)], constant_values=value)
