"""ASAP-KL: the minimum of the KL objective, by whitened L-BFGS over data in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from asap_jax import checks, masks
from asap_jax.fitting import kl_objective, lbfgs
from asap_jax.fitting.least_squares import NormalEquations
from asap_jax.spec import KEY_MASSES

MAX_STEPS = 100


@flax.struct.dataclass
class KLFit:
    """Result of a KL fit.

    Attributes:
      coefficients: omega ``(F,)``, or ``(H, F)`` when fitted per head.
      converged: gradient norm <= 1e-4 (float32) or 1e-8 (float64) of that at omega = 0.
      reason: why it stopped: ``"gradient"`` (at most 1e-6 / 1e-9 of the norm at 0 and 5e-6 of
        that at the start),
        ``"no_progress"`` (no step improves: the rounding floor) or ``"cap"``.
      num_steps: accepted L-BFGS steps.
      objective, objective_ls: J relative to the teacher's dual, at the result and at the start.
      plan_kl: mean forward KL per problem of the key-closed plan at the result.
      gradient_ratio: gradient norm over that at omega = 0.
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

    Started at the ridge least-squares solution, whitened by the Hessian there, directions of
    ``optax.lbfgs``.

    Args: as ``kl_objective``.

    Returns:
      KLFit with ``.coefficients (F,)``; never worse than least squares.

    Raises:
      ValueError: no problem, no active query, a value that is not finite, or shapes and settings
        as in ``kl_objective``.
    """
    x, y, s, shift = kl_objective.arguments(features, targets, scores, shift)
    epsilon = checks.positive_float("epsilon", epsilon)
    checks.one_of("key_mass", key_mass, KEY_MASSES)
    block = kl_objective.make_block(x, y, s, shift, mask, epsilon=epsilon, key_mass=key_mass)
    bool_mask = masks.as_mask(mask, s.shape)
    costs = s - shift[..., :, None]
    if bool_mask is not None:  # masked slots may hold anything
        costs = jnp.where(jnp.broadcast_to(bool_mask, s.shape), costs, jnp.zeros_like(costs))
    if not bool(jnp.all(jnp.isfinite(costs) | jnp.isneginf(s))):
        raise ValueError("scores or shift hold a value that is not finite in an active slot")
    valid = jnp.any(block.kernel > -jnp.inf, -1)
    sums = NormalEquations.zero(x.shape[-1], dtype=x.dtype).add(x, y, valid)
    count = int(np.prod(s.shape[:-2]))
    stacked = jax.tree.map(lambda a: a[None], block)
    return minimise(sums, [stacked], _identity, epsilon=epsilon, ridge=ridge, num_problems=count)


def _identity(block: kl_objective.Block) -> kl_objective.Block:
    return block


def minimise(
    sums: NormalEquations,
    items: Any,
    block_of: Callable[[Any], kl_objective.Block],
    *,
    epsilon: float,
    ridge: float,
    num_problems: int,
    max_steps: int = MAX_STEPS,
) -> KLFit:
    """Minimises J over data in parts.

    Args:
      sums: normal equations of the same rows: the start. With a head axis the
        fit is per head.
      items: a list of stacked pytrees with a leading axis of microbatches, held in memory (one
        jitted loop); or any other re-iterable of items, gone through once an evaluation.
      block_of: from an item to its Block; traced.
      epsilon, ridge: of J.
      num_problems: problems in the data, for ``plan_kl``.
      max_steps: cap on accepted steps.

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
    settings = dict(block_of=block_of, epsilon=epsilon, ridge=ridge, max_steps=max_steps)
    search, ls_value, at_zero, unwhiten = drive(items, start.coefficients, **settings)
    norm = float(_norm(_to_omega_gradient(search.gradient, unwhiten)))
    ratio = norm / max(float(at_zero), float(jnp.finfo(search.value.dtype).tiny))
    coefficients = _from_whitened(search.point, unwhiten)
    penalty = 0.5 * ridge * float(jnp.sum(coefficients * coefficients))
    if not np.isfinite(float(search.value)):
        raise ValueError("the KL objective is not finite at the least-squares start")
    return KLFit(
        coefficients,
        converged=ratio <= _tolerance(coefficients.dtype, 1e-4, 1e-8),
        reason=lbfgs.REASONS[int(search.reason)],
        num_steps=int(search.num_steps),
        objective=float(search.value),
        objective_ls=float(ls_value),
        plan_kl=(float(search.value) - penalty) / epsilon / num_problems,
        gradient_ratio=ratio,
    )


