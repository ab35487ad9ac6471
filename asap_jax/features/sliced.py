"""Families on a bank of slices: the paper's potentials and two ablations of them."""

from __future__ import annotations

from typing import Any, Self

import flax.struct
import jax

from asap_jax.features.base import Family, register
from asap_jax.features.directions import slice_directions
from asap_jax.features.potentials import displacement_1d, potentials, sliced_features
from asap_jax.problem import Tokens


@flax.struct.dataclass
class _OnSlices(Family):
    """A family on a bank of slices, ``directions (L, d)``."""

    directions: jax.Array

    @classmethod
    def create(
        cls, rng: Any, head_dim: int, *, num_slices: int = 32, slice_kind: str = "gaussian"
    ) -> Self:
        """The family on a new bank of ``num_slices`` directions."""
        return cls(slice_directions(rng, num_slices, head_dim, kind=slice_kind))

    def num_features(self, head_dim: int) -> int:
        """The number of slices, L."""
        return self.directions.shape[-2]


@register("sliced_potentials")
@flax.struct.dataclass
class SlicedPotentials(_OnSlices):
    """Sliced potentials (paper, section "One-Dimensional Sliced Potentials").

    Attributes:
      directions: ``(L, d)`` slice bank.
      outside: ``"extend"`` or ``"zero"``, see ``sliced_potentials``.
      frozen: stop gradients from the features to q and k. Otherwise gradients flow through the
        sort, which is differentiable almost everywhere.
    """

    outside: str = flax.struct.field(pytree_node=False, default="extend")
    frozen: bool = flax.struct.field(pytree_node=False, default=False)

    def from_tokens(self, tokens: Tokens) -> jax.Array:
        """Centred potentials ``(..., N, L)``."""
        x = potentials(tokens, self.directions, self.outside)
        return jax.lax.stop_gradient(x) if self.frozen else x


@register("raw_projections")
@flax.struct.dataclass
class RawProjections(_OnSlices):
    """Ablation without transport: centred projections ``a_i`` (paper, amortization design table).

    ``directions (L, d)`` is the slice bank.
    """

    def from_tokens(self, tokens: Tokens) -> jax.Array:
        """Centred projections ``(..., N, L)``."""
        return sliced_features(lambda a, *_: a, tokens, self.directions)


@register("rank_displacement")
@flax.struct.dataclass
class RankDisplacement(_OnSlices):
    """Ablation: centred displacements ``a_i - b`` to the key of equal rank on every slice.

    These are the derivatives of the sliced potentials (paper, amortization design table), with the
    same key quantiles for N != M and masks. ``directions (L, d)`` is the slice bank.
    """

    def from_tokens(self, tokens: Tokens) -> jax.Array:
        """Centred displacements ``(..., N, L)``."""
        return sliced_features(displacement_1d, tokens, self.directions)
