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

from asap_jax import devices, masks
from asap_jax.features.base import Family, register
from asap_jax.problem import Tokens
from asap_jax.scores import dot

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
    adds_up = True

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
        by_c = _product(t.u, t.c)
        along = lambda vector, rows=t.u: jnp.einsum(
            "...nd,...d->...n", rows, vector, precision=_EXACT
        )
        columns = [
            0.5 * dot(t.u, t.u) + along(t.delta),
            along(t.delta),
            dot(t.u, by_c),
            dot(by_c, by_c),
            dot(t.u, _product(t.u, t.c_own)),
            along(t.delta, by_c),
        ]
        if self.absolute:
            columns += [along(t.mean), along(t.mean, by_c)]
        x = jnp.concatenate([t.u, jnp.stack(columns, axis=-1)], axis=-1)
        return x - masks.token_mean(x, t.valid, tokens.axis_name)

    def linear(self, coefficients: jax.Array, tokens: Tokens) -> jax.Array:
        """The features times ``coefficients`` ``(F,)`` or ``(H, F)``, up to a constant.

        This is a linear and a quadratic form per head, ``u.a + u'Bu``: three products of N d^2
        operations, without the features.
        """
        t = _moments(tokens)
        w = jnp.asarray(coefficients, t.centred.dtype)
        d = t.centred.shape[-1]
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
        a = a + jnp.einsum("...de,...e->...d", t.c, inside, precision=_EXACT)
        unit = jnp.broadcast_to(jnp.eye(d, dtype=a.dtype), t.c.shape)
        wide = lambda x: x[..., None]
        b = wide(by_c) * t.c + wide(by_c2) * _product(t.c, t.c) + wide(by_own) * t.c_own
        b = b + 0.5 * wide(rho) * unit
        # Scale the small factors, not the tokens, to avoid a copy of the tokens.
        return dot(t.centred, _product(t.centred, t.root**2 * b) + t.root * a[..., None, :])


_EXACT = jax.lax.Precision.HIGHEST


class _Moments(NamedTuple):
    """Centred tokens of the own side, and the moments of both sides times ``root = sqrt(scale)``.

    centred ``(..., N, d)``, not times root; mean, delta ``(..., d)``; c, c_own ``(..., d, d)``;
    valid ``(..., N)``, None if all are.
    """

    centred: jax.Array
    root: float
    mean: jax.Array
    delta: jax.Array
    c: jax.Array
    c_own: jax.Array
    valid: jax.Array | None

    @property
    def u(self) -> jax.Array:
        """Centred tokens times ``root``."""
        return self.root * self.centred


def _moments(t: Tokens) -> _Moments:
    root = math.sqrt(t.scale)
    # Means relative to one of the tokens keep their float32 digits when all tokens are far from 0.
    # Which one makes no difference, so the gradient through it is 0.
    origin = jax.lax.stop_gradient(_first_valid(t.other, t.other_valid))
    origin = devices.mean(origin, t.axis_name)
    other_mean = masks.token_mean(t.other - origin, t.other_valid, t.axis_name)
    own_mean = masks.token_mean(t.own - origin, t.own_valid, t.axis_name)
    own = t.own - origin - own_mean
    own_active = masks.zero_inactive(own, t.own_valid)
    other_active = masks.zero_inactive(t.other - origin - other_mean, t.other_valid)
    return _Moments(
        centred=own,
        root=root,
        mean=root * jnp.squeeze(origin + other_mean, -2),
        delta=root * jnp.squeeze(own_mean - other_mean, -2),
        c=root**2 * _covariance(other_active, t.other_valid, t.axis_name),
        c_own=root**2 * _covariance(own_active, t.own_valid, t.axis_name),
        valid=t.own_valid,
    )


def _first_valid(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """The first valid token ``(..., 1, d)``, or the first token if none is valid."""
    if valid is None:
        return x[..., :1, :]
    index = jnp.argmax(jnp.broadcast_to(valid, x.shape[:-1]), -1)[..., None, None]
    return jnp.take_along_axis(x, index, -2)


def _covariance(centred: jax.Array, valid: jax.Array | None, axis_name: str | None) -> jax.Array:
    total = jnp.einsum("...nd,...ne->...de", centred, centred, precision=_EXACT)
    if valid is None:
        return devices.mean(total / centred.shape[-2], axis_name)
    count = devices.total(valid.sum(-1, dtype=centred.dtype), axis_name)
    count = jnp.maximum(count, jnp.ones((), centred.dtype))
    return devices.total(total, axis_name) / count[..., None, None]


def _product(x, matrix):
    return jnp.einsum("...nd,...de->...ne", x, matrix, precision=_EXACT)
