"""ASAP-KL: the convex one-sided plan-KL fit (paper, eq. asap_kl).

The objective is in ``kl_plan``, its search in ``kl_search``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks, masks
from asap_jax.fitting.kl_objective import Block, arguments, kl_objective, make_block
from asap_jax.fitting.kl_search import KLFit, minimise
from asap_jax.fitting.least_squares import NormalEquations
from asap_jax.spec import KEY_MASSES

__all__ = ["KLFit", "fit_kl", "kl_objective"]


def fit_kl(
    features,
    targets,
    scores,
    shift,
    *,
    epsilon: float = 1.0,
    ridge: float = 1e-3,
    key_mass: str = "balanced",
    mask=None,
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
    x, y, s, shift = arguments(features, targets, scores, shift)
    epsilon = checks.positive_float("epsilon", epsilon)
    checks.one_of("key_mass", key_mass, KEY_MASSES)
    block = make_block(x, y, s, shift, mask, epsilon=epsilon, key_mass=key_mass)
    bool_mask = masks.as_mask(mask, s.shape)
    asked = None if bool_mask is None else jnp.broadcast_to(bool_mask, s.shape)
    kept = s - shift[..., :, None]
    kept = kept if asked is None else jnp.where(asked, kept, jnp.zeros_like(kept))
    if not bool(jnp.all(jnp.isfinite(kept) | jnp.isneginf(s))):
        raise ValueError("scores or shift hold a value that is not finite in an active slot")
    valid = jnp.any(block.kernel > -jnp.inf, -1)
    sums = NormalEquations.zero(x.shape[-1], dtype=x.dtype).add(x, y, valid)
    count = int(np.prod(s.shape[:-2]))
    stacked = jax.tree.map(lambda a: a[None], block)
    return minimise(sums, [stacked], _identity, epsilon=epsilon, ridge=ridge, num_problems=count)


def _identity(block: Block) -> Block:
    return block
