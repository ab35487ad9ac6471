"""The predictor: features and a head that give a dual without the scaling loop.

Paper, eq. asap_source_prediction: ``f_hat = Pi_0(X_Theta(Q, K) omega)``.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, features, masks
from asap_jax.scores import query_shift
from asap_jax.solvers import ctransform
from asap_jax.spec import PADDINGS

SIDES = ("query", "key")
BASELINES = ("none", "first_step")


@flax.struct.dataclass
class LinearHead:
    """Linear map from features to a dual: coefficients ``(F,)`` shared, or ``(H, F)`` per head."""

    coefficients: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x (..., H, N, F)`` to ``(..., H, N)``."""
        w = checks.array("coefficients", self.coefficients).astype(x.dtype)
        if w.ndim not in (1, 2) or w.shape[-1] != x.shape[-1]:
            raise ValueError(
                f"coefficients of shape {w.shape} do not fit features of shape "
                f"{x.shape}: expected ({x.shape[-1]},) or (heads, {x.shape[-1]})"
            )
        exact = jax.lax.Precision.HIGHEST
        if w.ndim == 1:
            return jnp.einsum("...nf,f->...n", x, w, precision=exact)
        if x.ndim < 3 or x.shape[-3] != w.shape[0]:
            raise ValueError(
                f"coefficients of shape {w.shape} are for {w.shape[0]} heads, "
                f"features of shape {x.shape} have another number"
            )
        return jnp.einsum("...hnf,hf->...hn", x, w, precision=exact)


