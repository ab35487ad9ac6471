"""Slice directions Theta on the unit sphere (paper, eq. sliced_projections)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks

KINDS = ("gaussian", "orthogonal", "axes")


def slice_directions(
    rng: Any, num_slices: int, head_dim: int, *, kind: str = "gaussian"
) -> jax.Array:
    """A bank of unit directions ``(num_slices, head_dim)``, float32.

    Args:
      rng: a JAX random key, or an int seed.
      num_slices: L >= 1.
      head_dim: d >= 1.
      kind: ``"gaussian"``: normalised Gaussian rows, uniform on the sphere; ``"orthogonal"``:
        random orthonormal blocks of at most d rows; ``"axes"``: the coordinate axes, repeated.

    Raises:
      ValueError: an unknown kind, a count below 1.
      TypeError: a count that is not an int, or ``rng`` is neither an int nor a key.
    """
    checks.one_of("kind", kind, KINDS)
    num_slices = checks.positive_int("num_slices", num_slices)
    head_dim = checks.positive_int("head_dim", head_dim)
    if kind == "axes":
        return jnp.eye(head_dim, dtype=jnp.float32)[np.arange(num_slices) % head_dim]
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        rng = jax.random.key(rng)
    checks.random_key("rng", rng)
    if kind == "gaussian":
        return unit_rows(jax.random.normal(rng, (num_slices, head_dim), jnp.float32))
    blocks = -(-num_slices // head_dim)
    bank = jax.random.orthogonal(rng, head_dim, (blocks,), jnp.float32)
    return bank.reshape(-1, head_dim)[:num_slices]


def unit_rows(directions: jax.Array) -> jax.Array:
    """``directions (..., d)`` scaled to unit length.

    Raises ValueError for concrete rows that are 0 or not finite.
    """
    norm = jnp.linalg.norm(directions, axis=-1, keepdims=True)
    if not isinstance(norm, jax.core.Tracer):
        length = np.asarray(norm)
        if not (np.isfinite(length) & (length > 0)).all():
            raise ValueError(
                f"directions of shape {directions.shape} must have rows of finite length > 0"
            )
    return directions / norm
