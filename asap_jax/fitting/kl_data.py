"""The calibration data that ASAP-KL stores, and how the KL objective reads them."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, masks
from asap_jax.fitting import kl_objective, targets
from asap_jax.records import Record, problem
from asap_jax.scores import query_shift, scores
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class KLItem:
    """The part of one record that the KL objective needs; only bias and mask are of size N x M.

    Attributes:
      q ``(..., H, N, d)``, k ``(..., H, M, d)``; bias, mask: rank of the scores, or None.
      features ``(..., H, N, F)``, target ``(..., H, N)``: cost coordinates.
      spec: the teacher's convention.
    """

    q: jax.Array
    k: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    features: jax.Array
    target: jax.Array
    spec: SinkhornSpec = flax.struct.field(pytree_node=False)

    def block(self) -> kl_objective.Block:
        """The arguments of the KL objective; the scores are computed again on every call."""
        scale = checks.score_scale(self.spec.scale, self.q.shape[-1])
        return kl_objective.make_block(
            self.features,
            self.target,
            scores(self.q, self.k, scale=scale, bias=self.bias),
            query_shift(self.q, scale=scale),
            self.mask,
            epsilon=self.spec.epsilon,
            key_mass=self.spec.key_mass,
        )


@jax.jit
def kl_item(record: Record, families: tuple) -> KLItem:
    """The KL item of an unstacked record; its target is the source dual."""
    p = problem(record)
    y, _, tokens = targets.target_dual(p, record.spec, "source")
    x, _ = targets.design(families, tokens)
    if p.validity is not None:
        x = masks.zero_inactive(x, p.validity.query)
        y = jnp.where(p.validity.query, y, jnp.zeros_like(y))
    return KLItem(p.q, p.k, p.bias, p.mask, x, y, record.spec)


def groups(items: list[KLItem]) -> list[KLItem]:
    """Stacks items of equal shapes along a new leading axis: one KLItem per shape."""
    by_shape: dict[Any, list[KLItem]] = {}
    for item in items:
        leaves, tree = jax.tree.flatten(item)
        by_shape.setdefault((tree, *((x.shape, x.dtype) for x in leaves)), []).append(item)
    return [jax.tree.map(lambda *x: jnp.stack(x), *group) for group in by_shape.values()]
