"""Moment features: a dual from the means and covariances of both sides, without sorting.

A c-transform is the log-moment-generating function of the other side, so its leading terms are
the moments of that side.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.features.base import Family, register
from asap_jax.problem import Tokens

NUM_INVARIANT, NUM_ABSOLUTE = 6, 2


@register("moments")
@flax.struct.dataclass
class Moments(Family):
    """Linear and quadratic functions of a token, from the moments of both sides.

    Let ``m, C`` be mean and covariance of the active keys, ``m_x, C_x`` those of the active
    queries, all of tokens times ``sqrt(scale)``; ``x = sqrt(scale) q``, ``u = x - m_x`` and
    ``delta = m_x - m``. The features of a query, each centred over the active queries, are

    - the d values ``u``;
    - ``|x - m|^2 / 2`` (the shift between score and cost coordinates), ``u.delta``;
    - ``u'Cu``, ``|Cu|^2``, ``u'C_x u``, ``u'C delta``;
    - if ``absolute``: ``u.m``, ``u'C m``.

    All but the last two do not change when q and k are shifted together, and neither do
    cost-coordinate duals; means are subtracted first, so that large shifts cost no float32 digits.
    The last two add ``q.m`` and ``q'C m`` to the span, for models in which the position of the
    tokens matters, not only their differences.

    Features are evaluated at every query, active or not.

    Attributes:
      absolute: include the two features that change under a common shift.
    """

    absolute: bool = flax.struct.field(pytree_node=False, default=True)

    @classmethod
    def create(
        cls, rng: Any, head_dim: int, *, num_slices: int = 32, slice_kind: str = "gaussian"
    ) -> Moments:
        """The default family; the arguments are not used."""
        return cls()

    def num_features(self, head_dim: int) -> int:
        """``head_dim + 8``, or ``head_dim + 6`` without ``absolute``."""
        return head_dim + NUM_INVARIANT + (NUM_ABSOLUTE if self.absolute else 0)

    def from_tokens(self, tokens: Tokens) -> jax.Array:
        """Centred features ``(..., N, F)``."""
        t = _moments(tokens)
        u = t.root * (t.own - t.own_mean[..., None, :])
        by_c = _product(u, t.c)
        along = lambda vector, rows=u: jnp.einsum(
            "...nd,...d->...n", rows, vector, precision=_EXACT
        )
        columns = [
            0.5 * _dot(u, u) + along(t.delta),
            along(t.delta),
            _dot(u, by_c),
            _dot(by_c, by_c),
            _dot(u, _product(u, t.c_own)),
            along(t.delta, by_c),
        ]
        if self.absolute:
            columns += [along(t.mean), along(t.mean, by_c)]
        x = jnp.concatenate([u, jnp.stack(columns, axis=-1)], axis=-1)
        return x - masks.token_mean(x, tokens.own_valid)

    def linear(self, coefficients: jax.Array, tokens: Tokens) -> jax.Array:
        """The features times ``coefficients`` ``(F,)`` or ``(H, F)``, up to a constant.

        This is a linear and a quadratic form per head, ``u.a + u'Bu``: three products of N d^2
        operations, without the features. The form is moved from ``u`` to tokens that are not
        centred, which saves a pass over them.
        """
        t = _moments(tokens)
        w = jnp.asarray(coefficients, t.own.dtype)
        d = t.own.shape[-1]
        lead = t.delta.shape[: t.delta.ndim - w.ndim]
        w = jnp.broadcast_to(w, (*lead, *w.shape))
        values, rho, delta, by_c, by_c2, by_own, c_delta = (
            w[..., :d],
            *(w[..., d + i, None] for i in range(NUM_INVARIANT)),
        )
        inside = c_delta * t.delta
        a = values + (rho + delta) * t.delta
        if self.absolute:
            mean, c_mean = (w[..., d + NUM_INVARIANT + i, None] for i in range(NUM_ABSOLUTE))
            a = a + mean * t.mean
            inside = inside + c_mean * t.mean
        apply = lambda matrix, x: jnp.einsum("...de,...e->...d", matrix, x, precision=_EXACT)
        a = a + apply(t.c, inside)
        unit = jnp.broadcast_to(jnp.eye(d, dtype=a.dtype), t.c.shape)
        wide = lambda x: x[..., None]
        b = wide(by_c) * t.c + wide(by_c2) * _product(t.c, t.c) + wide(by_own) * t.c_own
        b = t.root**2 * (b + 0.5 * wide(rho) * unit)
        a = t.root * a - 2 * apply(b, t.own_mean)
        return _dot(t.own, _product(t.own, b) + a[..., None, :])


_EXACT = jax.lax.Precision.HIGHEST


class _Moments(NamedTuple):
    """Tokens of the own side, and the moments of both sides.

    own ``(..., N, d)``: relative to about the mean of the other side, which keeps their float32
    digits when all tokens are far from 0; own_mean ``(..., d)``: their mean. Times
    ``root = sqrt(scale)``: mean, of the other side, and delta, ``(..., d)``; c, c_own
    ``(..., d, d)``.
    """

    own: jax.Array
    own_mean: jax.Array
    root: float
    mean: jax.Array
    delta: jax.Array
    c: jax.Array
    c_own: jax.Array


def _moments(t: Tokens) -> _Moments:
    root = math.sqrt(t.scale)
    origin = masks.token_mean(t.other, t.other_valid)
    own, other = t.own - origin, t.other - origin
    own_mean, other_mean = (
        masks.token_mean(own, t.own_valid),
        masks.token_mean(other, t.other_valid),
    )
    active_own, active_other = (
        masks.zero_inactive(own, t.own_valid),
        masks.zero_inactive(other, t.other_valid),
    )
    own_mean, other_mean = jnp.squeeze(own_mean, -2), jnp.squeeze(other_mean, -2)
    return _Moments(
        own=own,
        own_mean=own_mean,
        root=root,
        mean=root * (jnp.squeeze(origin, -2) + other_mean),
        delta=root * (own_mean - other_mean),
        c=root**2 * _covariance(active_other, other_mean, t.other_valid),
        c_own=root**2 * _covariance(active_own, own_mean, t.own_valid),
    )


def _covariance(active: jax.Array, mean: jax.Array, valid: jax.Array | None) -> jax.Array:
    """From tokens ``(..., N, d)``, 0 if not valid; not centred first, which saves a pass."""
    square = jnp.einsum("...nd,...ne->...de", active, active, precision=_EXACT)
    count: Any = active.shape[-2]
    if valid is not None:
        one = jnp.ones((), active.dtype)
        count = jnp.maximum(valid.sum(-1, dtype=one.dtype), one)[..., None, None]
    return square / count - mean[..., :, None] * mean[..., None, :]


def _product(x, matrix):
    return jnp.einsum("...nd,...de->...ne", x, matrix, precision=_EXACT)


def _dot(x, y):
    return jnp.sum(x * y, axis=-1)
