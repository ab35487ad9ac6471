"""What is known about a call while tracing, and what decides whether a kernel can compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from asap_jax.problem import Problem


class Facts(NamedTuple):
    """Static facts of a call.

    Attributes:
      calls: number of attention calls.
      dtype: name of the dtype of the inputs.
      channels, value_channels: head_dim and value_dim.
    """

    calls: int
    dtype: str
    channels: int
    value_channels: int

    @classmethod
    def of(cls, p: Problem, calls: int) -> Facts:
        """The facts of these problems; without values, those of values like the keys."""
        values = p.k if p.v is None else p.v
        return cls(calls, p.dtype.name, p.k.shape[-1], values.shape[-1])


Refusal = Callable[[Facts], str | None]
"""The reason why a kernel cannot compute a call, or None if it can."""


def unfoldable(p: Problem) -> str | None:
    """The reason why mask and bias are not duals of the tokens, or None if they are."""
    for name, array in (("bias", p.bias), ("mask", None if p.whole_tokens else p.mask)):
        if array is not None and 1 not in array.shape[-2:]:
            return (
                f"{name} of shape {array.shape} has a row for each query and a column for each "
                f"key; fused kernels take a mask or bias of the keys, (..., heads, 1, M), or of "
                f"the queries, (..., heads, N, 1)"
            )
    return None
