"""Feature families that help too little to be in the library, written from their formulas."""

import dataclasses
import math
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST


class Sides(NamedTuple):
    """Moments of both sides, after all tokens are multiplied by ``sqrt(scale)``.

    Attributes:
      u: centred tokens ``(..., N, d)`` of the own side.
      own, other: covariances ``(..., d, d)`` of the own and of the other side.
      delta: mean of the own side minus mean of the other side, ``(..., d)``.
    """

    u: jax.Array
    own: jax.Array
    other: jax.Array
    delta: jax.Array


def moments(
    q: jax.Array,
    k: jax.Array,
    scale: float | None = None,
    query_valid: jax.Array | None = None,
    key_valid: jax.Array | None = None,
) -> Sides:
    """Moments of the active tokens; None for ``scale`` means ``1 / sqrt(d)``."""
    root = math.sqrt(q.shape[-1] ** -0.5 if scale is None else scale)
    sides = []
    for x, valid in ((q, query_valid), (k, key_valid)):
        mean = token_mean(x, valid)
        centred = root * (x - mean)
        active = centred if valid is None else jnp.where(valid[..., None], centred, 0)
        count = x.shape[-2] if valid is None else jnp.maximum(valid.sum(-1), 1)[..., None, None]
        total = jnp.einsum("...nd,...ne->...de", active, active, precision=_EXACT)
        sides.append((centred, total / count, root * jnp.squeeze(mean, -2)))
    (u, own, mean), (_, other, other_mean) = sides
    return Sides(u, own, other, mean - other_mean)


def token_mean(x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """Mean over the active tokens of ``(..., N, d)``: ``(..., 1, d)``."""
    if valid is None:
        return x.mean(-2, keepdims=True)
    where = valid[..., None]
    total = jnp.where(where, x, 0).sum(-2, keepdims=True)
    return total / jnp.maximum(where.sum(-2, keepdims=True), 1)


def _times(x, matrix) -> jax.Array:
    return jnp.einsum("...nd,...de->...ne", x, matrix, precision=_EXACT)


@dataclasses.dataclass(frozen=True)
class _FromMoments:
    """Base of families whose columns are computed from moments and then centred."""

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None):
        x = self.columns(moments(q, k, scale, query_valid, key_valid))
        return x - token_mean(x, query_valid)


@flax.struct.dataclass
class ThirdOrder(_FromMoments):
    """``u'C C_x C u``, the next term in the covariances after those of ``aj.Moments``."""

    def num_features(self, head_dim: int) -> int:
        """One column."""
        return 1

    def columns(self, sides: Sides) -> jax.Array:
        """One column ``(..., N, 1)``."""
        by_other = _times(sides.u, sides.other)
        return jnp.sum(by_other * _times(by_other, sides.own), -1, keepdims=True)


@flax.struct.dataclass
class GaussianPlan(_FromMoments):
    """The exact dual between Gaussians that have the moments of both sides.

    Between ``N(0, A)`` and ``N(0, B)`` every half-step of Sinkhorn gives a quadratic dual
    ``-x'P x / 2``.  After the first step ``P = B``.  Later ``P = (Q + 1/B)^-1``, where
    ``Q = (P + 1/A)^-1`` belongs to the other side and uses the ``P`` before it.  The features are
    ``u'P u`` and ``u'P delta``.
    """

    steps: int = flax.struct.field(pytree_node=False, default=4)

    def num_features(self, head_dim: int) -> int:
        """Two columns."""
        return 2

    def columns(self, sides: Sides) -> jax.Array:
        """Two columns ``(..., N, 2)``."""
        small = 1e-4 * jnp.eye(sides.own.shape[-1], dtype=sides.own.dtype)
        own, other = (jnp.linalg.inv(c + small) for c in (sides.own, sides.other))
        p = sides.other
        for _ in range(self.steps):
            p = jnp.linalg.inv(jnp.linalg.inv(p + own) + other)
        by_p = _times(sides.u, p)
        along = jnp.einsum("...nd,...d->...n", by_p, sides.delta)
        return jnp.stack([jnp.sum(sides.u * by_p, -1), along], -1)
