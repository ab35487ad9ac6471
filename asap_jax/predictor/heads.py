"""Heads: functions from features to a dual."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks


@flax.struct.dataclass
class LinearHead:
    """Linear map from features to a dual: coefficients ``(F,)`` shared, or ``(H, F)`` per head."""

    coefficients: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x (..., H, N, F)`` to ``(..., H, N)``."""
        w = checks.array("coefficients", self.coefficients).astype(x.dtype)
        if w.shape[-1:] != x.shape[-1:] or w.shape[:-1] not in ((), x.shape[-3:-2]):
            raise ValueError(
                f"coefficients of shape {w.shape} do not fit features of shape {x.shape}: "
                f"expected ({x.shape[-1]},) or (heads, {x.shape[-1]}). The predictor was fitted to "
                "other features, or to another number of heads or head_dim than those of the query"
            )
        form = "...nf,f->...n" if w.ndim == 1 else "...hnf,hf->...hn"
        return jnp.einsum(form, x, w, precision=jax.lax.Precision.HIGHEST)


@flax.struct.dataclass
class MLPHead:
    """A linear head plus a small hidden layer: ``x.w + tanh(x W + b).o`` for every head.

    Attributes:
      coefficients_in: ``(H, F)`` or ``(F,)``.
      hidden: ``(H, F, K)`` or ``(F, K)``; bias, out: ``(H, K)`` or ``(K,)``.
    """

    coefficients_in: jax.Array
    hidden: jax.Array
    bias: jax.Array
    out: jax.Array

    @classmethod
    def around(
        cls, linear: LinearHead, whitening: jax.Array, num_hidden: int, seed: int
    ) -> MLPHead:
        """A head equal to ``linear``: random hidden units on whitened features, with ``out`` 0.

        ``whitening (..., F, F)`` maps features to unit covariance.
        """
        w = linear.coefficients
        draw = jax.random.normal(jax.random.key(seed), (*w.shape, num_hidden), w.dtype)
        hidden = jnp.einsum("...fg,...gk->...fk", whitening, draw) / w.shape[-1] ** 0.5
        zero = jnp.zeros((*w.shape[:-1], num_hidden), w.dtype)
        return cls(w, hidden, zero, zero)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x (..., H, N, F)`` to ``(..., H, N)``."""
        linear = LinearHead(self.coefficients_in)(x)
        hidden, bias, out = (
            checks.array(name, getattr(self, name)).astype(x.dtype)
            for name in ("hidden", "bias", "out")
        )
        shape = jnp.shape(self.coefficients_in)
        units = (*shape[:-1], *hidden.shape[-1:])
        if hidden.shape != (*shape, *hidden.shape[-1:]) or not bias.shape == out.shape == units:
            raise ValueError(
                f"hidden of shape {hidden.shape}, bias of shape {bias.shape} and out of shape "
                f"{out.shape} do not fit coefficients_in of shape {shape}"
            )
        heads = "" if bias.ndim == 1 else "h"
        exact = jax.lax.Precision.HIGHEST
        inside = jnp.einsum(f"...{heads}nf,{heads}fk->...{heads}nk", x, hidden, precision=exact)
        bias = jax.lax.broadcast_to_rank(bias[..., None, :], x.ndim)
        inside = jnp.tanh(inside + bias)
        return linear + jnp.einsum(
            f"...{heads}nk,{heads}k->...{heads}n", inside, out, precision=exact
        )
