"""Sorting as a matrix: SoftSort, its hardened form, and the coupling of ranks.

The n valid entries have the ranks 0 .. n - 1, in ascending order. Rows of the other ranks and
columns of invalid entries are exactly 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def soft_permutation(
    x: jax.Array, valid: jax.Array | None, sharpness: jax.Array, *, harden: bool = False
) -> jax.Array:
    """SoftSort (Prillo and Eisenschlos): row r is a softmax over ``-sharpness (x_(r) - x_i)^2``.

    Every used row sums to 1; columns sum to 1 only in the limit of large ``sharpness``. The
    exponent of a row's own entry is exactly 0, so no row sum is below 1 before normalisation.

    Args:
      x: values ``(..., N)``; valid: bool ``(..., N)``, or None if all are valid.
      sharpness: > 0, one per problem ``(...)``, the inverse of the temperature.
      harden: replace row r by 1 at its largest entry, the first of ties, so that repeated values
        leave an entry unused. The gradient stays that of the relaxation (straight through).

    Returns:
      ``(..., N ranks, N entries)``.
    """
    ordered = jnp.sort(x if valid is None else jnp.where(valid, x, jnp.inf))
    used = allowed = None
    if valid is not None:
        rank = jax.lax.broadcast_to_rank(jnp.arange(x.shape[-1]), x.ndim)
        used = rank < valid.sum(-1, keepdims=True)
        allowed = used[..., :, None] & valid[..., None, :]
        ordered = jnp.where(used, ordered, jnp.zeros_like(ordered))
    square = jnp.square(ordered[..., :, None] - x[..., None, :])
    soft = jnp.exp(-sharpness[..., None, None] * square)
    if allowed is not None:
        soft = jnp.where(allowed, soft, jnp.zeros_like(soft))
        square = jnp.where(allowed, square, jnp.inf)
    total = soft.sum(-1, keepdims=True)
    soft = soft / jnp.where(total > 0, total, jnp.ones_like(total))
    if not harden:
        return soft
    hard = jax.nn.one_hot(jnp.argmin(square, -1), x.shape[-1], dtype=x.dtype)
    if used is not None:
        hard = jnp.where(used[..., None], hard, jnp.zeros_like(hard))
    return hard + (soft - jax.lax.stop_gradient(soft))


def ranked(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Indices ``(..., N)`` that sort ``x``, valid entries first, ties in their order."""
    return jnp.argsort(x if valid is None else jnp.where(valid, x, jnp.inf), stable=True)


def rank_coupling(n: jax.Array, m: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """The monotone coupling of n query ranks with m key ranks, rows summing to 1.

    This is the optimal plan on a line between n and m equal masses: entry (r, s) is n times the
    overlap of the intervals from r / n to (r + 1) / n and from s / m to (s + 1) / m. It is the
    identity for n = m.

    Args:
      n, m: int counts ``(...)``.
      shape: ``(N, M)``, the sizes of the result's last axes; N M < 2^31.

    Returns:
      ``(..., N, M)``; rows >= n and columns >= m are 0.
    """
    axes = (1,) * n.ndim
    r = jnp.arange(shape[0], dtype=jnp.int32).reshape(*axes, -1, 1)
    s = jnp.arange(shape[1], dtype=jnp.int32).reshape(*axes, 1, -1)
    n, m = (x.astype(jnp.int32)[..., None, None] for x in (n, m))
    one, zero = jnp.int32(1), jnp.int32(0)
    overlap = jnp.minimum((r + one) * m, (s + one) * n) - jnp.maximum(r * m, s * n)
    overlap = jnp.where((r < n) & (s < m), jnp.maximum(overlap, zero), zero)
    return overlap.astype(dtype) / jnp.maximum(m, one).astype(dtype)
