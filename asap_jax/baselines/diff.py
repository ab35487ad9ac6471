"""Differential attention (Ye et al., "Differential Transformer"), non-causal: a baseline.

Heads come in pairs. The map of a pair is the difference of its two softmax maps, so it is signed
and its rows sum to ``1 - lambda``.
"""

from __future__ import annotations

import dataclasses
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from asap_jax import checks
from asap_jax.attention import outputs
from asap_jax.attention.flax_call import Call, Result, attention_function
from asap_jax.problem import match_heads, promote
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

    Heads 2h and 2h + 1 of the 2H heads are pair h. With the row-softmax maps A1 and A2 of the pair
    and its two value heads side by side, V of width ``2 value_dim``,

      lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
      out    = (1 - lambda_init) RMSNorm((A1 - lambda A2) V).

    The norm is over the ``2 value_dim`` channels of a pair. The output is split into 2H heads
    again, so the function can be the ``attention_fn`` of stock attention.

    Args:
      query: ``(..., N, 2H, head_dim)``.
      key: ``(..., M, 2H, head_dim)``; value: ``(..., M, 2H, value_dim)``. With 2K key/value heads,
        K dividing H, each pair is used for a group of query pairs.
      bias, mask: as in ``sinkhorn_attention``, for 2H heads; a causal mask is allowed.
      lambda_q1, lambda_k1, lambda_q2, lambda_k2: learned vectors ``(head_dim,)``, shared by the
        pairs. Give all four or none; without them ``lambda = lambda_init``.
      depth: static index of the layer from 0; sets ``lambda_init`` by ``diff_lambda_init``.
      lambda_init: a number or a traced scalar, overrides ``depth``.
      norm_scale: learned scale of the norm ``(2 value_dim,)``; 1 when None.
      norm_epsilon: > 0, added to the mean square.
      scale: score scale > 0; ``1 / sqrt(head_dim)`` when None.
      implementation: ``"auto"`` or ``"log"``.
      return_weights and Flax's other keywords: as in ``sinkhorn_attention``. The weights, which
        dropout acts on, are the signed maps ``A1 - lambda A2``, ``(..., H, N, M)``.

    Returns:
      ``(..., N, 2H, value_dim)`` in the input dtype, or ``(out, weights)``. Queries with no key
      give exactly 0.

    Raises:
      ValueError, TypeError: as ``sinkhorn_attention``; an odd number of heads; wrong shapes of the
        vectors or the norm scale; one to three of the four vectors.
    """
    if checks.static_bool("is_causal", call.is_causal):
        raise ValueError("is_causal=True is refused: give the causal mask as mask")
    checks.one_of("implementation", implementation, IMPLEMENTATIONS)
    query, key, value = promote(call.query, call.key, call.value, dtype=call.dtype)
    if any(x.ndim >= 3 and x.shape[-2] % 2 for x in (query, key, value)):
        shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
        raise ValueError(f"differential attention needs an even number of heads, got {shapes}")
    key, value = match_heads(query, key, value, group=2)
    p = call.replace(query=query, key=key, value=value).problem(scale)
    if lambda_init is None:
        lambda_init = diff_lambda_init(depth)
    start = checks.scalar("lambda_init", lambda_init, p.q.dtype, checks.finite_float)
    vectors = dict(zip(VECTORS, (lambda_q1, lambda_k1, lambda_q2, lambda_k2), strict=True))
    kernel = p.log_kernel(epsilon=1.0)
    maps = ctransform.closure_weights(kernel, jnp.zeros_like(kernel[..., 0, :]), -1, 0.0)
    first, second = _of_pairs(maps)
    weights = first - diff_lambda(start, vectors, p.q) * second
    assert p.v is not None
    v = jnp.concatenate(_of_pairs(p.v), axis=-1)
    pairs = dataclasses.replace(p, v=v, dtype=p.q.dtype)
    rate = checks.dropout_rate(call.dropout_rate)
    out, _ = outputs.output_and_weights(call, pairs, DensePlan(weights), rate, return_weights=False)
    out = (1 - start) * rms_norm(out, norm_scale, norm_epsilon)
    out = out.reshape(*query.shape[:-1], value.shape[-1]).astype(p.dtype)
    if not checks.static_bool("return_weights", call.return_weights):
        return out
    return out, weights.astype(p.dtype)


def _of_pairs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the second head of each pair, ``(..., H, a, b)``, of ``x (..., 2H, a, b)``."""
    pairs = x.reshape(*x.shape[:-3], -1, 2, *x.shape[-2:])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def diff_lambda(start: jax.Array, vectors: dict, like: jax.Array) -> jax.Array:
    """lambda, a scalar; ``vectors`` are all of width ``like.shape[-1]``, or all None."""
    if all(x is None for x in vectors.values()):
        return start
    missing = [name for name, x in vectors.items() if x is None]
    if missing:
        raise ValueError(f"give all of {', '.join(VECTORS)} or none; missing: {', '.join(missing)}")
    q1, k1, q2, k2 = (_vector(name, x, like) for name, x in vectors.items())
    return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + start


def rms_norm(x: jax.Array, scale: ArrayLike | None, epsilon: float) -> jax.Array:
    """``x / sqrt(mean x^2 + epsilon)`` over the last axis, times ``scale`` unless None."""
    epsilon = checks.positive_float("norm_epsilon", epsilon)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    if scale is None:
        return x
    return x * jax.lax.broadcast_to_rank(_vector("norm_scale", scale, x), x.ndim)


def _vector(name: str, x, like: jax.Array) -> jax.Array:
    x = checks.real_array(name, x)
    if x.shape != like.shape[-1:]:
        raise ValueError(f"{name} of shape {x.shape} must be {like.shape[-1:]}")
    return x.astype(like.dtype)
