"""Codebook features: bounds on a c-transform from a few centres per head.

Given a cheap dual ``h`` of the other side, the dual to predict is nearly the c-transform of ``h``.
Two bounds of that transform need no N x M array: its tangents at centres of the own side, since it
is convex, and the masses and means of the other side's tokens around their centres (Jensen).
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, masks
from asap_jax.features.base import Family, evaluate, register
from asap_jax.problem import Tokens
from asap_jax.scores import squared_norm

NUM_FEATURES = 11
_EXACT = jax.lax.Precision.HIGHEST


@register("codebook")
@flax.struct.dataclass
class Codebook(Family):
    """Features from a predicted dual of the other side and codebooks of both sides.

    Let y_j be the tokens of the other side, ``h`` its predicted dual (score coordinates), e epsilon
    and ``s(x, y) = scale x.y``. The tangent of the c-transform at a centre c_r of the own side is
    ``T_r(x) = L_r + s(x - c_r, m_r) / e``, with ``L_r = LSE_j (s(c_r, y_j) + h_j) / e`` and m_r
    the mean of y under the softmax weights. The first five features, all centred, are
    ``-e max_r T_r``, ``-e LSE_r T_r``, ``-e sum_r a_r T_r``, ``-e sum_r a_r L_r`` with
    ``a = softmax_r(-scale |x - c_r|^2 / 4)``, and ``-min_r scale |x - c_r|^2``.

    Each y belongs to its nearest centre of the other side. Let M_r be the total weight and mean_r
    the weighted mean of the y of centre r, and ``z_r = s(x, mean_r) / e + log M_r``. Three features
    are ``-e max_r z_r``, ``-e LSE_r z_r`` and ``-e LSE_r (z_r / 2)``, for the weights
    ``exp(h / e)``. The last three are the same for equal weights.

    Only active tokens of the other side are used; features are evaluated at every own token. The
    mean of these active tokens is subtracted from all tokens and centres first: the cost dual is
    unchanged, and float32 loses fewer digits.

    Attributes:
      own: centres of the own side, ``(R, d)`` or per head ``(H, R, d)``.
      other: centres of the other side, with one of the same shapes.
      inner: ``Predictor`` of the other side's dual; only its features and head are used.
      epsilon: the teacher's epsilon.
    """

    own: jax.Array
    other: jax.Array
    inner: Any
    epsilon: float = flax.struct.field(pytree_node=False, default=1.0)

    def num_features(self, head_dim: int) -> int:
        """11."""
        return NUM_FEATURES

    def from_tokens(self, tokens: Tokens) -> jax.Array:
        """Centred features ``(..., N, 11)``."""
        columns, valid = self._columns(tokens)
        x = jnp.stack(columns, axis=-1)
        return x - masks.token_mean(x, valid)

    def linear(self, coefficients: jax.Array, tokens: Tokens) -> jax.Array:
        """The features times ``coefficients`` ``(11,)`` or ``(H, 11)``, up to a constant."""
        columns, _ = self._columns(tokens)
        w = checks.array("coefficients", coefficients).astype(columns[0].dtype)
        w = jax.lax.broadcast_to_rank(w, columns[0].ndim)
        terms = (column * w[..., i, None] for i, column in enumerate(columns))
        return functools.reduce(operator.add, terms)

    def _columns(self, t: Tokens) -> tuple[list[jax.Array], jax.Array]:
        """The 11 features ``(..., N)`` before centring, and the validity of the own side."""
        q, root = t.own, math.sqrt(t.scale)
        query_valid = checks.validity("query_valid", t.own_valid, q[..., 0])
        key_valid = checks.validity("key_valid", t.other_valid, t.other[..., 0])
        k = masks.zero_inactive(t.other, key_valid)
        if not hasattr(self.inner, "features"):
            raise TypeError(f"inner must be a Predictor, got {checks.describe(self.inner)}")
        other_side = Tokens(k, q, t.scale, key_valid, query_valid)
        h = evaluate(self.inner.features, self.inner.head, other_side)
        common = masks.token_mean(k, key_valid)
        x = root * (q - common)
        y = masks.zero_inactive(root * (k - common), key_valid)
        own = root * (_centres("own", self.own, q).astype(q.dtype) - common)
        other = root * (_centres("other", self.other, q).astype(q.dtype) - common)
        h = (masks.center(h, key_valid) - 0.5 * squared_norm(y)) / self.epsilon
        member = _members(y, other, key_valid)
        columns = [
            *_tangents(x, y, h, own, key_valid, self.epsilon),
            *_mixture(x, y, member * _weights(h, key_valid)[..., None, :], self.epsilon),
            *_mixture(x, y, member, self.epsilon),
        ]
        return columns, query_valid


# Below, tokens are on the last axis, ``(..., R, N)``, so that sums over centres add whole rows.


def _tangents(x, y, h, centres, valid, epsilon):
    """The five features of tangents."""
    nonempty = valid.any(-1, keepdims=True)
    exponent = _products(centres, y) / epsilon + h[..., None, :]
    exponent = jnp.where(valid[..., None, :] | ~nonempty[..., None], exponent, -jnp.inf)
    level = jax.nn.logsumexp(exponent, axis=-1, keepdims=True)
    means = jnp.einsum("...rm,...md->...rd", jnp.exp(exponent - level), y, precision=_EXACT)
    offset = level - jnp.sum(centres * means, -1, keepdims=True) / epsilon
    tangents = offset + _products(means, x) / epsilon
    distance = _square_distances(centres, x)
    nearest = distance.min(-2, keepdims=True)
    near = jnp.exp((nearest - distance) / 4)
    near = near / near.sum(-2, keepdims=True)
    return (
        *_top(tangents, epsilon),
        -epsilon * jnp.sum(near * tangents, -2),
        -epsilon * jnp.sum(near * level, -2),
        -jnp.squeeze(nearest, -2),
    )


def _mixture(x, y, member, epsilon):
    """Three features, for weights ``member (..., R, M)`` of the tokens y in each centre."""
    mass = member.sum(-1, keepdims=True)
    full = mass > 0
    safe = jnp.where(full, mass, jnp.ones_like(mass))
    means = jnp.einsum("...rm,...md->...rd", member, y, precision=_EXACT) / safe
    log_mass = jnp.where(full | ~full.any(-2, keepdims=True), jnp.log(safe), -jnp.inf)
    z = _products(means, x) / epsilon + log_mass
    peak = jax.lax.stop_gradient(z.max(-2, keepdims=True))
    half = jnp.log(jnp.exp((z - peak) / 2).sum(-2)) + jnp.squeeze(peak, -2) / 2
    return (*_top(z, epsilon), -epsilon * half)


def _top(z, epsilon):
    """``-epsilon`` times the maximum and the log-sum-exp over the centres."""
    peak = z.max(-2)
    fixed = jax.lax.stop_gradient(peak)
    lse = jnp.log(jnp.exp(z - fixed[..., None, :]).sum(-2)) + fixed
    return -epsilon * peak, -epsilon * lse


def _members(y, centres, valid):
    """``(..., R, M)``: 1 at the nearest centre of every valid token, split between ties."""
    distance = _square_distances(centres, y)
    nearest = distance == distance.min(-2, keepdims=True)
    nearest = (nearest & valid[..., None, :]).astype(y.dtype)
    return nearest / jnp.maximum(nearest.sum(-2, keepdims=True), jnp.ones((), y.dtype))


def _weights(h, valid):
    """``exp(h)`` up to a factor per problem; 0 where not valid."""
    peak = jnp.where(valid, h, -jnp.inf).max(-1, keepdims=True)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isneginf(peak), jnp.zeros_like(peak), peak))
    return jnp.where(valid, jnp.exp(jnp.where(valid, h - peak, jnp.zeros_like(h))), 0.0)


def _products(a, b):
    return jnp.einsum("...rd,...nd->...rn", a, b, precision=_EXACT)


def _square_distances(a, b):
    a_size, b_size = squared_norm(a)[..., :, None], squared_norm(b)[..., None, :]
    return a_size + b_size - 2 * _products(a, b)


def _centres(name, centres, q):
    """Centres ``(R, d)`` or ``(H, R, d)``, with leading axes of size 1 up to the rank of ``q``."""
    centres = checks.array(f"{name} centres", centres)
    heads = q.ndim < 3 or centres.ndim == 2 or centres.shape[0] == q.shape[-3]
    if centres.ndim not in (2, 3) or centres.shape[-1] != q.shape[-1] or not heads:
        raise ValueError(
            f"{name} centres of shape {centres.shape} must be (R, {q.shape[-1]}), or per head, to "
            f"fit tokens of shape {q.shape}"
        )
    return jax.lax.broadcast_to_rank(centres, q.ndim)
