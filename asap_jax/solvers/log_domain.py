"""Alternating closures: from a dual on one side, n half-steps.

Sinkhorn itself is this operator started at the key dual 0; the compiled layer is the same
operator started at a predicted dual. Log scalings throughout (``u = f / epsilon``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.solvers import ctransform

AXIS = {"query": -2, "key": -1}  # the axis a closure *from* that side sums over
OTHER = {"query": "key", "key": "query"}


def log_key_target(key_mass: str, mask: jax.Array | None, shape: tuple, dtype) -> jax.Array | float:
    """Log of the column target: active queries / active keys, or 1 (design of ``key_mass``).

    ``shape`` is that of the scores. The result is a scalar, or ``(..., 1)`` under a mask.
    """
    if key_mass == "unit":
        return jnp.zeros((), dtype)
    validity = masks.closure_validity(mask, shape)
    if validity is None:
        return jnp.log(jnp.asarray(shape[-2] / shape[-1], dtype))
    count = lambda valid: jnp.maximum(valid.sum(-1, keepdims=True, dtype=dtype), 1)
    return jnp.log(count(validity.query)) - jnp.log(count(validity.key))


def terms(p, spec) -> tuple[jax.Array, jax.Array]:
    """Log kernel ``(..., N, M)`` and log column target of the Problem ``p`` under ``spec``."""
    kernel = ctransform.log_kernel(p.scores, spec.epsilon, p.mask)
    return kernel, log_key_target(spec.key_mass, p.mask, kernel.shape, kernel.dtype)


def alternate(
    kernel: jax.Array, scaling: jax.Array, *, side: str, num_steps: int, log_target
) -> tuple[jax.Array, jax.Array]:
    """Runs ``num_steps`` half-steps from ``scaling`` on ``side``.

    Args:
      kernel: log kernel ``(..., N, M)``, -inf where masked.
      scaling: log scaling of ``side``: ``(..., N)`` for ``"query"``, ``(..., M)`` for ``"key"``.
      num_steps: static count >= 0, the first step on the other side.
      log_target: log column target; the row target is 1.

    Returns:
      ``(u, v)``, the last scaling of each side (0 for a side never reached).

    The loop body is rematerialised, so reverse mode keeps vectors, not matrices, per step.
    """
    target = {"query": log_target, "key": jnp.zeros((), kernel.dtype)}
    step = lambda x, at: ctransform.closure_step(kernel, x, AXIS[at], target[at])

    @jax.checkpoint
    def pair(near, far):
        far = step(near, side)
        return step(far, OTHER[side]), far

    near, far = scaling, jnp.zeros_like(kernel[..., 0, :] if side == "query" else kernel[..., 0])
    if num_steps >= 2:
        near, far = jax.lax.fori_loop(0, num_steps // 2, lambda _, c: pair(*c), (near, far))
    if num_steps % 2:
        far = step(near, side)
    return (near, far) if side == "query" else (far, near)


def finish(
    kernel: jax.Array, scaling: jax.Array, *, side: str, num_steps: int, log_target
) -> jax.Array:
    """Weights A ``(..., N, M)`` after ``num_steps >= 1`` closures from ``scaling`` on ``side``.

    The last closure is taken in softmax form, exact on its own marginal.
    """
    scalings = alternate(kernel, scaling, side=side, num_steps=num_steps - 1, log_target=log_target)
    last = side if num_steps % 2 else OTHER[side]
    start = scalings[0] if last == "query" else scalings[1]
    target = log_target if last == "query" else 0.0
    return ctransform.closure_weights(kernel, start, AXIS[last], target)
