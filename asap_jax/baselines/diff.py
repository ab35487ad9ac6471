"""Differential attention (Ye et al., "Differential Transformer"), non-causal: a baseline.

Heads come in pairs. The map of a pair is the difference of its two softmax maps, so it is signed
and its rows sum to ``1 - lambda``.
"""

from __future__ import annotations

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from asap_jax import checks
from asap_jax.attention import outputs
from asap_jax.attention.flax_call import Call, Result, attention_function
from asap_jax.problem import Problem, promote
from asap_jax.solvers import ctransform
from asap_jax.solvers.plan import DensePlan

IMPLEMENTATIONS = ("auto", "log")
VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def diff_lambda_init(depth: int) -> float:
    """``0.8 - 0.6 exp(-0.3 depth)``, where ``depth`` >= 0 counts the layers from the input.

    Raises:
      TypeError: a depth that is not a static int.
      ValueError: a negative depth.
    """
    if isinstance(depth, (bool, np.bool_, jax.core.Tracer)) or not hasattr(depth, "__index__"):
        raise TypeError(
            f"depth must be a static int, got {type(depth).__name__}; give lambda_init instead "
            f"where the depth is traced, as under a scan over layers"
        )
    if operator.index(depth) < 0:
        raise ValueError(f"depth must be >= 0, got {depth}")
    return 0.8 - 0.6 * math.exp(-0.3 * operator.index(depth))


@attention_function
def diff_attention(
    call: Call,
    *,
    lambda_q1: ArrayLike | None = None,
    lambda_k1: ArrayLike | None = None,
    lambda_q2: ArrayLike | None = None,
    lambda_k2: ArrayLike | None = None,
    depth: int = 0,
    lambda_init: ArrayLike | None = None,
    norm_scale: ArrayLike | None = None,
    norm_epsilon: float = 1e-5,
    scale: float | None = None,
    implementation: str = "auto",
) -> Result:
    """Differential attention in the layout of stock Flax attention.

    Of 2H heads, heads 2h and 2h + 1 are pair h (heads reshaped to ``(H, 2)``). With A1 and A2
    the row-softmax maps of the pair and V its two value heads side by side, ``2 value_dim`` wide,

      lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
      out    = (1 - lambda_init) RMSNorm((A1 - lambda A2) V),

    the norm over the ``2 value_dim`` channels of one pair. The output is cut into 2H heads
    again, so the function serves as ``attention_fn`` of stock attention.

    Args:
      query: ``(..., N, 2H, head_dim)``.
      key: ``(..., M, 2H, head_dim)``; value: ``(..., M, 2H, value_dim)``. Fewer key/value heads,
        2K with K dividing H, are broadcast pair by pair.
      bias, mask: as in ``sinkhorn_attention``, for 2H heads; a pair's heads may differ. A
        causal mask may be given as ``mask``.
      lambda_q1, lambda_k1, lambda_q2, lambda_k2: learned vectors ``(head_dim,)``, shared by the
        pairs; give all four or none (then ``lambda = lambda_init``).
      depth: static index of the layer from 0; sets ``lambda_init`` by ``diff_lambda_init``.
      lambda_init: a number or a traced scalar, overrides ``depth``.
      norm_scale: learned scale of the norm ``(2 value_dim,)``; 1 when None.
      norm_epsilon: > 0, added to the mean square.
      scale: score scale > 0; ``1 / sqrt(head_dim)`` when None.
      return_weights: static; also return the signed maps ``A1 - lambda A2`` of the pairs,
        ``(..., H, N, M)``.
      implementation: ``"auto"`` or ``"log"``.

    Returns:
      ``(..., N, 2H, value_dim)`` in the input dtype, or ``(out, weights)``. Queries with no key
      give exactly 0.

    Raises:
      ValueError, TypeError: as ``sinkhorn_attention``; an odd number of heads; vectors or a norm
        scale of another shape; some but not all of the four vectors.

    Flax's keywords: as in ``sinkhorn_attention``; dropout acts on ``A1 - lambda A2``.
    """
    if checks.static_bool("is_causal", call.is_causal):
        raise ValueError(
            "is_causal=True is refused: attention here is non-causal; give the causal mask as mask"
        )
    checks.one_of("implementation", implementation, IMPLEMENTATIONS)
    query, key, value = promote(call.query, call.key, call.value, dtype=call.dtype)
    key, value = _match_pairs(query, key, value)
    scale = None if scale is None else checks.positive_float("scale", scale)
    p = call.replace(query=query, key=key, value=value).problem(scale)
    start = diff_lambda_init(depth) if lambda_init is None else lambda_init
    start = _scalar("lambda_init", start, p.q.dtype)
    vectors = dict(zip(VECTORS, (lambda_q1, lambda_k1, lambda_q2, lambda_k2), strict=True))
    weights = difference(softmax_maps(p), diff_lambda(start, vectors, p.q))
    pairs = p.replace(v=paired_values(p.v), dtype=p.q.dtype)
    out = outputs.finish(call.replace(return_weights=False), pairs, DensePlan(weights))
    out = (1 - start) * rms_norm(out, norm_scale, norm_epsilon)
    out = out.reshape(*query.shape[:-1], value.shape[-1]).astype(p.dtype)
    if not checks.static_bool("return_weights", call.return_weights):
        return out
    return out, weights.astype(p.dtype)


