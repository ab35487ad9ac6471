"""Heads: from features to a dual."""

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
        if w.ndim not in (1, 2) or w.shape[-1] != x.shape[-1]:
            raise ValueError(
                f"coefficients of shape {w.shape} do not fit features of shape "
                f"{x.shape}: expected ({x.shape[-1]},) or (heads, {x.shape[-1]})"
            )
        exact = jax.lax.Precision.HIGHEST
        if w.ndim == 1:
            return jnp.einsum("...nf,f->...n", x, w, precision=exact)
        if x.ndim < 3 or x.shape[-3] != w.shape[0]:
            raise ValueError(
                f"coefficients of shape {w.shape} are for {w.shape[0]} heads, "
                f"features of shape {x.shape} have another number"
            )
        return jnp.einsum("...hnf,hf->...hn", x, w, precision=exact)


@flax.struct.dataclass
class MLPHead:
    """A linear head with a small hidden layer beside it: ``x.w + tanh(x W + b).o`` per head.

    Attributes:
      coefficients_in: ``(H, F)`` or ``(F,)``.
      hidden: ``(H, F, K)`` or ``(F, K)``; bias, out: ``(H, K)`` or ``(K,)``.
    """

    coefficients_in: jax.Array
    hidden: jax.Array
    bias: jax.Array
    out: jax.Array

    @classmethod
    def around(cls, linear: LinearHead, whitening: jax.Array, num_hidden: int, seed: int):
        """The head that equals ``linear``, with hidden units on whitened features to be fitted.

        ``whitening (..., F, F)``: features times it have unit covariance.
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
        bias = bias[..., None, :]
        inside = jnp.tanh(inside + bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape))
        return linear + jnp.einsum(
            f"...{heads}nk,{heads}k->...{heads}n", inside, out, precision=exact
        )
