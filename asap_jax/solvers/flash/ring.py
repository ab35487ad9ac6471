"""A kernel for tokens that several devices share: the keys go round, from device to device.

Inside ``jax.shard_map`` every device has some of the queries and some of the keys. It computes
attention from its queries to the keys of one device after the other, and merges the partial results
by their log-sum-exps. This is exact, and no device ever holds all keys. This is known as ring
attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from asap_jax import devices
from asap_jax.scores import dot
from asap_jax.solvers.flash import gradient
from asap_jax.solvers.flash.kernel import Kernel


def around(kernel: Kernel, axis_name: str) -> Kernel:
    """``kernel`` over the keys of all devices of the axis.

    In reverse mode the keys go round again, with their cotangents.
    """
    assert kernel.flash is not None
    partial, one_device = kernel.flash, gradient.attention(kernel)
    count = devices.size(axis_name)

    def rotated(tree: Any) -> Any:
        pairs = [(i, (i + 1) % count) for i in range(count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), tree)

    def flash(q, k, v, key_bias):
        # The keys move on while a device computes with those it has.
        def step(_, state):
            merged, keys = state
            return _merged(merged, _wide(partial(q, *keys))), rotated(keys)

        keys = k, v, key_bias
        start = _wide(partial(q, *keys)), rotated(keys)
        (out, lse), _ = jax.lax.fori_loop(0, count - 1, step, start)
        return None if v is None else out.astype(v.dtype), lse

    @jax.custom_vjp
    def both(q, k, v, key_bias):
        return flash(q, k, v, key_bias)

    def forward(q, k, v, key_bias):
        out, lse = both(q, k, v, key_bias)
        return (out, lse), (q, k, v, key_bias, out, lse)

    def backward(saved, cotangents):
        q, *keys, out, lse = saved
        d_out, d_lse = (x.astype(lse.dtype) for x in cotangents)
        out = out.astype(lse.dtype)

        def step(_, state):
            dq, keys, d_keys = state
            (part, part_lse), pull = jax.vjp(one_device, q, *keys)
            share = jnp.exp(part_lse - lse)
            d_part = (share[..., None] * d_out).astype(part.dtype)
            change = dot(d_out, part.astype(lse.dtype) - out)
            more, *more_keys = pull((d_part, share * (change + d_lse)))
            d_keys = [d + x.astype(d.dtype) for d, x in zip(d_keys, more_keys, strict=True)]
            return dq + more.astype(dq.dtype), rotated(keys), rotated(d_keys)

        zeros = lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, lse.dtype))
        start = zeros(q), keys, jax.tree.map(zeros, keys)
        # After as many steps as there are devices everything is back where it belongs.
        dq, _, d_keys = jax.lax.fori_loop(0, count, step, start)
        return tuple(d.astype(x.dtype) for d, x in zip((dq, *d_keys), (q, *keys), strict=True))

    both.defvjp(forward, backward)
    return Kernel(lambda q, k, v, key_bias: both(q, k, v, key_bias)[0], flash)


def _wide(result: tuple[jax.Array | None, jax.Array]) -> tuple[jax.Array | None, jax.Array]:
    """``(out, lse)`` with ``out`` in the dtype of ``lse``, so that merging does not round."""
    out, lse = result
    return None if out is None else out.astype(lse.dtype), lse


def _merged(
    a: tuple[jax.Array | None, jax.Array], b: tuple[jax.Array | None, jax.Array]
) -> tuple[jax.Array | None, jax.Array]:
    """``(out, lse)`` over the keys of both."""
    (a_out, a_lse), (b_out, b_lse) = a, b
    lse = jnp.logaddexp(a_lse, b_lse)
    if a_out is None or b_out is None:
        return None, lse
    a_share, b_share = (jnp.exp(x - lse)[..., None] for x in (a_lse, b_lse))
    return a_share * a_out + b_share * b_out, lse
