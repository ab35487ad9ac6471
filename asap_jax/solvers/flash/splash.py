"""JAX's splash attention on TPUs, with the bias folded, for any number of closures.

Its log-sum-exp is natural and float32, but refuses a gradient, hence ``gradient``. Lengths are
padded to whole blocks: padded keys have a masked bias, padded queries are cut off.

Tested on CPUs in Pallas' interpret mode, and lowered for TPUs. It has not run on one.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax.solvers.flash import fold, padding, platform
from asap_jax.solvers.flash.facts import Facts
from asap_jax.solvers.flash.kernel import Kernel

DTYPES = ("bfloat16", "float32")
LANES = 128
BLOCKS = (4 * LANES, 2 * LANES, LANES)
"""Lengths of a block; the first is taken that divides the length."""


def kernel(*, interpret: bool = False) -> Kernel:
    """The kernel; ``interpret`` runs it in Pallas' interpreter, on any platform and slowly."""

    def flash(q, k, v, key_bias):
        values = jnp.zeros((*k.shape[:-1], fold.MULTIPLE), k.dtype) if v is None else v
        x = _operands(q, k, values, key_bias)
        out, (lse,) = _run(x, interpret, save_residuals=True)
        lse = lse.reshape(*q.shape[:-2], -1)[..., : q.shape[-2]].astype(key_bias.dtype)
        out = None if v is None else _cut(out, q, v)
        return out, lse + x.centre

    def attend(q, k, v, key_bias):
        return _cut(_run(_operands(q, k, v, key_bias), interpret), q, v)

    return Kernel(attend, flash)


def refusal(facts: Facts) -> str | None:
    """The reason why splash attention cannot compute the call, or None if it can."""
    if platform.name() != "tpu":
        return f"splash attention needs a TPU, the platform is {platform.name()!r}"
    if facts.dtype not in DTYPES:
        return f"splash attention computes in {' or '.join(DTYPES)}, the inputs are {facts.dtype}"
    return None


class _Operands(NamedTuple):
    """Arrays ``(problems, length, channels)`` of whole blocks, and the centre of the bias."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    centre: jax.Array


def _operands(q, k, v, key_bias) -> _Operands:
    q, k, v, key_bias = padding.pad(q, k, v, key_bias, LANES)
    folded = fold.fold(q, k, key_bias)
    joined = lambda x: x.reshape(-1, *x.shape[-2:])
    return _Operands(joined(folded.q), joined(folded.k), joined(v), folded.centre)


def _cut(out: jax.Array, q: jax.Array, v: jax.Array) -> jax.Array:
    """The output ``(problems, length, c)`` as ``(..., N, e)``."""
    out = out.reshape(*q.shape[:-2], *out.shape[-2:])
    return out[..., : q.shape[-2], : v.shape[-1]]


def _run(x: _Operands, interpret: bool, *, save_residuals: bool = False):
    from jax.experimental.pallas.ops.tpu import splash_attention  # slow, so only where needed

    n, m = x.q.shape[-2], x.k.shape[-2]
    rows, columns = _block(n), _block(m)
    sizes = splash_attention.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_kv_dkv_compute=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    one_head = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([splash_attention.FullMask((n, m))]),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=save_residuals,
        interpret=interpret,
    )
    # By default a TPU multiplies float32 arrays in bfloat16.
    exact = x.q.dtype == jnp.float32
    with jax.default_matmul_precision("float32") if exact else contextlib.nullcontext():
        return jax.vmap(one_head)(*(a[:, None] for a in x[:3]))


def _block(length: int) -> int:
    return next(size for size in BLOCKS if length % size == 0)
