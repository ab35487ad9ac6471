"""Seconds that ``import asap_jax`` adds to importing what it stands on."""

import statistics
import subprocess
import sys

from train.runtime import machine

NEIGHBOURS = "jax, flax.linen, flax.nnx, optax, chex"
CODE = (
    f"import time; import {NEIGHBOURS}; start = time.perf_counter(); import asap_jax; "
    f"print(time.perf_counter() - start)"
)


def seconds() -> float:
    """One measurement in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    return float(done.stdout)


def run(rounds: int = 5) -> None:
    """Prints the median."""
    values = [seconds() for _ in range(rounds)]
    print(
        f"import asap_jax adds {statistics.median(values):.2f} s to importing {NEIGHBOURS} "
        f"(median of {rounds}, {min(values):.2f} to {max(values):.2f})"
    )
    print(machine.line())
