"""The kernel in plain JAX, by tiles of queries: it runs everywhere; the others must agree."""

from __future__ import annotations

from typing import Any

import jax

from asap_jax import checks
from asap_jax.problem import Problem
from asap_jax.solvers import tiled
from asap_jax.solvers.flash.kernel import Kernel


def kernel(precision: Any = None, block: int = tiled.BLOCK) -> Kernel:
    """Tiles of ``block`` queries, with products of this matmul precision, in float32 at least."""

    def flash(q, k, v, key_bias):
        q, k = map(checks.at_least_f32, (q, k))
        p = Problem(q, k, None, None, None, None, 1.0, q.dtype, precision)
        rows = tiled.make_blocks(p, 1.0, block=block)
        if v is None:
            return None, tiled.log_sum_exp(rows, key_bias)
        out, lse = tiled.flash(rows, key_bias, checks.at_least_f32(v))
        return out.astype(v.dtype), lse

    def attend(q, k, v, key_bias) -> jax.Array:
        return flash(q, k, v, key_bias)[0]

    return Kernel(attend, flash)
