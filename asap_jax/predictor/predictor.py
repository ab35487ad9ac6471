"""The predictor: features and a head that predict a dual without the scaling loop.

Paper, eq. asap_source_prediction: ``f_hat = Pi_0(X_Theta(Q, K) omega)``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks, features, masks
from asap_jax.predictor.corrections import Correction, check_corrections
from asap_jax.predictor.heads import LinearHead
from asap_jax.problem import Tokens
from asap_jax.solvers import ctransform
from asap_jax.spec import PADDINGS

SIDES = ("query", "key")
BASELINES = ("none", "first_step")


@flax.struct.dataclass(init=False)
class Predictor:
    """Predicts a centred dual of one side, in cost coordinates.

    ``Predictor(directions=..., coefficients=...)`` is the paper's predictor: sliced potentials and
    a linear head. A ``flax.struct`` pytree.

    Attributes:
      features: tuple of feature families, concatenated; each owns its arrays.
      head: a callable from features to a dual, for instance ``LinearHead``.
      token_bias: ``(length,)``, or per head ``(H, length)``, added to the dual by position; or
        None.
      corrections: tuple of ``Correction``; the i-th one changes the dual after the i-th closure.
        There are fewer corrections than closures.
      row_mass: a ``RowMass`` for a layer that ends on rows although the teacher ends on columns, or
        None.
      statistics: None, or what calibration measured: ``{name: {"mean": (H,), "std": (H,)}}`` of
        the logarithms of ``score_rms``, ``query_rms``, ``key_rms`` and ``num_keys`` over all
        calibration problems (see ``predictor/statistics``). With a guard it also holds
        ``limits``: the largest ``query_rms`` and ``key_rms`` ``(H,)`` that the layer predicts
        from. Larger tokens are shrunk to them, and the predicted dual grows in return.
      side: ``"query"`` or ``"key"``, the side of the dual.
      baseline: ``"none"``, or ``"first_step"`` to predict the residual to the first half-step
        of that side from the zero dual (residual log-sum-exp).
      padding: which tokens carry features, see ``SinkhornSpec``; None means as in the spec.
        ``"none"`` includes padded queries that a key-only mask leaves in the closures: they carry
        column mass, so the key dual depends on them.
    """

    features: tuple[Any, ...]
    head: Any
    token_bias: jax.Array | None
    corrections: tuple[Any, ...]
    row_mass: Any
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
        row_mass=None,
        statistics=None,
        side="query",
        baseline="none",
        padding=None,
    ):
        if directions is not None:
            if not isinstance(features, (tuple, list)):
                raise TypeError(f"features must be a tuple, got {checks.describe(features)}")
            features = (_families.SlicedPotentials(directions), *features)
        if coefficients is not None:
            if head is not None:
                raise ValueError("give a head or coefficients, not both")
            head = LinearHead(coefficients)
        features = _as_tuple("features", features, "feature families, such as Moments()")
        corrections = _as_tuple("corrections", corrections, "Corrections")
        checks.one_of("side", side, SIDES)
        checks.one_of("baseline", baseline, BASELINES)
        if padding is not None:
            checks.one_of("padding", padding, PADDINGS)
        parts = features, head, token_bias, corrections, row_mass, statistics
        values = (*parts, side, baseline, padding)
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def coefficients(self) -> jax.Array:
        """The coefficients of a linear head, ``(F,)`` or ``(H, F)``."""
        return self.head.coefficients


_families = features


def _as_tuple(name: str, value: Any, expected: str) -> Any:
    """``value``; a list as a tuple.

    Pytree tools rebuild this class with placeholder leaves (orbax uses strings), so this rejects
    only what can never be a leaf; ``predict`` checks the rest.
    """
    if isinstance(value, Correction) or callable(value):
        raise TypeError(f"{name} must be a tuple of {expected}, got {checks.describe(value)}")
    return tuple(value) if isinstance(value, list) else value


@flax.struct.dataclass
class DualPair:
    """Predictors of both duals, for the ablation without a c-transform (paper, design table).

    Attributes:
      query, key: predictors of the two sides.
      offset: ``()``, added to the key dual, because predicted duals are centred and f + g is not.
    """

    query: Predictor
    key: Predictor
    offset: jax.Array


def predict(
    predictor: Predictor,
    q: ArrayLike,
    k: ArrayLike,
    *,
    scale: float | None = None,
    query_valid: ArrayLike | None = None,
    key_valid: ArrayLike | None = None,
    scores: ArrayLike | None = None,
    epsilon: float = 1.0,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """The predicted dual of ``predictor.side``, centred over its valid tokens, cost coordinates.

    Args:
      predictor: the fitted predictor.
      q: queries ``(..., N, d)``; k: keys ``(..., M, d)``. Coefficients per head need heads on axis
        -3.
      scale: score scale; ``1 / sqrt(d)`` when None.
      query_valid, key_valid: bool, broadcasting to ``(..., N)``, ``(..., M)``: feature validities.
      scores, epsilon, mask: only for ``baseline="first_step"``.

    Returns:
      ``(..., N)`` for the query side, ``(..., M)`` for the key side. Subtract ``query_shift`` of
      that side before a closure on the score kernel.

    Raises:
      ValueError: shapes that do not fit, a missing head or features.
      TypeError: not a Predictor, or one with parts of the wrong type.
    """
    check(predictor)
    queries_first = features.check_tokens(q, k, scale, query_valid, key_valid)
    tokens = queries_first if predictor.side == "query" else queries_first.swapped()
    if predictor.baseline != "first_step":
        return centred_dual(predictor, tokens)
    if scores is None:
        raise ValueError("baseline='first_step' needs scores")
    scores = checks.real_array("scores", scores)
    expected = (*queries_first.own.shape[:-1], queries_first.other.shape[-2])
    if scores.shape != expected:
        raise ValueError(f"scores of shape {scores.shape} do not fit q and k: expected {expected}")
    first = first_step(scores, tokens, predictor.side, epsilon=epsilon, mask=mask)
    return centred_dual(predictor, tokens, first)


def check(predictor: Predictor, num_closures: int | None = None) -> None:
    """Raises TypeError or ValueError if ``predictor`` cannot be evaluated.

    With ``num_closures``, also if its corrections do not fit between that many closures.
    """
    checks.instance("predictor", predictor, Predictor, "a Predictor")
    if not predictor.features or predictor.head is None:
        raise ValueError(
            "predictor needs at least one feature family and a head (for instance "
            "Predictor(directions=..., coefficients=...))"
        )
    features.check_families("features", predictor.features)
    if not callable(predictor.head):
        raise TypeError(f"head must be callable on features, got {checks.describe(predictor.head)}")
    if num_closures is not None and predictor.corrections != ():
        check_corrections(predictor.corrections, num_closures)


def centred_dual(predictor: Predictor, tokens: Tokens, first: jax.Array | None = None) -> jax.Array:
    """The predicted dual ``(..., N)`` of checked tokens, with ``predictor.side`` as their own side.

    Paper, eq. asap_source_prediction. ``first`` is added: the first half-step, for
    ``baseline="first_step"``.
    """
    dual = features.evaluate(predictor.features, predictor.head, tokens)
    if predictor.token_bias is not None:
        bias = checks.array("token_bias", predictor.token_bias).astype(dual.dtype)
        if bias.ndim not in (1, 2) or bias.shape != dual.shape[-bias.ndim :]:
            raise ValueError(
                f"token_bias of shape {bias.shape} does not fit {dual.shape[-1]} tokens"
            )
        dual = dual + jax.lax.broadcast_to_rank(bias, dual.ndim)
    if first is not None:
        dual = dual + first
    return masks.center(dual, tokens.own_valid, tokens.axis_name)


def first_step(
    scores: jax.Array, tokens: Tokens, side: str, *, epsilon: float = 1.0, mask: Any = None
) -> jax.Array:
    """The first half-step of ``side`` from the zero dual, in cost coordinates."""
    if side == "query":
        zero = jnp.zeros_like(scores[..., 0, :])
        dual = ctransform.query_ctransform(scores, zero, epsilon=epsilon, mask=mask)
    else:
        zero = jnp.zeros_like(scores[..., 0])
        dual = ctransform.key_ctransform(scores, zero, epsilon=epsilon, mask=mask)
    return dual + tokens.shift().astype(dual.dtype)
