"""Moment features: what the leading moments of both sides say about a dual, without sorting.

A c-transform is the log-moment-generating function of the other side, so its leading terms are
the moments of that side.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.features.base import check_tokens, register
from asap_jax.problem import Tokens

NUM_INVARIANT, NUM_ABSOLUTE = 6, 2


@register("moments")
@flax.struct.dataclass
class Moments:
    """Linear and quadratic functions of a token, with the moments of both sides in them.

    With ``x = sqrt(scale) q``, mean and covariance ``m, C`` of the active keys and ``m_x, C_x`` of
    the active queries (both times ``sqrt(scale)``, ``scale``), ``u = x - m_x`` and
    ``delta = m_x - m``, the features of one query are, each centred over the active queries,

    - the d values ``u``;
    - ``|x - m|^2 / 2`` (the shift between score and cost coordinates), ``u.delta``;
    - ``u'Cu``, ``|Cu|^2``, ``u'C_x u``, ``u'C delta``;
    - where ``absolute``: ``u.m``, ``u'C m``.

    All but the last two are invariant to one common shift of q and k, as cost-coordinate duals
    are, and keep their float32 digits under any: the mean of the active keys is taken from both
    first. The last two make the span that of ``q.m`` and ``q'C m`` as well, for models that use
    where the tokens are and not only how they differ.

    Features are evaluated at every query, active or not. For a key-side dual swap the roles.

    Attributes:
      absolute: whether the features that a common shift changes are among them.
    """

    absolute: bool = flax.struct.field(pytree_node=False, default=True)

    @classmethod
    def create(cls, rng, head_dim: int, *, num_slices: int = 32, slice_kind: str = "gaussian"):
        """The family; nothing is drawn."""
        del rng, head_dim, num_slices, slice_kind
        return cls()

    def num_features(self, head_dim: int) -> int:
        """``head_dim + 8``, or ``head_dim + 6`` without the absolute ones."""
        return head_dim + NUM_INVARIANT + (NUM_ABSOLUTE if self.absolute else 0)

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None) -> jax.Array:
        """Centred features ``(..., N, F)`` of the side of ``q``.

        Raises:
          ValueError: shapes that do not fit; TypeError: dtypes that are not real floating.
        """
        t = _moments(check_tokens(q, k, scale, query_valid, key_valid))
        by_c = _product(t.u, t.c)
        along = lambda vector, rows=t.u: jnp.einsum(
            "...nd,...d->...n", rows, vector, precision=_EXACT
        )
        columns = [
            0.5 * _dot(t.u, t.u) + along(t.delta),
            along(t.delta),
            _dot(t.u, by_c),
            _dot(by_c, by_c),
            _dot(t.u, _product(t.u, t.c_own)),
            along(t.delta, by_c),
        ]
        if self.absolute:
            columns += [along(t.mean), along(t.mean, by_c)]
        x = jnp.concatenate([t.u, jnp.stack(columns, axis=-1)], axis=-1)
        return x - masks.token_mean(x, t.valid)

    def linear(self, coefficients: jax.Array, tokens: Tokens) -> jax.Array:
        """The features under ``coefficients`` ``(F,)`` or ``(H, F)``: ``(..., N)``.

        One linear and one quadratic form per head, ``u.a + u'Bu``: three products of N d^2, and
        no feature is formed. Equal to the features' combination up to a constant per problem.
        """
        t = _moments(tokens)
        w = jnp.asarray(coefficients, t.centred.dtype)
        d = t.centred.shape[-1]
        if w.ndim == 1:
            w = jnp.broadcast_to(w, (*t.delta.shape[:-1], w.shape[-1]))
        else:
            w = jnp.broadcast_to(w, (*t.delta.shape[:-2], *w.shape))
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
        # The scale goes to the small factors, so that no scaled copy of the tokens is made.
        return _dot(t.centred, _product(t.centred, t.root**2 * b) + t.root * a[..., None, :])


_EXACT = jax.lax.Precision.HIGHEST


class _Moments(NamedTuple):
    """Moments of both sides, times ``root = sqrt(scale)``, and the centred tokens of the own side.

    centred ``(..., N, d)``, without root; mean, delta ``(..., d)``; c, c_own ``(..., d, d)``; valid
    ``(..., N)``, None for all.
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
    # Relative to one of the tokens, means keep their float32 digits under any offset.
    some = _first_valid(t.other, t.other_valid)
    other_mean = masks.token_mean(t.other - some, t.other_valid)
    own_mean = masks.token_mean(t.own - some, t.own_valid)
    own = t.own - some - own_mean
    own_active = masks.zero_inactive(own, t.own_valid)
    other_active = masks.zero_inactive(t.other - some - other_mean, t.other_valid)
    return _Moments(
        centred=own,
        root=root,
        mean=root * jnp.squeeze(some + other_mean, -2),
        delta=root * jnp.squeeze(own_mean - other_mean, -2),
        c=root**2 * _covariance(other_active, t.other_valid),
        c_own=root**2 * _covariance(own_active, t.own_valid),
        valid=t.own_valid,
    )


def _first_valid(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """The first valid token ``(..., 1, d)``; the first of all where none is valid."""
    if valid is None:
        return x[..., :1, :]
    index = jnp.argmax(jnp.broadcast_to(valid, x.shape[:-1]), -1)[..., None, None]
    return jnp.take_along_axis(x, index, -2)


def _covariance(centred: jax.Array, valid: jax.Array | None) -> jax.Array:
    total = jnp.einsum("...nd,...ne->...de", centred, centred, precision=_EXACT)
    if valid is None:
        return total / centred.shape[-2]
    count = jnp.maximum(valid.sum(-1, dtype=centred.dtype), jnp.ones((), centred.dtype))
    return total / count[..., None, None]


def _product(x, matrix):
    return jnp.einsum("...nd,...de->...ne", x, matrix, precision=_EXACT)


def _dot(x, y):
    return jnp.sum(x * y, axis=-1)
