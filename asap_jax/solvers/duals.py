"""Finite-budget Sinkhorn duals (paper, eq. sinkhorn_iterations), in log domain."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from asap_jax import checks, masks
from asap_jax.solvers import ctransform, log_domain
from asap_jax.solvers.closures import Closures
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class SinkhornDuals:
    """Duals of a finite-budget Sinkhorn run, score coordinates; 0 at inactive tokens.

    Attributes:
      query: f after the last row step, ``(..., N)``.
      key: g after the last column step, ``(..., M)``; zero at S = 1.
      source: the row dual ``(..., N)`` from which one closure (even S) or two closures (odd S)
        give the teacher; None at S = 1.
      aligned: the dual after step ``S - before_end``; None without ``before_end``.
      aligned_side: the side of ``aligned``, ``"query"`` or ``"key"``; or None.
    """

    query: jax.Array
    key: jax.Array
    source: jax.Array | None = None
    aligned: jax.Array | None = None
    aligned_side: str | None = flax.struct.field(pytree_node=False, default=None)


def sinkhorn_duals(
    scores: ArrayLike,
    *,
    spec: SinkhornSpec,
    mask: ArrayLike | None = None,
    before_end: int | None = None,
) -> SinkhornDuals:
    """Runs ``spec.num_steps`` half-normalisations, rows first, and returns the duals.

    Args:
      scores: ``(..., N, M)``; -inf counts as masked.
      spec: number of steps, epsilon and key mass; scale and padding are not used here.
      mask: rank of the scores, bool or 0/1.
      before_end: n with ``1 <= n <= S - 1``: also return the aligned dual, from which n closures
        give the teacher exactly.

    Returns:
      SinkhornDuals, in units of the scores (epsilon times log scalings).

    Raises:
      ValueError: scores of rank < 2, ``before_end`` out of range, a mask that does not fit.
      TypeError: scores that are not real floating, or ``spec`` is not a SinkhornSpec.
    """
    checks.instance("spec", spec, SinkhornSpec, "a SinkhornSpec")
    scores = checks.at_least_f32(checks.real_array("scores", scores))
    if scores.ndim < 2:
        raise ValueError(f"scores of shape {scores.shape} must be (..., N, M)")
    (scores,) = masks.spoiled(mask, scores)
    allowed = masks.combine(masks.as_mask(mask, scores.shape), ~jnp.isneginf(scores))
    kernel = ctransform.log_kernel(scores, spec.epsilon, allowed)
    validity = masks.closure_validity(allowed, scores.shape)
    target = masks.log_key_target(spec.key_mass, validity, scores.shape, scores.dtype)
    num_steps = spec.num_steps
    if before_end is not None:
        before_end = checks.positive_int("before_end", before_end)
        if before_end >= num_steps:
            raise ValueError(
                f"before_end={before_end} must be at most num_steps - 1 = {num_steps - 1}"
            )

    # The result needs the dual after each of these steps; an odd step gives a row dual.
    source_step = num_steps - (1 if num_steps % 2 == 0 else 2)
    aligned_step = num_steps - (before_end or 0)
    duals: dict[int, jax.Array] = {}
    u, v, done = jnp.zeros_like(kernel[..., 0]), jnp.zeros_like(kernel[..., 0, :]), 0
    for stop in sorted({source_step, aligned_step, num_steps} - {-1}):
        start, side = (u, "query") if done % 2 else (v, "key")
        u, v = log_domain.alternate(kernel, start, Closures(side, stop - done), target)
        duals[stop], done = spec.epsilon * (u if stop % 2 else v), stop
    return SinkhornDuals(
        query=spec.epsilon * u,
        key=spec.epsilon * v,
        source=duals.get(source_step),
        aligned=None if before_end is None else duals[aligned_step],
        aligned_side=None if before_end is None else spec.side_before_end(before_end),
    )
