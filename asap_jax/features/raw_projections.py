"""Ablation: the projections themselves, without transport (paper, amortization design table)."""

from __future__ import annotations

import flax.struct
import jax

from asap_jax.features.base import Sliced, register
from asap_jax.features.potentials import sliced_features


@register("raw_projections")
@flax.struct.dataclass
class RawProjections(Sliced):
    """Centred query projections ``a_i`` on every slice (paper, eq. sliced_projections).

    Attributes:
      directions: ``(L, d)`` slice bank.
    """

    directions: jax.Array

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None) -> jax.Array:
        """Centred projections ``(..., N, L)`` of the side of ``q``."""
        return sliced_features(
            _projection,
            q,
            k,
            self.directions,
            scale=scale,
            query_valid=query_valid,
            key_valid=key_valid,
        )


def _projection(a, b, a_valid, b_valid):
    del b, a_valid, b_valid
    return a