def softmax_maps(p: Problem) -> jax.Array:
    """The row-softmax maps of single heads ``(..., 2H, N, M)``; rows with no key are 0."""
    kernel = p.log_kernel(epsilon=1.0)
    return ctransform.closure_weights(kernel, jnp.zeros_like(kernel[..., 0, :]), -1, 0.0)


def difference(maps: jax.Array, lam: jax.Array) -> jax.Array:
    """``A1 - lam A2`` of each pair, ``(..., H, N, M)``, from maps ``(..., 2H, N, M)``."""
    pairs = maps.reshape(*maps.shape[:-3], -1, 2, *maps.shape[-2:])
    return pairs[..., 0, :, :] - lam * pairs[..., 1, :, :]


def paired_values(v: jax.Array) -> jax.Array:
    """The two value heads of each pair side by side: ``(..., 2H, M, d)`` to ``(..., H, M, 2d)``."""
    pairs = v.reshape(*v.shape[:-3], -1, 2, *v.shape[-2:])
    return jnp.concatenate([pairs[..., 0, :, :], pairs[..., 1, :, :]], axis=-1)


def diff_lambda(start: jax.Array, vectors: dict, like: jax.Array) -> jax.Array:
    """lambda, a scalar; ``vectors`` are the four of width ``like.shape[-1]``, or four Nones."""
    if all(x is None for x in vectors.values()):
        return start
    missing = [name for name, x in vectors.items() if x is None]
    if missing:
        raise ValueError(f"give all of {', '.join(VECTORS)} or none; missing: {', '.join(missing)}")
    q1, k1, q2, k2 = (_vector(name, x, like) for name, x in vectors.items())
    return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + start


def rms_norm(x: jax.Array, scale, epsilon: float) -> jax.Array:
    """``x / sqrt(mean x^2 + epsilon)`` over the last axis, times ``scale`` unless None."""
    epsilon = checks.positive_float("norm_epsilon", epsilon)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    if scale is None:
        return x
    scale = _vector("norm_scale", scale, x)
    return x * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def _match_pairs(query, key, value) -> tuple[jax.Array, jax.Array]:
    """Checks that heads come in pairs and repeats grouped key/value pairs up to the query's."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if any(x.ndim >= 3 and x.shape[-2] % 2 for x in (query, key, value)):
        raise ValueError(f"differential attention pairs heads: their number must be even: {shapes}")
    if query.ndim < 3 or key.ndim < 3 or key.shape[-2] in (0, query.shape[-2]):
        return key, value
    if value.ndim < 3 or value.shape[-2] != key.shape[-2] or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"heads of key and value must be equal, and their pairs must divide those of "
            f"query: {shapes}"
        )
    repeats = query.shape[-2] // key.shape[-2]

    def repeat(x):
        pairs = x.reshape(*x.shape[:-2], -1, 2, x.shape[-1])
        return jnp.repeat(pairs, repeats, axis=-3).reshape(*x.shape[:-2], -1, x.shape[-1])

    return repeat(key), repeat(value)


def _vector(name: str, x, like: jax.Array) -> jax.Array:
    x = checks.real_array(name, x)
    if x.shape != like.shape[-1:]:
        raise ValueError(f"{name} of shape {x.shape} must be {like.shape[-1:]}")
    return x.astype(like.dtype)


def _scalar(name: str, x, dtype) -> jax.Array:
    """A 0-d array of ``dtype`` from a finite number or a traced scalar."""
    if isinstance(x, jax.core.Tracer):
        if x.shape != ():
            raise ValueError(f"{name} must be a scalar, got shape {x.shape}")
        return checks.real_array(name, x).astype(dtype)
    number = checks.as_float(name, x)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return jnp.asarray(number, dtype)
