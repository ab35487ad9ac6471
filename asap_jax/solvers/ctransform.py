"""Entropic c-transforms (paper, eq. key_c_transform and source_c_transform).

The internal functions take the *log kernel* ``scores / epsilon``, -inf where masked, and log
scalings ``u = f / epsilon``, ``v = g / epsilon``. A token with no allowed entry gets the dual 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks, masks


def mixture(weights: jax.Array, values: jax.Array, precision: Any = None) -> jax.Array:
    """``A @ values``: ``(..., N, M)`` and ``(..., M, d)`` to ``(..., N, d)``."""
    return jnp.einsum("...nm,...md->...nd", weights, values, precision=precision)


def log_kernel(scores: jax.Array, epsilon: float, mask: jax.Array | None) -> jax.Array:
    """``scores / epsilon`` with -inf where ``mask`` (bool, broadcasting) is False."""
    kernel = scores / epsilon
    return kernel if mask is None else jnp.where(mask, kernel, -jnp.inf)


def closure_masses(
    kernel: jax.Array, scaling: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``mass = exp(kernel + scaling - peak)``, its sums ``total``, and the maxima ``peak``.

    The sums and maxima over ``axis`` keep it. The fourth result says which slices are all -inf;
    their mass is 0, their total 1/2 and their peak the lowest finite number.

    No ``where`` here: without one, XLA on CPUs computes scores, exponentials, sums and the product
    with the values in one pass.
    """
    x = kernel + jnp.expand_dims(scaling, -1 if axis == -2 else -2)
    peak = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    finite = jnp.maximum(peak, jnp.finfo(x.dtype).min)
    mass = jnp.exp(x - finite)
    # A slice that is not empty has an entry 1, so its total is above 1/2 and its derivative whole.
    total = jnp.maximum(jnp.sum(mass, axis=axis, keepdims=True), 0.5)
    return mass, total, finite, peak == -jnp.inf


def closure_step(
    kernel: jax.Array, scaling: jax.Array, axis: int, log_target: ArrayLike
) -> jax.Array:
    """One half-step: the log scaling that gives every slice along ``axis`` its target sum.

    ``kernel (..., N, M)`` is the log kernel. ``axis=-2`` sums over queries: from the query
    scaling u ``(..., N)`` to the key scaling v ``(..., M)``; ``axis=-1`` the other way.
    ``log_target`` is a scalar or broadcasts to the result. Differentiable everywhere.
    """
    _, total, peak, empty = closure_masses(kernel, scaling, axis)
    result = log_target - jnp.squeeze(jnp.log(total) + peak, axis)
    return jnp.where(jnp.squeeze(empty, axis), jnp.zeros_like(result), result)


def closure_weights(
    kernel: jax.Array, scaling: jax.Array, axis: int, log_target: ArrayLike
) -> jax.Array:
    """The weights after the final half-step, in the equivalent softmax form.

    Same arguments as ``closure_step``; returns A ``(..., N, M)``. The slices along ``axis`` sum
    to ``exp(log_target)`` to rounding at any logits, and masked entries are exactly 0.
    """
    mass, total, target = closure_parts(kernel, scaling, axis, log_target)
    return mass * (target / total)


