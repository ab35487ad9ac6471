"""L-BFGS as an ask-and-tell search, so that one code drives a jitted loop and a Python loop.

``start`` takes the value and gradient at the first point. Then ``trial`` gives the next point to
evaluate, and ``tell`` takes the value and gradient there. Directions are those of ``optax.lbfgs``;
steps are halved until the decrease is sufficient (Armijo). Where rounding hides a decrease, a
smaller gradient at an equal value is accepted too: for a convex function that is progress. Only
improvements are accepted, so the current point is always the best so far.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

RUNNING, GRADIENT, NO_PROGRESS, CAP = range(4)
REASONS = ("running", "gradient", "no_progress", "cap")
ARMIJO = 1e-4
MEMORY = 20
SMALLEST_STEP = 2.0**-10


@flax.struct.dataclass
class Search:
    """State of one minimisation over a flat vector.

    Attributes:
      point, value, gradient: the current point, with the value and gradient there.
      best: the smallest value so far; ``value`` exceeds it by rounding at most.
      direction, step: the next trial is ``point + step * direction``.
      memory: state of ``optax.lbfgs``.
      num_steps: accepted steps.
      reason: RUNNING, or why the search stopped.
    """

    point: jax.Array
    value: jax.Array
    best: jax.Array
    gradient: jax.Array
    direction: jax.Array
    step: jax.Array
    memory: Any
    num_steps: jax.Array
    reason: jax.Array


def _direction(gradient, memory, point):
    """The next direction and memory.

    Optax mixes integer widths under x64, which strict dtype promotion would reject.
    """
    with jax.numpy_dtype_promotion("standard"):
        optimizer = optax.lbfgs(learning_rate=1.0, memory_size=MEMORY, linesearch=None)
        return optimizer.update(gradient, memory or optimizer.init(point), point)


@jax.jit
def start(point: jax.Array, value: jax.Array, gradient: jax.Array) -> Search:
    """A search from ``point (n,)`` with its value ``()`` and gradient ``(n,)``."""
    direction, memory = _direction(gradient, None, point)
    zero = jnp.zeros((), jnp.int32)  # also the code RUNNING
    step = jnp.ones_like(value)
    return Search(point, value, value, gradient, direction, step, memory, zero, zero)


def trial(search: Search) -> jax.Array:
    """The point to evaluate next, ``(n,)``."""
    return search.point + search.step * search.direction


def tell(
    search: Search,
    value: jax.Array,
    gradient: jax.Array,
    *,
    small_gradient: jax.Array,
    max_steps: int,
) -> Search:
    """The search after the value ``()`` and gradient ``(n,)`` at ``trial(search)``.

    ``small_gradient`` (bool) says that the gradient there meets the caller's tolerance, which
    stops the search. It also stops when no step along the direction improves, and after
    ``max_steps`` accepted steps.
    """
    slope = jnp.sum(search.direction * search.gradient)
    finite = jnp.isfinite(value) & jnp.isfinite(gradient).all()
    rounding = 32 * jnp.finfo(value.dtype).eps * jnp.abs(search.value)
    smaller = jnp.sum(gradient * gradient) < jnp.sum(search.gradient * search.gradient)
    armijo = value <= search.value + ARMIJO * search.step * slope
    enough = (armijo & (value < search.best)) | ((value <= search.best + rounding) & smaller)
    point, num_steps = trial(search), search.num_steps + 1
    direction, memory = _direction(gradient, search.memory, point)
    reason = jnp.where(small_gradient, GRADIENT, jnp.where(num_steps >= max_steps, CAP, RUNNING))
    accepted = Search(
        point=point,
        value=value,
        best=jnp.minimum(search.best, value),
        gradient=gradient,
        direction=direction,
        step=jnp.ones_like(search.step),
        memory=memory,
        num_steps=num_steps,
        reason=reason.astype(jnp.int32),
    )
    shorter = search.step * 0.5
    reason = jnp.where(shorter < SMALLEST_STEP, NO_PROGRESS, RUNNING).astype(jnp.int32)
    rejected = dataclasses.replace(search, step=shorter, reason=reason)
    accept = finite & enough
    return jax.tree.map(lambda a, b: jnp.where(accept, a, b), accepted, rejected)