def whitening(covariance: jax.Array, second: jax.Array, ridge: float) -> jax.Array:
    """``W (..., F, F)`` with omega = W z; ``covariance + ridge I`` is the identity in z.

    ``second`` are the second moments that the covariance is the small remainder of: directions
    below their rounding are left at that level, so that null directions stay finite.
    """
    unit = jnp.broadcast_to(jnp.eye(second.shape[-1], dtype=second.dtype), second.shape)
    values, vectors = jnp.linalg.eigh(covariance + ridge * unit)
    info = jnp.finfo(values.dtype)
    level = jnp.trace(second, axis1=-2, axis2=-1)[..., None] + ridge
    floor = info.eps * values.shape[-1] * level + info.tiny
    return vectors / jnp.sqrt(jnp.maximum(values, floor))[..., None, :]


def _from_whitened(z, unwhiten):
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("...fe,...e->...f", unwhiten, z.reshape(unwhiten.shape[:-1]), precision=exact)


def _to_whitened_gradient(gradient, unwhiten):
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("...fe,...f->...e", unwhiten, gradient, precision=exact).reshape(-1)


def _to_omega_gradient(gradient, unwhiten):
    """omega-space gradient from the whitened one (W is square and invertible)."""
    g = gradient.reshape(unwhiten.shape[:-1])
    inverse = jnp.swapaxes(jnp.linalg.inv(unwhiten), -1, -2)
    return jnp.einsum("...fe,...e->...f", inverse, g, precision=jax.lax.Precision.HIGHEST)


def _norm(x):
    return jnp.sqrt(jnp.sum(x * x))


def _tolerance(dtype, single: float, double: float) -> float:
    return double if dtype == jnp.float64 else single


def _item_value_and_grad(w, item, block_of, epsilon):
    return jax.value_and_grad(kl_objective.excess)(w, block_of(item), epsilon)


def _item_hessian(w, item, block_of, epsilon):
    return kl_objective.hessian(w, block_of(item), epsilon)


def _search(evaluate, hessian, start, ridge, max_steps, loop):
    """The search itself; ``evaluate(omega)`` sums value and gradient over the data.

    ``hessian(omega)`` sums what ``whitening`` takes; by it the first step is Newton's.
    ``loop(condition, body, search)`` runs the search, in Python or as ``lax.while_loop``.
    Returns ``(search, value at the start, gradient norm at omega = 0, whitening)``.
    """
    unwhiten = whitening(*hessian(start), ridge)

    def full(w):
        value, gradient = evaluate(w)
        return value + 0.5 * ridge * jnp.sum(w * w), gradient + ridge * w

    at_zero = _norm(full(jnp.zeros_like(start))[1])
    value, gradient = full(start)
    small = jnp.minimum(_tolerance(start.dtype, 1e-6, 1e-9) * at_zero, 5e-6 * _norm(gradient))
    # z = W^-1 omega; the start is solved for, so that the first point is least squares itself.
    z = jnp.linalg.solve(unwhiten, start[..., None])[..., 0].reshape(-1)
    search = lbfgs.start(z, value, _to_whitened_gradient(gradient, unwhiten))

    def body(search):
        value, gradient = full(_from_whitened(lbfgs.trial(search), unwhiten))
        return _tell(
            search,
            value,
            _to_whitened_gradient(gradient, unwhiten),
            small_gradient=_norm(gradient) <= small,
            max_steps=max_steps,
        )

    search = loop(lambda search: search.reason == lbfgs.RUNNING, body, search)
    return search, value, at_zero, unwhiten


@functools.partial(jax.jit, static_argnames=("block_of", "epsilon", "ridge", "max_steps"))
def _in_memory(groups, start, *, block_of, epsilon, ridge, max_steps):
    """One jitted while loop over scans of the microbatches of every group."""

    def over_items(function):
        def of(w):
            add = lambda total, item: (
                jax.tree.map(jnp.add, total, function(w, item, block_of, epsilon)),
                None,
            )
            one = jax.tree.map(lambda x: x[0], groups[0])
            shapes = jax.eval_shape(lambda w: function(w, one, block_of, epsilon), w)
            total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            for group in groups:
                total, _ = jax.lax.scan(add, total, group)
            return total

        return of

    evaluate, hessian = over_items(_item_value_and_grad), over_items(_item_hessian)
    return _search(evaluate, hessian, start, ridge, max_steps, jax.lax.while_loop)


def _streamed(items, start, *, block_of, epsilon, ridge, max_steps):
    """The same search driven from Python, one pass over re-iterable ``items`` an evaluation."""

    def over_items(function):
        one = jax.jit(lambda w, item: function(w, item, block_of, epsilon))

        def of(w):
            total = None
            for item in items:
                part = one(w, item)
                total = part if total is None else jax.tree.map(jnp.add, total, part)
            if total is None:
                raise ValueError(
                    "the KL fit got no data on a later pass: batches must be "
                    "re-iterable, not a generator"
                )
            return total

        return of

    def loop(condition, body, search):
        while bool(condition(search)):
            search = body(search)
        return search

    evaluate, hessian = over_items(_item_value_and_grad), over_items(_item_hessian)
    return _search(evaluate, hessian, start, ridge, max_steps, loop)


_tell = jax.jit(lbfgs.tell, static_argnames="max_steps")
