"""Gradients of a kernel that has none for its log-sum-exp.

Fused kernels drop the cotangent of their log-sum-exp, or refuse it. With ``P`` the row-stochastic
plan and c the cotangent, ``dq = c (P k)``, ``dk = P' (c q)`` and ``dbias = P' c``: forward calls
with other values. A product with ``P'`` is a call with queries and keys exchanged and minus the
log-sum-exp as bias. Only inputs, duals and outputs are saved.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from asap_jax.solvers.flash.kernel import MASKED, Flash, Kernel


def log_sum_exp(flash: Flash) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """``(q, k, key_bias) -> lse (..., N)`` with a gradient."""

    @jax.custom_vjp
    def lse(q, k, key_bias):
        return flash(q, k, None, key_bias)[1]

    def forward(q, k, key_bias):
        out = lse(q, k, key_bias)
        return out, (q, k, key_bias, out)

    def backward(saved, cotangent):
        return _pulled_through_lse(flash, *saved, cotangent)

    lse.defvjp(forward, backward)
    return lse


def attention(kernel: Kernel) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """``(q, k, v, key_bias) -> (out, lse)`` with the gradient of both."""
    attend, flash = kernel.attend, kernel.flash
    assert flash is not None

    @jax.custom_vjp
    def both(q, k, v, key_bias):
        return flash(q, k, v, key_bias)

    def forward(q, k, v, key_bias):
        out, lse = both(q, k, v, key_bias)
        return (out, lse), (q, k, v, key_bias, lse)

    def backward(saved, cotangents):
        q, k, v, key_bias, lse = saved
        d_out, d_lse = cotangents
        _, pull = jax.vjp(attend, q, k, v, key_bias)
        dq, dk, dv, d_bias = pull(d_out)
        more = _pulled_through_lse(flash, q, k, key_bias, lse, d_lse)
        dq, dk, d_bias = jax.tree.map(jnp.add, (dq, dk, d_bias), more)
        return dq, dk, dv, d_bias

    both.defvjp(forward, backward)
    return both


def _pulled_through_lse(flash, q, k, key_bias, lse, cotangent):
    """Cotangents of q, k and key_bias."""
    wide = cotangent[..., None]
    mixed, _ = flash(q, k, k, key_bias)
    dq = wide * mixed.astype(wide.dtype)
    values = jnp.concatenate([wide * q.astype(wide.dtype), wide], -1)
    moved = _transposed(flash, q, k, key_bias, lse, values)
    return dq.astype(q.dtype), moved[..., :-1].astype(k.dtype), moved[..., -1]


def _transposed(flash, q, k, key_bias, lse, x):
    """``P' x``: from ``(..., N, c)`` to ``(..., M, c)``, where P is the plan of the kernel.

    The values of the call have size 1 in every row, so that no dtype is too narrow for them; the
    sizes are part of the bias.
    """
    size = jnp.max(jnp.abs(x), -1)
    row = size > 0
    size = jnp.where(row, size, jnp.ones_like(size))
    bias = jnp.where(row, jnp.log(size) - lse, jnp.full_like(lse, MASKED))
    out, other = flash(k, q, (x / size[..., None]).astype(q.dtype), bias)
    return jnp.exp(key_bias + other)[..., None] * out.astype(x.dtype)
