"""The log kernel of a layer's problems, made where it is needed and bounded without being made."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.scores import scores, squared_norm
from asap_jax.solvers import ctransform


@flax.struct.dataclass
class Kernel:
    """``scores / epsilon``, -inf where masked, of the per-head problems of a call.

    Attributes:
      q ``(..., N, d)``, k ``(..., M, d)``; bias and mask broadcast to ``(..., N, M)``, or None.
      scale, epsilon, precision: static.
    """

    q: jax.Array
    k: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    scale: float = flax.struct.field(pytree_node=False)
    epsilon: float = flax.struct.field(pytree_node=False, default=1.0)
    precision: Any = flax.struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., N, M)``."""
        return (*self.q.shape[:-1], self.k.shape[-2])

    def log(self) -> jax.Array:
        """``(..., N, M)``."""
        s = scores(self.q, self.k, scale=self.scale, bias=self.bias, precision=self.precision)
        return ctransform.log_kernel(s, self.epsilon, self.mask)

    def active(self) -> dict[str, jax.Array]:
        """For each side ``(..., N)`` or ``(..., M)``, which tokens have an entry."""
        validity = masks.closure_validity(self.mask, self.shape)
        if validity is None:
            return {side: jnp.bool_(True) for side in ("query", "key")}
        return {"query": validity.query, "key": validity.key}

    def reach(self) -> jax.Array:
        """A bound on the size of all finite entries, ``()``, from norms: Cauchy-Schwarz."""
        longest = lambda x: jnp.sqrt(jnp.max(squared_norm(x), -1, initial=0))
        bound = jnp.max(longest(self.q) * longest(self.k), initial=0) * self.scale
        if self.bias is not None:
            bound = bound + jnp.max(jnp.abs(self.bias), initial=0)
        return bound / self.epsilon
