"""Seconds that ``import asap_jax`` adds to the import of its dependencies."""

import statistics
import subprocess
import sys

from train.runtime import machine

DEPENDENCIES = "jax, flax.linen, flax.nnx, optax, chex"
CODE = (
    f"import time; import {DEPENDENCIES}; start = time.perf_counter(); import asap_jax; "
    f"print(time.perf_counter() - start)"
)


def seconds() -> float:
    """One measurement in a fresh interpreter."""
    command = [sys.executable, "-c", CODE]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def run(rounds: int = 5) -> None:
    """Prints the median."""
    values = [seconds() for _ in range(rounds)]
    print(
        f"import asap_jax adds {statistics.median(values):.2f} s to importing {DEPENDENCIES} "
        f"(median of {rounds}, {min(values):.2f} to {max(values):.2f})"
    )
    print(machine.line())