@flax.struct.dataclass
class MLPHead:
    """A linear head with a small hidden layer beside it: ``x.w + tanh(x W + b).o`` per head.

    Attributes:
      coefficients_in: ``(H, F)`` or ``(F,)``.
      hidden: ``(H, F, K)`` or ``(F, K)``; bias, out: ``(H, K)`` or ``(K,)``.
    """

    coefficients_in: jax.Array
    hidden: jax.Array
    bias: jax.Array
    out: jax.Array

    @classmethod
    def around(cls, linear: LinearHead, whitening: jax.Array, num_hidden: int, seed: int):
        """The head that equals ``linear``, with hidden units on whitened features to be fitted.

        ``whitening (..., F, F)``: features times it have unit covariance.
        """
        w = linear.coefficients
        draw = jax.random.normal(jax.random.key(seed), (*w.shape, num_hidden), w.dtype)
        hidden = jnp.einsum("...fg,...gk->...fk", whitening, draw) / w.shape[-1] ** 0.5
        zero = jnp.zeros((*w.shape[:-1], num_hidden), w.dtype)
        return cls(w, hidden, zero, zero)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x (..., H, N, F)`` to ``(..., H, N)``."""
        linear = LinearHead(self.coefficients_in)(x)
        hidden, bias, out = (
            checks.array(name, getattr(self, name)).astype(x.dtype)
            for name in ("hidden", "bias", "out")
        )
        shape = jnp.shape(self.coefficients_in)
        units = (*shape[:-1], *hidden.shape[-1:])
        if hidden.shape != (*shape, *hidden.shape[-1:]) or not bias.shape == out.shape == units:
            raise ValueError(
                f"hidden of shape {hidden.shape}, bias of shape {bias.shape} and out of shape "
                f"{out.shape} do not fit coefficients_in of shape {shape}"
            )
        heads = "" if bias.ndim == 1 else "h"
        exact = jax.lax.Precision.HIGHEST
        inside = jnp.einsum(f"...{heads}nf,{heads}fk->...{heads}nk", x, hidden, precision=exact)
        bias = bias[..., None, :]
        inside = jnp.tanh(inside + bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape))
        return linear + jnp.einsum(
            f"...{heads}nk,{heads}k->...{heads}n", inside, out, precision=exact
        )


@flax.struct.dataclass(init=False)
class Predictor:
    """Predicts a centred dual of one side, in cost coordinates.

    ``Predictor(directions=..., coefficients=...)`` is the shorthand for the paper's: one family
    of sliced potentials under a linear head. A ``flax.struct`` pytree.

    Attributes:
      features: tuple of feature families, concatenated; each owns its arrays.
      head: from features to a dual, for instance ``LinearHead``.
      token_bias: ``(length,)``, or per head ``(H, length)``, added to the dual by position; or
        None.
      corrections: tuple of ``Correction``; the i-th is applied to the dual that the i-th closure
        gives, before the next closure (a chain). Fewer than the closures.
      statistics: numbers measured while calibrating (a dict of arrays), or None.
      side: ``"query"`` or ``"key"``: whose dual this is.
      baseline: ``"none"``, or ``"first_step"`` to predict the residual to the first half-step
        of that side from the zero dual (residual log-sum-exp).
      padding: which tokens carry features, see ``SinkhornSpec``; None leaves it to the spec.
        ``"none"`` takes in padded queries that a key mask leaves in the closures: they carry
        column mass, so the key dual depends on them.
    """

    features: tuple[Any, ...]
    head: Any
    token_bias: jax.Array | None
    corrections: tuple[Any, ...]
    statistics: Any
    side: str = flax.struct.field(pytree_node=False)
    baseline: str = flax.struct.field(pytree_node=False)
    padding: str | None = flax.struct.field(pytree_node=False)

    def __init__(
        self,
        features=(),
        head=None,
        *,
        directions=None,
        coefficients=None,
        token_bias=None,
        corrections=(),
        statistics=None,
        side="query",
        baseline="none",
        padding=None,
    ):
        if directions is not None:
            if not isinstance(features, (tuple, list)):
                raise TypeError(f"features must be a tuple, got {checks.told(features)}")
            features = (_families.SlicedPotentials(directions), *features)
        if coefficients is not None:
            if head is not None:
                raise ValueError("give a head or coefficients, not both")
            head = LinearHead(coefficients)
        checks.one_of("side", side, SIDES)
        checks.one_of("baseline", baseline, BASELINES)
        if padding is not None:
            checks.one_of("padding", padding, PADDINGS)
        features = _as_tuple("features", features, "feature families, such as Moments()")
        corrections = _as_tuple("corrections", corrections, "Corrections")
        for name, value in dict(
            features=features,
            head=head,
            token_bias=token_bias,
            corrections=corrections,
            statistics=statistics,
            side=side,
            baseline=baseline,
            padding=padding,
        ).items():
            object.__setattr__(self, name, value)

    @property
    def coefficients(self) -> jax.Array:
        """The coefficients of a linear head, ``(F,)`` or ``(H, F)``."""
        return self.head.coefficients


_families = features


def _as_tuple(name: str, value: Any, wanted: str) -> Any:
    """``value``, a list as a tuple.

    Trees are rebuilt with any objects for their leaves, orbax's with texts: only what none would
    hold is refused here, with a TypeError, and the rest where it is used.
    """
    if isinstance(value, Correction) or callable(value):
        raise TypeError(f"{name} must be a tuple of {wanted}, got {checks.told(value)}")
    return tuple(value) if isinstance(value, list) else value


@flax.struct.dataclass
class Correction:
    """What is added to the dual that a closure gave, to bring it nearer to the teacher's.

    Attributes:
      features: tuple of feature families of that side.
      head: linear, on the closure's centred cost dual and then the features.
    """

    features: tuple[Any, ...]
    head: Any


@flax.struct.dataclass
class DualPair:
    """Both duals predicted, for the ablation without a c-transform (paper, design table).

    Attributes:
      query, key: predictors of the two sides.
      offset: added to the centred key dual, so that the pair's sum is absolute; ``()``.
    """

    query: Predictor
    key: Predictor
    offset: jax.Array


def predict(
    predictor: Predictor,
    q,
    k,
    *,
    scale: float | None = None,
    query_valid=None,
    key_valid=None,
    scores=None,
    epsilon: float = 1.0,
    mask=None,
) -> jax.Array:
    """The predicted dual of ``predictor.side``, centred over its valid tokens, cost coordinates.

    Args:
      predictor: the fitted predictor.
      q: queries ``(..., N, d)``; k: keys ``(..., M, d)``; a per-head head needs heads on axis -3.
      scale: score scale; ``1 / sqrt(d)`` when None.
      query_valid, key_valid: bool, broadcasting to ``(..., N)``, ``(..., M)``: feature validities.
      scores, epsilon, mask: only for ``baseline="first_step"``.

    Returns:
      ``(..., N)`` for the query side, ``(..., M)`` for the key side. Subtract ``query_shift`` of
      that side before a closure on the score kernel.

    Raises:
      ValueError: shapes that do not fit, a missing head or features.
      TypeError: another thing than a Predictor, or parts of it of the wrong type.
    """
    checks.instance("predictor", predictor, Predictor, "a Predictor")
    if not predictor.features or predictor.head is None:
        raise ValueError(
            "predictor needs at least one feature family and a head (for instance "
            "Predictor(directions=..., coefficients=...))"
        )
    features.check_families("features", predictor.features)
    if not callable(predictor.head):
        raise TypeError(f"head must be callable on features, got {checks.told(predictor.head)}")
    q, k = checks.real_array("q", q), checks.real_array("k", k)
    checks.heads_last_dim(q, k)
    own, other, valid, other_valid = own_side(predictor.side, q, k, query_valid, key_valid)
    dual = features.evaluate(
        predictor.features,
        predictor.head,
        own,
        other,
        scale=scale,
        query_valid=valid,
        key_valid=other_valid,
    )
    if predictor.token_bias is not None:
        bias = checks.array("token_bias", predictor.token_bias).astype(dual.dtype)
        if bias.ndim not in (1, 2) or bias.shape != dual.shape[-bias.ndim :]:
            raise ValueError(
                f"token_bias of shape {bias.shape} does not fit {dual.shape[-1]} tokens"
            )
        dual = dual + bias.reshape((1,) * (dual.ndim - bias.ndim) + bias.shape)
    if predictor.baseline == "first_step":
        if scores is None:
            raise ValueError("baseline='first_step' needs scores")
        scores = checks.real_array("scores", scores)
        if scores.shape != (*q.shape[:-1], k.shape[-2]):
            raise ValueError(
                f"scores of shape {scores.shape} do not fit q of shape {q.shape} and k of shape "
                f"{k.shape}"
            )
        dual = dual + first_step(
            scores, predictor.side, q, k, scale=scale, epsilon=epsilon, mask=mask
        )
    return masks.center(dual, valid)


def design_matrix(families, side: str, q, k, *, scale=None, query_valid=None, key_valid=None):
    """Features for the dual of ``side`` and the validity of its tokens.

    Returns ``(x (..., N, F), valid (..., N))``, with M for N on the key side.
    """
    own, other, valid, other_valid = own_side(side, q, k, query_valid, key_valid)
    x = features.concatenate(
        families, own, other, scale=scale, query_valid=valid, key_valid=other_valid
    )
    return x, checks.validity("valid", valid, x[..., 0])


def own_side(side: str, q, k, query_valid, key_valid):
    """``(own, other, own validity, other validity)``: tokens of ``side`` first; None is all."""
    query_valid = checks.optional_validity("query_valid", query_valid, q[..., 0])
    key_valid = checks.optional_validity("key_valid", key_valid, k[..., 0])
    if side == "key":
        return k, q, key_valid, query_valid
    return q, k, query_valid, key_valid


def first_step(scores, side: str, q, k, *, scale=None, epsilon=1.0, mask=None) -> jax.Array:
    """The side's first half-step from the zero dual, cost coordinates: ``T(0) + shift``."""
    if side == "query":
        zero, transform, own = scores[..., 0, :], ctransform.query_ctransform, q
    else:
        zero, transform, own = scores[..., 0], ctransform.key_ctransform, k
    dual = transform(scores, jnp.zeros_like(zero), epsilon=epsilon, mask=mask)
    return dual + query_shift(own, scale=scale).astype(dual.dtype)
