"""What a table was measured on, so that its figures can be judged and repeated."""

import os
import pathlib
import platform
import sys

import jax


def facts() -> dict[str, str]:
    """Processor, cores, devices, versions and the command that was given."""
    devices = jax.devices()
    return {
        "machine": f"{processor()}, {cores()} cores, {platform.system()}",
        "device": f"{len(devices)} {devices[0].device_kind}",
        "versions": f"Python {platform.python_version()}, JAX {jax.__version__}",
        "command": command(),
    }


def processor() -> str:
    """The processor's name, or its architecture where the system does not tell."""
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
    """The command line, as one would type it from the repository root."""
    arguments = " ".join(sys.argv[1:])
    return f"python -m train {arguments}".strip()
