"""The KL objective of one key closure: value and Hessian (paper, eq. asap_kl).

``J(w) = sum_m [F_m(X_m w) - <r_m, X_m w>] + ridge / 2 |w|^2`` with
``F_m(f) = eps sum_j nu_j log sum_i exp((-C_ij + f_i) / eps)`` and ``r_m`` the row masses of the
key-closed teacher plan. Values are relative to the value at the teacher's dual. The difference is
eps times the forward plan KL, and computing it directly keeps its digits in float32.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks, masks
from asap_jax.fitting.least_squares import einsum, rows_by_head
from asap_jax.predictor import LinearHead
from asap_jax.solvers import ctransform
from asap_jax.spec import KEY_MASSES


def key_masses(key_mass: str, mask: jax.Array | None, shape: tuple, dtype: Any) -> jax.Array:
    """Key masses nu in plan units, broadcasting to ``(..., M)``; 0 at inactive keys.

    ``"balanced"``: 1 / active keys; ``"unit"``: 1 / N on active keys, N the query slots.
    ``shape`` is that of the scores ``(..., N, M)``.
    """
    validity = masks.closure_validity(mask, shape)
    if validity is None:
        size = shape[-1] if key_mass == "balanced" else shape[-2]
        return jnp.full((1,) * (len(shape) - 1), 1.0 / size, dtype)
    active = validity.key.astype(dtype)
    if key_mass == "unit":
        return active / shape[-2]
    return active / jnp.maximum(active.sum(-1, keepdims=True), jnp.ones((), dtype))


def kl_objective(
    coefficients: ArrayLike,
    features: ArrayLike,
    targets: ArrayLike,
    scores: ArrayLike,
    shift: ArrayLike,
    *,
    epsilon: float = 1.0,
    ridge: float = 1e-3,
    key_mass: str = "balanced",
    mask: ArrayLike | None = None,
) -> jax.Array:
    """The paper's J_KL in plan units, minus its value at the teacher's dual (a constant).

    Args:
      coefficients: omega ``(F,)``, or ``(H, F)`` with heads on the third axis of the features.
      features: ``(..., N, F)``; targets: cost-coordinate source duals ``(..., N)``.
      scores: ``(..., N, M)``; shift: rho ``(..., N)``.
      epsilon: > 0; ridge: lambda >= 0; key_mass: ``"balanced"`` or ``"unit"``.
      mask: rank of the scores.

    Returns:
      A scalar, summed over all leading axes, convex and differentiable in ``coefficients``.

    Raises:
      ValueError, TypeError: shapes, dtypes or settings that do not fit; the message names them.
    """
    x, y, s, rho = arguments(features, targets, scores, shift)
    ridge = checks.non_negative_float("ridge", ridge)
    w = checks.real_array("coefficients", coefficients).astype(x.dtype)
    block = make_block(x, y, s, rho, mask, epsilon=epsilon, key_mass=key_mass)
    return excess(w, block) + 0.5 * ridge * jnp.sum(w * w)


@flax.struct.dataclass
class Block:
    """One microbatch as J uses it.

    Attributes:
      features ``(..., N, F)``, target ``(..., N)``: cost coordinates.
      kernel: ``(scores - shift) / eps`` ``(..., N, M)``, -inf where masked.
      nu: key masses, broadcasting to ``(..., M)``.
      epsilon: > 0.
    """

    features: jax.Array
    target: jax.Array
    kernel: jax.Array
    nu: jax.Array
    epsilon: float = flax.struct.field(pytree_node=False)


def excess(w: jax.Array, block: Block) -> jax.Array:
    """J of one microbatch without the ridge, minus its value at the teacher's dual.

    This is ``eps KL(P || P_hat)`` of the key-closed plans (paper, eq. asap_kl_scalar).
    """
    kernel, epsilon, zero = block.kernel, block.epsilon, jnp.zeros((), block.kernel.dtype)
    dual, scaling = LinearHead(w)(block.features), block.target / epsilon
    weights = ctransform.closure_weights(kernel, scaling, -2, zero)  # columns sum to 1
    key_scaling = ctransform.closure_step(kernel, scaling, -2, zero)
    log_weights = kernel + scaling[..., :, None] + key_scaling[..., None, :]
    active = jnp.any(kernel > -jnp.inf, axis=-1)
    tilt = jnp.where(active, (dual - block.target) / epsilon, jnp.zeros_like(dual))
    mean = einsum("...nm,...n->...m", weights, tilt)
    # The closure step from a zero scaling is minus the log-sum-exp over each column.
    log_sum = -ctransform.closure_step(
        log_weights + tilt[..., :, None] - mean[..., None, :], jnp.zeros_like(tilt), -2, zero
    )
    return epsilon * jnp.sum(block.nu * log_sum)


def make_block(
    features: jax.Array,
    target: jax.Array,
    scores: jax.Array,
    shift: jax.Array,
    mask: ArrayLike | None,
    *,
    epsilon: float,
    key_mass: str,
) -> Block:
    """The Block of one microbatch; arguments and errors as ``kl_objective``."""
    epsilon = checks.score_factor("epsilon", epsilon)
    checks.one_of("key_mass", key_mass, KEY_MASSES)
    (scores,) = masks.spoiled(mask, scores)
    mask = masks.as_mask(mask, scores.shape)
    kernel = ctransform.log_kernel(scores - shift[..., :, None], epsilon, mask)
    nu = key_masses(key_mass, mask, scores.shape, scores.dtype)
    valid = jnp.any(kernel != -jnp.inf, -1)  # masked slots may hold NaN, which must not spread
    features = jnp.where(valid[..., None], features, jnp.zeros_like(features))
    target = jnp.where(valid, target, jnp.zeros_like(target))
    return Block(features, target, kernel, nu, epsilon)


def hessian(w: jax.Array, block: Block) -> tuple[jax.Array, jax.Array]:
    """J's Hessian in omega without the ridge (paper, the KL Hessian), and its second moments.

    The Hessian is ``(1 / eps) sum_j nu_j cov_j(x)``, with the covariance of the features under
    column j of the plan. It is computed as second moments minus squared means. Both results are
    ``(F, F)``, or ``(H, F, F)`` for coefficients per head.
    """
    x, epsilon, zero = block.features, block.epsilon, jnp.zeros((), block.kernel.dtype)
    plan = ctransform.closure_weights(block.kernel, LinearHead(w)(x) / epsilon, -2, zero)
    nu = jnp.broadcast_to(block.nu, (*plan.shape[:-2], plan.shape[-1]))
    mean = einsum("...nm,...nf->...mf", plan, x)
    mass = einsum("...nm,...m->...n", plan, nu)
    second = _gram(x, mass, w.ndim) / epsilon
    return second - _gram(mean, nu, w.ndim) / epsilon, second


def _gram(x: jax.Array, weights: jax.Array, ndim: int) -> jax.Array:
    """``sum weights x x'`` over all rows; per head for coefficients with ``ndim`` 2."""
    if ndim == 1:
        rows, weights = x.reshape(-1, x.shape[-1]), weights.reshape(-1)
    else:
        rows, weights = rows_by_head(x, 1), rows_by_head(weights, 0)
    return einsum("...nf,...ng->...fg", weights[..., None] * rows, rows)


def arguments(
    features: ArrayLike, targets: ArrayLike, scores: ArrayLike, shift: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The four arrays of J in one accumulation dtype; errors as ``kl_objective``."""
    x, y = checks.real_array("features", features), checks.real_array("targets", targets)
    s, rho = checks.real_array("scores", scores), checks.real_array("shift", shift)
    if s.ndim < 2 or y.shape != s.shape[:-1] or rho.shape != y.shape or x.shape[:-1] != y.shape:
        raise ValueError(
            f"features {x.shape}, targets {y.shape}, scores {s.shape} and shift {rho.shape} must "
            f"be (..., N, F), (..., N), (..., N, M) and (..., N)"
        )
    dtype = jnp.float64 if jnp.float64 in (x.dtype, y.dtype, s.dtype) else jnp.float32
    return x.astype(dtype), y.astype(dtype), s.astype(dtype), rho.astype(dtype)
