"""Gauss-Newton weights: what an error in a dual costs after one closure."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from asap_jax.solvers import ctransform
from asap_jax.solvers.closures import AXIS


def gauss_newton(
    kernel: jax.Array, scaling: jax.Array, side: str, damping: float, keep: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """The product with the damped curvature of one closure's KL objective.

    With A the weights that one closure gives, the objective is quadratic in the dual near it,
    with ``H = Diag(A 1) - A A'`` (rows and columns swapped on the key side; epsilon and the
    target mass, the same for all tokens of a problem, divided out).

    Args:
      kernel: log kernel ``(..., N, M)``.
      scaling: the teacher's log scaling of ``side``, ``(..., N)`` or ``(..., M)``; a constant
        added to it changes nothing.
      damping: share of plain least squares, in [0, 1].
      keep: bool, as ``scaling``: tokens that plain least squares counts.

    Returns:
      ``z -> (1 - damping) H z + damping Diag(keep) z`` for z ``(..., N, F)``.
    """
    a = ctransform.closure_weights(kernel, scaling, AXIS[side], 0.0)
    if side == "key":
        a = jnp.swapaxes(a, -1, -2)
    mass = a.sum(-1)[..., None]
    keep = keep[..., None]

    def weigh(z):
        exact = jax.lax.Precision.HIGHEST
        inner = jnp.einsum("...nm,...nf->...mf", a, z, precision=exact)
        curved = mass * z - jnp.einsum("...nm,...mf->...nf", a, inner, precision=exact)
        return (1 - damping) * curved + damping * jnp.where(keep, z, jnp.zeros_like(z))

    return weigh
