"""ASAP-KL: the minimum of the KL objective, by whitened L-BFGS over data in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from asap_jax import checks, masks
from asap_jax.fitting import kl_objective, lbfgs
from asap_jax.fitting.least_squares import NormalEquations, einsum

MAX_STEPS = 1000
ROUND = 100
"""Steps after which the search starts again, whitened by the Hessian at its point."""


@flax.struct.dataclass
class KLFit:
    """Result of a KL fit.

    Attributes:
      coefficients: omega ``(F,)``, or ``(H, F)`` when fitted per head.
      converged: whether ``gradient_ratio`` is at most 1e-4 (float32) or 1e-8 (float64).
      reason: why the search stopped: ``"gradient"`` (the gradient norm is at most 1e-6 in float32
        or 1e-9 in float64 of the norm at omega = 0, and at most 5e-6 of the norm at the start),
        ``"no_progress"`` (no step improves, also not from a new whitening: the rounding floor) or
        ``"cap"`` (the limit of 1000 steps, before the minimum).
      num_steps: accepted L-BFGS steps.
      objective, objective_ls: ``kl_objective`` at the result and at the least-squares start.
      plan_kl: mean forward KL per problem of the key-closed plan at the result.
      gradient_ratio: gradient norm at the result, divided by the norm at omega = 0.
    """

    coefficients: jax.Array
    converged: bool = flax.struct.field(pytree_node=False)
    reason: str = flax.struct.field(pytree_node=False)
    num_steps: int = flax.struct.field(pytree_node=False)
    objective: float = flax.struct.field(pytree_node=False)
    objective_ls: float = flax.struct.field(pytree_node=False)
    plan_kl: float = flax.struct.field(pytree_node=False)
    gradient_ratio: float = flax.struct.field(pytree_node=False)


def fit_kl(
    features: ArrayLike,
    targets: ArrayLike,
    scores: ArrayLike,
    shift: ArrayLike,
    *,
    epsilon: float = 1.0,
    ridge: float = 1e-3,
    key_mass: str = "balanced",
    mask: ArrayLike | None = None,
) -> KLFit:
    """Minimises ``kl_objective`` over one coefficient vector, all leading axes pooled.

    The search starts at the ridge least-squares solution, is whitened by the Hessian there, and
    takes the directions of ``optax.lbfgs``. Arguments as ``kl_objective``.

    Returns:
      KLFit with ``.coefficients (F,)``; never worse than least squares.

    Raises:
      ValueError: no problem, no active query, a value that is not finite.
      ValueError, TypeError: shapes, dtypes and settings as in ``kl_objective``.
    """
    x, y, s, rho = kl_objective.arguments(features, targets, scores, shift)
    block = kl_objective.make_block(x, y, s, rho, mask, epsilon=epsilon, key_mass=key_mass)
    bool_mask = masks.as_mask(mask, s.shape)
    costs = s - rho[..., :, None]
    if bool_mask is not None:  # masked slots may hold anything
        costs = jnp.where(jnp.broadcast_to(bool_mask, s.shape), costs, jnp.zeros_like(costs))
    if not bool(jnp.all(jnp.isfinite(costs) | jnp.isneginf(s))):
        raise ValueError("scores or shift hold a value that is not finite in an active slot")
    valid = jnp.any(block.kernel > -jnp.inf, -1)
    sums = NormalEquations.zero(x.shape[-1], dtype=x.dtype).add(x, y, valid)
    count = int(np.prod(s.shape[:-2]))
    stacked = jax.tree.map(lambda a: a[None], block)
    return minimise(
        sums, [stacked], _identity, epsilon=block.epsilon, ridge=ridge, num_problems=count
    )


def _identity(block: kl_objective.Block) -> kl_objective.Block:
    return block


def minimise(
    sums: NormalEquations,
    items: Iterable[Any],
    block_of: Callable[[Any], kl_objective.Block],
    *,
    epsilon: float,
    ridge: float,
    num_problems: int,
    max_steps: int = MAX_STEPS,
) -> KLFit:
    """Minimises J over data in parts.

    Args:
      sums: normal equations of the same rows; their solution is the start. With an axis of heads
        the fit is per head.
      items: a list of pytrees with a leading axis of microbatches: they are in memory, and the
        search is one jitted loop. Or any other re-iterable of items, read once per evaluation.
      block_of: traceable function from an item to its Block.
      epsilon, ridge: of J; epsilon must be that of the Blocks.
      num_problems: problems in the data, for ``plan_kl``.
      max_steps: cap on accepted steps. The Hessian of sharp plans changes on the way, so every
        ``ROUND`` steps, and where the search gets stuck, the whitening is computed again.

    Raises:
      ValueError: data that are empty or not finite.
    """
    ridge = checks.non_negative_float("ridge", ridge)
    start = sums.solve(ridge)
    if not bool(np.asarray(start.ok).all()):
        raise ValueError(
            "the KL fit needs at least one active query and finite features and targets"
        )
    drive = _in_memory if isinstance(items, list) else _streamed
    coefficients, num_steps = start.coefficients, 0
    ls_value: float | None = None
    first_norm, going = jnp.zeros((), coefficients.dtype), True
    exact = 1e-8 if coefficients.dtype == jnp.float64 else 1e-4
    while going:
        limit = min(ROUND, max_steps - num_steps)
        settings = dict(block_of=block_of, ridge=ridge, max_steps=limit)
        search, before, norms, unwhiten = drive(items, coefficients, first_norm, **settings)
        at_zero, first_norm = norms
        ls_value = float(before) if ls_value is None else ls_value
        norm = float(jnp.linalg.norm(_to_omega_gradient(search.gradient, unwhiten)))
        ratio = norm / max(float(at_zero), float(jnp.finfo(search.value.dtype).tiny))
        coefficients = _from_whitened(search.point, unwhiten)
        num_steps += int(search.num_steps)
        stuck = int(search.reason) == lbfgs.NO_PROGRESS
        done = stuck and (ratio <= exact or int(search.num_steps) == 0)
        done |= int(search.reason) == lbfgs.GRADIENT
        going = not done and num_steps < max_steps
    penalty = 0.5 * ridge * float(jnp.sum(coefficients * coefficients))
    if not np.isfinite(float(search.value)):
        raise ValueError("the KL objective is not finite at the least-squares start")
    assert ls_value is not None
    return KLFit(
        coefficients,
        converged=ratio <= exact,
        reason=lbfgs.REASONS[int(search.reason)],
        num_steps=num_steps,
        objective=float(search.value),
        objective_ls=ls_value,
        plan_kl=(float(search.value) - penalty) / epsilon / num_problems,
        gradient_ratio=ratio,
    )


def whitening(covariance: jax.Array, second: jax.Array, ridge: float) -> jax.Array:
    """``W (..., F, F)`` with omega = W z; ``covariance + ridge I`` is the identity in z.

    The covariance is a small difference of the second moments ``second (..., F, F)``. Eigenvalues
    below their rounding error are raised to it, so that null directions stay finite.
    """
    unit = jnp.broadcast_to(jnp.eye(second.shape[-1], dtype=second.dtype), second.shape)
    values, vectors = jnp.linalg.eigh(covariance + ridge * unit)
    info = jnp.finfo(values.dtype)
    level = jnp.trace(second, axis1=-2, axis2=-1)[..., None] + ridge
    floor = info.eps * values.shape[-1] * level + info.tiny
    return vectors / jnp.sqrt(jnp.maximum(values, floor))[..., None, :]


def _from_whitened(z, unwhiten):
    return einsum("...fe,...e->...f", unwhiten, z.reshape(unwhiten.shape[:-1]))


def _to_whitened_gradient(gradient, unwhiten):
    return einsum("...fe,...f->...e", unwhiten, gradient).reshape(-1)


def _to_omega_gradient(gradient, unwhiten):
    """The gradient in omega from the gradient in z (W is square and invertible)."""
    inverse = jnp.swapaxes(jnp.linalg.inv(unwhiten), -1, -2)
    return einsum("...fe,...e->...f", inverse, gradient.reshape(unwhiten.shape[:-1]))


def _search(total, start, first_norm, ridge, max_steps, loop):
    """One round of the search.

    ``total(function, omega)`` sums ``function(omega, block)`` over the data.
    ``loop(condition, body, search)`` runs the search, in Python or as ``lax.while_loop``.
    ``first_norm`` is the gradient norm at the start of the first round, 0 in that round.
    Returns ``(search, value at the start, gradient norms, whitening)``; the norms are those at
    omega = 0 and at the start of the first round.
    """
    # Whitened by the Hessian, so the first step is Newton's.
    unwhiten = whitening(*total(kl_objective.hessian, start), ridge)

    def full(w):
        value, gradient = total(_value_and_gradient, w)
        return value + 0.5 * ridge * jnp.sum(w * w), gradient + ridge * w

    at_zero = jnp.linalg.norm(full(jnp.zeros_like(start))[1])
    value, gradient = full(start)
    tolerance = 1e-9 if start.dtype == jnp.float64 else 1e-6
    first_norm = jnp.where(first_norm > 0, first_norm, jnp.linalg.norm(gradient))
    small = jnp.minimum(tolerance * at_zero, 5e-6 * first_norm)
    # Solving for z = W^-1 omega makes the first point the least-squares solution itself.
    z = jnp.linalg.solve(unwhiten, start[..., None])[..., 0].reshape(-1)
    search = lbfgs.start(z, value, _to_whitened_gradient(gradient, unwhiten))

    def body(search):
        value, gradient = full(_from_whitened(lbfgs.trial(search), unwhiten))
        return _tell(
            search,
            value,
            _to_whitened_gradient(gradient, unwhiten),
            small_gradient=jnp.linalg.norm(gradient) <= small,
            max_steps=max_steps,
        )

    search = loop(lambda search: search.reason == lbfgs.RUNNING, body, search)
    return search, value, (at_zero, first_norm), unwhiten


@functools.partial(jax.jit, static_argnames=("block_of", "ridge", "max_steps"))
def _in_memory(groups, start, first_norm, *, block_of, ridge, max_steps):
    """One jitted while loop over scans of the microbatches of every group."""

    def total(function, w):
        of = lambda item: function(w, block_of(item))
        shapes = jax.eval_shape(of, jax.tree.map(lambda x: x[0], groups[0]))
        result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        for group in groups:
            result, _ = jax.lax.scan(lambda t, item: (_plus(t, of(item)), None), result, group)
        return result

    return _search(total, start, first_norm, ridge, max_steps, jax.lax.while_loop)


def _streamed(items, start, first_norm, *, block_of, ridge, max_steps):
    """The same search driven from Python, one pass over re-iterable ``items`` per evaluation."""
    of = jax.jit(lambda function, w, item: function(w, block_of(item)), static_argnums=0)

    def total(function, w):
        parts = (of(function, w, item) for item in items)
        first = next(parts, None)
        if first is None:
            raise ValueError(
                "the KL fit got no data on a later pass: batches must be re-iterable, not a "
                "generator"
            )
        return functools.reduce(_plus, parts, first)

    def loop(condition, body, search):
        while bool(condition(search)):
            search = body(search)
        return search

    return _search(total, start, first_norm, ridge, max_steps, loop)


_value_and_gradient = jax.value_and_grad(kl_objective.excess)
_plus = functools.partial(jax.tree.map, jnp.add)
_tell = jax.jit(lbfgs.tell, static_argnames="max_steps")
