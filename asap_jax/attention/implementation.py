"""Which implementation an attention call takes."""

from __future__ import annotations

from typing import Any

import jax

from asap_jax import checks
from asap_jax.problem import make_problem
from asap_jax.solvers import registry
from asap_jax.solvers.closures import Closures


def chosen_implementation(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    calls: int,
    implementation: str = "auto",
    dtype: Any = None,
) -> str:
    """The name of the implementation that a call without weights takes on the default device.

    ``"auto"`` and ``"fused"`` depend on shapes, dtype and platform, so the answer is one of the
    other names. Nothing is computed.

    Args:
      query, key, value, bias, mask, dtype: as in ``sinkhorn_attention``; ``jax.ShapeDtypeStruct``
        will do.
      calls: number of softmax-attention calls of the operator, as in the reports: n for n closures
        that end on rows, n + 1 for columns; 1 for softmax attention. One less for each correction
        of the predictor.
      implementation: the name that the call is given.

    Raises:
      ValueError, TypeError: as the call itself.
    """
    checks.one_of("implementation", implementation, registry.NAMES)
    calls = checks.positive_int("calls", calls)
    # n closures that end on rows take n calls, so they stand for any operator of n calls.
    closures, chosen = Closures("key" if calls % 2 else "query", calls), []

    def trace(query, key, value, bias, mask):
        p = make_problem(query, key, value, bias, mask, scale=None, dtype=dtype)
        chosen.append(registry.choose(implementation, p, closures))

    jax.eval_shape(trace, query, key, value, bias, mask)
    return chosen[0]
