"""Names the machine, versions and command of a measurement, so that it can be repeated."""

import os
import pathlib
import platform
import sys

import jax

ALLOCATOR = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables that change how the process allocates and frees memory."""


def facts() -> dict[str, str]:
    """Processor, cores, devices, versions, the allocator's settings and the command."""
    devices = jax.devices()
    result = {
        "machine": f"{processor()}, {cores()} cores, {platform.system()}",
        "device": f"{len(devices)} {devices[0].device_kind}",
        "versions": f"Python {platform.python_version()}, JAX {jax.__version__}",
    }
    if settings := " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k in ALLOCATOR):
        result["allocator"] = settings
    return {**result, "command": command()}


def line() -> str:
    """The facts in one line."""
    return "; ".join(f"{name}: {value}" for name, value in facts().items())


def processor() -> str:
    """The processor's name, or its architecture if the system does not give a name."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command() -> str:
    """The command line, to be typed in the repository root."""
    arguments = " ".join(sys.argv[1:])
    return f"python -m train {arguments}".strip()
