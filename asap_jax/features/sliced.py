"""Families on a bank of slices: the paper's potentials and two ablations of them."""

from __future__ import annotations

import flax.struct
import jax

from asap_jax.features.base import register
from asap_jax.features.directions import slice_directions
from asap_jax.features.potentials import displacement_1d, sliced_features, sliced_potentials


class _OnSlices:
    """What families on a bank of slices share: the bank, ``directions (L, d)``."""

    @classmethod
    def create(cls, rng, head_dim: int, *, num_slices: int = 32, slice_kind: str = "gaussian"):
        """The family on a new bank of ``num_slices`` directions."""
        return cls(slice_directions(rng, num_slices, head_dim, kind=slice_kind))

    def num_features(self, head_dim: int) -> int:
        """L, whatever the width of a head."""
        del head_dim
        return self.directions.shape[-2]


@register("sliced_potentials")
@flax.struct.dataclass
class SlicedPotentials(_OnSlices):
    """Sliced potentials (paper, section "One-Dimensional Sliced Potentials").

    Attributes:
      directions: ``(L, d)`` slice bank.
      outside: ``"extend"`` or ``"zero"``, see ``sliced_potentials``.
      frozen: no gradient flows through the features into q and k; otherwise the almost-everywhere
        gradient of the sort does.
    """

    directions: jax.Array
    outside: str = flax.struct.field(pytree_node=False, default="extend")
    frozen: bool = flax.struct.field(pytree_node=False, default=False)

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None) -> jax.Array:
        """Centred potentials ``(..., N, L)`` of the side of ``q``."""
        x = sliced_potentials(
            q,
            k,
            self.directions,
            scale=scale,
            query_valid=query_valid,
            key_valid=key_valid,
            outside=self.outside,
        )
        return jax.lax.stop_gradient(x) if self.frozen else x


@register("raw_projections")
@flax.struct.dataclass
class RawProjections(_OnSlices):
    """Ablation without transport: centred projections ``a_i`` (paper, amortization design table).

    Attributes:
      directions: ``(L, d)`` slice bank.
    """

    directions: jax.Array

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None) -> jax.Array:
        """Centred projections ``(..., N, L)`` of the side of ``q``."""
        tokens = dict(scale=scale, query_valid=query_valid, key_valid=key_valid)
        return sliced_features(lambda a, *_: a, q, k, self.directions, **tokens)


@register("rank_displacement")
@flax.struct.dataclass
class RankDisplacement(_OnSlices):
    """Ablation: centred displacements ``a_i - b`` to the key of equal rank on every slice.

    The derivative of the sliced potential (paper, amortization design table); for N != M and masks
    the same key quantiles are used.

    Attributes:
      directions: ``(L, d)`` slice bank.
    """

    directions: jax.Array

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None) -> jax.Array:
        """Centred displacements ``(..., N, L)`` of the side of ``q``."""
        tokens = dict(scale=scale, query_valid=query_valid, key_valid=key_valid)
        return sliced_features(displacement_1d, q, k, self.directions, **tokens)
