"""Closures in the log domain: exact at any logits; the other implementations fall back to them.

All scalings are log scalings, ``u = f / epsilon``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from asap_jax.problem import Problem
from asap_jax.solvers import ctransform
from asap_jax.solvers.closures import AXIS, OTHER, Closures


def apply(p: Problem, start: jax.Array, log_target: jax.Array, closures: Closures) -> jax.Array:
    """``A v (..., N, d_v)`` after the closures; the weights A ``(..., N, M)`` if ``p.v`` is None.

    Args:
      p: the problems.
      start: log scaling of ``closures.side``, ``(..., N)`` or ``(..., M)``.
      log_target: log column target, see ``Problem.log_key_target``; the row target is 1.
      closures: one or more.
    """
    kernel = p.log_kernel(closures.epsilon)
    before_last = closures._replace(num_steps=closures.num_steps - 1)
    u, v = alternate(kernel, start, before_last, log_target)
    # The last closure is a softmax, so its marginal is exact.
    if (closures.side == "query") == (closures.num_steps % 2 == 1):
        mass, total, target = ctransform.closure_parts(kernel, u, -2, log_target)
        if p.v is None:
            return mass * (target / total)
        values = jnp.swapaxes(target / total, -1, -2) * p.v
        return ctransform.mixture(mass, values, p.precision)
    mass, total, _ = ctransform.closure_parts(kernel, v, -1, 0.0)
    return mass / total if p.v is None else ctransform.mixture(mass, p.v, p.precision) / total


def alternate(
    kernel: jax.Array, start: jax.Array, closures: Closures, log_target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs ``closures.num_steps >= 0`` half-steps from ``start`` on ``closures.side``.

    Args:
      kernel: log kernel ``(..., N, M)``, -inf where masked.
      start: log scaling ``(..., N)`` for side ``"query"``, ``(..., M)`` for ``"key"``.
      closures: side and number of steps.
      log_target: log column target; the row target is 1.

    Returns:
      ``(u, v)``, the last scaling of each side; 0 for a side without one.

    Reverse mode recomputes the loop body, so it stores vectors, not matrices, for each step.
    """
    side, num_steps = closures.side, closures.num_steps
    step = lambda x, at: half_step(kernel, x, at, log_target)

    @jax.checkpoint
    def pair(near, far):
        far = step(near, side)
        return step(far, OTHER[side]), far

    near, far = start, jnp.zeros_like(kernel[..., 0, :] if side == "query" else kernel[..., 0])
    if num_steps >= 2:
        near, far = jax.lax.fori_loop(0, num_steps // 2, lambda _, c: pair(*c), (near, far))
    if num_steps % 2:
        far = step(near, side)
    return (near, far) if side == "query" else (far, near)


def half_step(kernel: jax.Array, scaling: jax.Array, side: str, log_target: jax.Array) -> jax.Array:
    """One closure from the log ``scaling`` of ``side`` to that of the other side."""
    target = log_target if side == "query" else jnp.zeros((), kernel.dtype)
    return ctransform.closure_step(kernel, scaling, AXIS[side], target)
