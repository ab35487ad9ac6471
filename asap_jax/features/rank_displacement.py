"""Ablation: how far the monotone matching moves a query (paper, amortization design table)."""

from __future__ import annotations

import flax.struct
import jax

from asap_jax.features.base import Sliced, register
from asap_jax.features.potentials import displacement_1d, sliced_features


@register("rank_displacement")
@flax.struct.dataclass
class RankDisplacement(Sliced):
    """Centred displacements ``a_i - b`` to the key of equal rank on every slice.

    The derivative of the sliced potential; for N != M and masks the same key quantiles are used.

    Attributes:
      directions: ``(L, d)`` slice bank.
    """

    directions: jax.Array

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None) -> jax.Array:
        """Centred displacements ``(..., N, L)`` of the side of ``q``."""
        return sliced_features(
            displacement_1d,
            q,
            k,
            self.directions,
            scale=scale,
            query_valid=query_valid,
            key_valid=key_valid,
        )
