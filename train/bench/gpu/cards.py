"""Peak rates of accelerators, from their makers' data sheets."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Card:
    """Peak rates of one accelerator.

    Attributes:
      bfloat16, tfloat32, float32: operations per second of dense matrix products with bfloat16
        inputs, of those with float32 inputs at JAX's default precision, and of float32 arithmetic.
      exponentials: per second, by the special-function units.
      bandwidth: bytes per second of the memory.
      cache: bytes of the last cache before it.
    """

    bfloat16: float
    tfloat32: float
    float32: float
    exponentials: float
    bandwidth: float
    cache: float

    def products(self, dtype: str) -> float:
        """Operations per second of matrix products with inputs of ``dtype``."""
        return self.bfloat16 if dtype == "bfloat16" else self.tfloat32


_HOPPER = Card(
    bfloat16=989.5e12,
    tfloat32=494.7e12,
    float32=66.9e12,
    exponentials=16 * 132 * 1.98e9,
    bandwidth=3.35e12,
    cache=50e6,
)
CARDS = {
    "NVIDIA H200": dataclasses.replace(_HOPPER, bandwidth=4.8e12),
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA A100-SXM4-80GB": Card(
        bfloat16=312e12,
        tfloat32=156e12,
        float32=19.5e12,
        exponentials=16 * 108 * 1.41e9,
        bandwidth=2.039e12,
        cache=40e6,
    ),
}
"""By the name that JAX gives the device.

Sources: NVIDIA H200, H100 and A100 data sheets (SXM parts; the rates of matrix products are without
sparsity, half of the large numbers in the first two sheets); their architecture white papers for
the multiprocessors, clocks and caches; the throughput table of the CUDA C++ programming guide for
16 exponentials per multiprocessor and clock.
"""