def closure_parts(
    kernel: jax.Array, scaling: jax.Array, axis: int, log_target: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The factors of the weights after the final half-step: ``A = mass * (target / total)``.

    Same arguments as ``closure_step``; returns ``mass (..., N, M)`` in 0..1, its sums ``total``
    over ``axis``, which keeps size 1 (1/2 for masked slices), and ``target``, which broadcasts to
    ``total``.
    """
    mass, total, _, _ = closure_masses(kernel, scaling, axis)
    target = jnp.exp(jnp.asarray(log_target, dtype=kernel.dtype))
    return mass, total, jnp.expand_dims(target, axis) if target.ndim else target


def key_ctransform(
    scores: ArrayLike,
    f: ArrayLike,
    *,
    epsilon: float = 1.0,
    log_target: ArrayLike = 0.0,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """Key-side transform ``g_j = eps log_target - eps LSE_i((s_ij + f_i) / eps)``.

    Paper, eq. key_c_transform, on the score kernel. For the cost kernel, pass ``-C`` as scores.

    Args:
      scores: ``(..., N, M)``.
      f: query dual ``(..., N)``, in the coordinates of the scores.
      epsilon: > 0.
      log_target: log of the target column sum, attention scale; a number or ``(..., M)``.
      mask: rank of the scores, bool or 0/1.

    Returns:
      g ``(..., M)``; 0 at keys that no query may attend.

    Raises:
      TypeError, ValueError: dtypes, shapes or settings that do not fit.

    Example:
      The columns of the weights sum to 1 for any query dual:

      >>> s, f = jnp.array([[2.0, 0.0], [1.0, -3.0]]), jnp.array([0.5, -1.0])
      >>> attention_weights(s, f, key_ctransform(s, f)).sum(0).round(5)
      Array([1., 1.], dtype=float32)
    """
    return _ctransform(scores, f, "f", -2, epsilon, log_target, mask)


def query_ctransform(
    scores: ArrayLike,
    g: ArrayLike,
    *,
    epsilon: float = 1.0,
    log_target: ArrayLike = 0.0,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """Query-side transform ``f_i = eps log_target - eps LSE_j((s_ij + g_j) / eps)``.

    Paper, eq. source_c_transform: ``key_ctransform`` with the sides exchanged. ``g (..., M)`` is a
    key dual, ``log_target`` the log of the target row sum (0 on attention scale). Returns
    f ``(..., N)``; 0 at queries with no key.
    """
    return _ctransform(scores, g, "g", -1, epsilon, log_target, mask)


def _ctransform(scores, dual, name, axis, epsilon, log_target, mask) -> jax.Array:
    scores, dual = _score_args(scores, dual, name, axis)
    epsilon = checks.score_factor("epsilon", epsilon)
    (scores,) = masks.spoiled(mask, scores)
    mask = masks.as_mask(mask, scores.shape)
    log_target = checks.array("log_target", log_target, scores.dtype)
    result = (*scores.shape[:-2], scores.shape[-1 if axis == -2 else -2])
    if log_target.ndim:
        checks.broadcasts_to("log_target", log_target.shape, "the transform", result)
    kernel = log_kernel(scores, epsilon, mask)
    return epsilon * closure_step(kernel, dual / epsilon, axis, log_target)


def attention_weights(
    scores: ArrayLike,
    f: ArrayLike,
    g: ArrayLike,
    *,
    epsilon: float = 1.0,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """Weights ``A_ij = exp((s_ij + f_i + g_j) / eps)``, attention scale (paper, A = N P).

    Args:
      scores: ``(..., N, M)``; f: ``(..., N)``; g: ``(..., M)``, score coordinates.
      epsilon: > 0.
      mask: rank of the scores; masked entries are exactly 0 for any duals.

    Returns:
      ``(..., N, M)``.
    """
    s, f = _score_args(scores, f, "f", -2)
    s, g = _score_args(s, g, "g", -1)
    epsilon = checks.score_factor("epsilon", epsilon)
    (s,) = masks.spoiled(mask, s)
    kernel = log_kernel(s, epsilon, masks.as_mask(mask, s.shape))
    exponent = kernel + f[..., :, None] / epsilon + g[..., None, :] / epsilon
    if mask is not None:
        exponent = jnp.where(kernel == -jnp.inf, -jnp.inf, exponent)
    return jnp.exp(exponent)


def _score_args(scores: Any, dual: Any, name: str, axis: int) -> tuple[jax.Array, jax.Array]:
    """Scores, and a dual of the side that ``axis`` sums over, in one accumulation dtype."""
    scores = checks.at_least_f32(checks.real_array("scores", scores))
    dual = checks.real_array(name, dual)
    if scores.ndim < 2 or dual.shape != (*scores.shape[:-2], scores.shape[axis]):
        raise ValueError(
            f"{name} of shape {dual.shape} does not fit scores of shape "
            f"{scores.shape}: expected (..., {'N' if axis == -2 else 'M'})"
        )
    return scores, dual.astype(scores.dtype)
