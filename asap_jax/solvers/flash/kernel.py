"""The seam: what an attention kernel must do so that closures can be made of it.

A row closure is minus the log-sum-exp of softmax attention with a bias on the keys, a column
closure is the same with queries and keys exchanged. So any kernel of softmax attention that gives
its log-sum-exp will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

MASKED = -1e9
"""The dual of a token that takes no part: finite, because kernels form differences of duals."""

Flash = Callable[
    [jax.Array, jax.Array, jax.Array | None, jax.Array], tuple[jax.Array | None, jax.Array]
]
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


class Kernel(NamedTuple):
    """Softmax attention with a bias on the keys, ``softmax(q k' + key_bias) v``.

    Arrays are per head: q ``(..., N, d)``, scaled beforehand; k ``(..., M, d)``; v ``(..., M, e)``,
    in the dtype that the kernel multiplies. key_bias ``(..., M)`` is float32, or float64 with
    arrays in float64.

    Attributes:
      attend: ``(q, k, v, key_bias) -> out (..., N, e)``. Its gradient is right in all arguments.
      flash: ``(q, k, v, key_bias) -> (out, lse)``, lse ``(..., N)`` natural and in the dtype of
        key_bias; out is None if v is. Only called forward. None if the kernel gives no lse of that
        accuracy; then it serves layers of one call.
    """

    attend: Attend
    flash: Flash | None = None
