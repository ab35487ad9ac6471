"""What the default device is, as facts that are known while tracing."""

from __future__ import annotations

import re

import jax


def name() -> str:
    """``"cpu"``, ``"gpu"`` or ``"tpu"``: the platform of the default device."""
    return _device().platform


def cuda_capability() -> tuple[int, int] | None:
    """The compute capability of the default device; None if it is not a CUDA device."""
    device = _device()
    version = str(getattr(device, "compute_capability", ""))
    numbers = re.fullmatch(r"(\d+)\.(\d+)", version)  # those of ROCm look different
    return (int(numbers[1]), int(numbers[2])) if device.platform == "gpu" and numbers else None


def _device() -> jax.Device:
    device = getattr(jax.config, "jax_default_device", None)
    if isinstance(device, jax.Device):
        return device
    return jax.local_devices(backend=device)[0]
