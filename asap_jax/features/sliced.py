"""The paper's features: exact sliced Kantorovich potentials."""

from __future__ import annotations

import flax.struct
import jax

from asap_jax.features.base import Sliced, register
from asap_jax.features.potentials import sliced_potentials


@register("sliced_potentials")
@flax.struct.dataclass
class SlicedPotentials(Sliced):
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
