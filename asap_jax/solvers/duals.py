"""Finite-budget Sinkhorn duals (paper, eq. sinkhorn_iterations), in log domain."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, masks
from asap_jax.solvers import ctransform, log_domain
from asap_jax.solvers.closures import Closures
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class SinkhornDuals:
    """Duals of a finite-budget Sinkhorn run, score coordinates; inactive slots are 0.

    Attributes:
      query: f after the last row step, ``(..., N)``.
      key: g after the last column step, ``(..., M)`` (zero at S = 1).
      source: the closure-ready row dual ``(..., N)``: f of step S - 1 for even S, of step S - 2
        for odd S; None at S = 1.
      aligned: the dual after step ``S - before_end``, on ``aligned_side``; None unless asked.
      aligned_side: ``"query"`` or ``"key"``, or None.
    """

    query: jax.Array
    key: jax.Array
    source: jax.Array | None = None
    aligned: jax.Array | None = None
    aligned_side: str | None = flax.struct.field(pytree_node=False, default=None)


def sinkhorn_duals(
    scores, *, spec: SinkhornSpec, mask=None, before_end: int | None = None
) -> SinkhornDuals:
    """Runs ``spec.num_steps`` half-normalisations, rows first, and returns the duals.

    Args:
      scores: ``(..., N, M)``; -inf counts as masked.
      spec: budget, epsilon and key mass; scale and padding are not used here.
      mask: rank of the scores, bool or 0/1.
      before_end: n with ``1 <= n <= S - 1``: also return the aligned dual, from which n closures
        ending on the teacher's last step give the teacher exactly.

    Returns:
      SinkhornDuals, in units of the scores (epsilon times log scalings).

    Raises:
      ValueError: scores that are no matrix, ``before_end`` out of range, a mask that does not fit.
      TypeError: scores of another dtype, another spec than a SinkhornSpec.
    """
    checks.instance("spec", spec, SinkhornSpec, "a SinkhornSpec")
    scores = checks.at_least_f32(checks.real_array("scores", scores))
    if scores.ndim < 2:
        raise ValueError(f"scores of shape {scores.shape} must be (..., N, M)")
    mask = masks.combine(masks.as_mask(mask, scores.shape), ~jnp.isneginf(scores))
    kernel = ctransform.log_kernel(scores, spec.epsilon, mask)
    validity = masks.closure_validity(mask, scores.shape)
    target = masks.log_key_target(spec.key_mass, validity, scores.shape, scores.dtype)
    num_steps = spec.num_steps
    if before_end is not None:
        before_end = checks.positive_int("before_end", before_end)
        if before_end >= num_steps:
            raise ValueError(
                f"before_end={before_end} must be at most num_steps - 1 = {num_steps - 1}"
            )

    # Steps after which a dual is read out; step t leaves a row dual when t is odd.
    source_step = num_steps - (1 if num_steps % 2 == 0 else 2)
    aligned_step = None if before_end is None else num_steps - before_end
    duals, done = {}, 0
    dual, side = jnp.zeros_like(kernel[..., 0, :]), "key"
    pair = (jnp.zeros_like(kernel[..., :, 0]), dual)
    for stop in sorted({s for s in (source_step, aligned_step, num_steps) if s and s > 0}):
        closures = Closures(side, stop - done)
        u, v = log_domain.alternate(kernel, dual, closures, target)
        side, done = ("query" if stop % 2 else "key"), stop
        dual = u if side == "query" else v
        duals[stop], pair = dual, (u, v)
    scale = lambda x: None if x is None else spec.epsilon * x
    return SinkhornDuals(
        query=scale(pair[0]),
        key=scale(pair[1]),
        source=scale(duals.get(source_step)),
        aligned=scale(duals.get(aligned_step)),
        aligned_side=None if before_end is None else spec.side_before_end(before_end),
    )
