"""Entropic c-transforms (paper, eq. key_c_transform and source_c_transform).

Everything runs on the *log kernel* ``scores / epsilon`` with -inf at masked entries, in log
scalings ``u = f / epsilon``, ``v = g / epsilon``. Slots with no allowed entry get the dual 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from asap_jax import checks, masks


def mixture(weights: jax.Array, values: jax.Array, precision: Any = None) -> jax.Array:
    """``A @ values``: ``(..., N, M)`` and ``(..., M, d)`` to ``(..., N, d)``."""
    return jnp.einsum("...nm,...md->...nd", weights, values, precision=precision)


def log_kernel(scores: jax.Array, epsilon: float, mask: jax.Array | None) -> jax.Array:
    """``scores / epsilon`` with -inf where ``mask`` (bool, broadcasting) is False."""
    kernel = scores / epsilon
    return kernel if mask is None else jnp.where(mask, kernel, -jnp.inf)


def _peak(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The maximum over ``axis`` (kept; 0 where all entries are -inf) and where that is so."""
    peak = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    empty = peak == -jnp.inf
    return jnp.where(empty, jnp.zeros_like(peak), peak), empty


def closure_step(kernel: jax.Array, scaling: jax.Array, axis: int, log_target) -> jax.Array:
    """One half-step: the log scaling that gives every slice along ``axis`` its target sum.

    ``kernel (..., N, M)`` is the log kernel. ``axis=-2`` sums over queries: from the query
    scaling u ``(..., N)`` to the key scaling v ``(..., M)``; ``axis=-1`` the other way.
    ``log_target`` is a scalar or broadcasts to the result. Differentiable everywhere.
    """
    x = kernel + jnp.expand_dims(scaling, -1 if axis == -2 else -2)
    peak, empty = _peak(x, axis)
    total = jnp.sum(jnp.exp(x - peak), axis=axis, keepdims=True)
    lse = jnp.log(jnp.where(empty, jnp.ones_like(total), total)) + peak
    result = log_target - jnp.squeeze(lse, axis)
    return jnp.where(jnp.squeeze(empty, axis), jnp.zeros_like(result), result)


def closure_weights(kernel: jax.Array, scaling: jax.Array, axis: int, log_target) -> jax.Array:
    """The weights after the final half-step, in the equivalent softmax form.

    Same arguments as ``closure_step``; returns A ``(..., N, M)``. The slices along ``axis`` sum
    to ``exp(log_target)`` to rounding at any logits, and masked entries are exactly 0.
    """
    mass, total, target = closure_parts(kernel, scaling, axis, log_target)
    return mass * (target / total)


def closure_parts(
    kernel: jax.Array, scaling: jax.Array, axis: int, log_target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The final half-step before its division: ``A = mass * (target / total)``.

    Same arguments as ``closure_step``; returns ``mass (..., N, M)`` in 0..1, its sums ``total``
    over ``axis`` (kept; 1 where all is masked) and ``target``, broadcasting to ``total``.
    """
    x = kernel + jnp.expand_dims(scaling, -1 if axis == -2 else -2)
    peak, empty = _peak(x, axis)
    mass = jnp.exp(x - peak)
    total = jnp.sum(mass, axis=axis, keepdims=True)
    target = jnp.exp(jnp.asarray(log_target, dtype=kernel.dtype))
    if target.ndim:
        target = jnp.expand_dims(target, axis)
    return mass, jnp.where(empty, jnp.ones_like(total), total), target


def key_ctransform(scores, f, *, epsilon: float = 1.0, log_target=0.0, mask=None) -> jax.Array:
    """Key-side transform ``g_j = eps log_target - eps LSE_i((s_ij + f_i) / eps)``.

    Paper, eq. key_c_transform, on the score kernel (pass ``-C`` as scores for the cost kernel).

    Args:
      scores: ``(..., N, M)``.
      f: query dual ``(..., N)``, in the coordinates of the scores.
      epsilon: > 0.
      log_target: log of the target column sum, attention scale; a number or ``(..., M)``.
      mask: rank of the scores, bool or 0/1.

    Returns:
      g ``(..., M)``; 0 at keys that no query may attend.

    Raises:
      TypeError, ValueError: dtypes, shapes or settings that do not fit, named.
    """
    return _ctransform(scores, f, "f", -2, epsilon, log_target, mask)


def query_ctransform(scores, g, *, epsilon: float = 1.0, log_target=0.0, mask=None) -> jax.Array:
    """Query-side transform ``f_i = eps log_target - eps LSE_j((s_ij + g_j) / eps)``.

    Paper, eq. source_c_transform: the mirror of ``key_ctransform``. ``g (..., M)`` is a key
    dual, ``log_target`` the log of the target row sum (0 on attention scale). Returns
    f ``(..., N)``; 0 at queries with no key.
    """
    return _ctransform(scores, g, "g", -1, epsilon, log_target, mask)


def _ctransform(scores, dual, name, axis, epsilon, log_target, mask):
    scores, dual = _score_args(scores, dual, name, axis)
    epsilon = checks.positive_float("epsilon", epsilon)
    mask = masks.as_mask(mask, scores.shape)
    log_target = checks.array("log_target", log_target, scores.dtype)
    result = (*scores.shape[:-2], scores.shape[-1 if axis == -2 else -2])
    if log_target.ndim and log_target.shape != result:
        checks.broadcasts_to("log_target", log_target.shape, "the transform", result)
    kernel = log_kernel(scores, epsilon, mask)
    return epsilon * closure_step(kernel, dual / epsilon, axis, log_target)


def attention_weights(scores, f, g, *, epsilon: float = 1.0, mask=None) -> jax.Array:
    """Weights ``A_ij = exp((s_ij + f_i + g_j) / eps)``, attention scale (paper, A = N P).

    Args:
      scores: ``(..., N, M)``; f: ``(..., N)``; g: ``(..., M)``, score coordinates.
      epsilon: > 0.
      mask: rank of the scores; masked entries are exactly 0, whatever the duals there.

    Returns:
      ``(..., N, M)``.
    """
    scores, f = _score_args(scores, f, "f", -2)
    scores, g = _score_args(scores, g, "g", -1)
    epsilon = checks.positive_float("epsilon", epsilon)
    kernel = log_kernel(scores, epsilon, masks.as_mask(mask, scores.shape))
    exponent = kernel + f[..., :, None] / epsilon + g[..., None, :] / epsilon
    if mask is not None:
        exponent = jnp.where(kernel == -jnp.inf, -jnp.inf, exponent)
    return jnp.exp(exponent)


def _score_args(scores, dual, name, axis):
    """Scores and a dual of the side summed over, in one accumulation dtype."""
    scores = checks.at_least_f32(checks.real_array("scores", scores))
    dual = checks.real_array(name, dual)
    if scores.ndim < 2 or dual.shape != (*scores.shape[:-2], scores.shape[axis]):
        raise ValueError(
            f"{name} of shape {dual.shape} does not fit scores of shape "
            f"{scores.shape}: expected (..., {'N' if axis == -2 else 'M'})"
        )
    return scores, dual.astype(scores.dtype)
