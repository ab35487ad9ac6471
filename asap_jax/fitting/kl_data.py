"""What ASAP-KL keeps of its calibration data, and how the KL objective reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.fitting import kl_objective, targets
from asap_jax.records import Record, problem
from asap_jax.scores import query_shift, scores
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class KLItem:
    """What the KL objective keeps of one record: nothing of size N^2 but the layer's own bias.

    Attributes:
      q ``(..., H, N, d)``, k ``(..., H, M, d)``; bias, mask: rank of the scores, or None.
      features ``(..., H, N, F)``, target ``(..., H, N)``: cost coordinates.
    """

    q: jax.Array
    k: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    features: jax.Array
    target: jax.Array


@jax.jit
def kl_item(record: Record, families: tuple) -> KLItem:
    """The KL item of an unstacked record, for the closure-ready source dual."""
    p = problem(record)
    y, side, validity = targets.target_dual(p, record.spec, "source")
    x, _ = targets.design(families, side, p, validity)
    if p.validity is not None:
        x = masks.zero_inactive(x, p.validity.query)
        y = jnp.where(p.validity.query, y, jnp.zeros_like(y))
    bias, _ = masks.as_bias(record.bias, p.score_shape)
    return KLItem(p.q, p.k, bias, p.mask, x, y)


@dataclasses.dataclass(frozen=True)
class KLBlocks:
    """From a KLItem to the Block of its microbatch; scores are formed anew each time."""

    spec: SinkhornSpec

    def __call__(self, item: KLItem) -> kl_objective.Block:
        """The Block of ``item``."""
        scale = self.spec.score_scale(item.q.shape[-1])
        s = scores(item.q, item.k, scale=scale, bias=item.bias)
        shift = query_shift(item.q, scale=scale)
        arrays = item.features, item.target, s, shift, item.mask
        settings = dict(epsilon=self.spec.epsilon, key_mass=self.spec.key_mass)
        return kl_objective.make_block(*arrays, **settings)


def groups(items: list[Any]) -> list[Any]:
    """Items of equal shapes stacked along a new leading axis, one pytree a shape."""
    by_shape: dict[Any, list] = {}
    for item in items:
        leaves, tree = jax.tree.flatten(item)
        by_shape.setdefault((tree, *((x.shape, x.dtype) for x in leaves)), []).append(item)
    return [jax.tree.map(lambda *x: jnp.stack(x), *group) for group in by_shape.values()]
