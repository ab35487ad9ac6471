"""Memory and time of one train step: Sinkhorn at three budgets beside ESP attention.

The paper's table of train-step scaling with sequence length: batch 1, 8 heads, width 64, 64 slices
(the coordinate axes), one attention layer on random inputs. A train step is forward and gradient
with respect to query, key and value; ESP with exact sorting is an inference operator and is
measured forward only. ESP (soft) comes twice: one slice at a time, which is what ``esp_attention``
does, and with the plans of all slices in memory, which is what the released code does.

Memory is that of the compiled step: arguments, results and temporaries. A step that would need
more than ``LIMIT_GIB`` is compiled but not run.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp

import asap_jax as aj
from asap_jax.baselines.esp import esp_attention
from train.runtime import machine

GIB = 2**30
LIMIT_GIB = 12.0
LENGTHS = (197, 512, 1000, 2000)
BATCH, HEADS, WIDTH = 1, 8, 64  # the 64 coordinate axes are the slices
BUDGETS = (3, 10, 20)
SPEND_SECONDS = 5.0  # repeat a step at most this long, but run it at least once


@dataclasses.dataclass(frozen=True)
class Row:
    """One method at one length.

    Attributes:
      length: N.
      name: the method.
      gibibytes: of the compiled step.
      milliseconds: median of ``runs`` steps; None where the step was not run.
      runs: how often the step was timed.
    """

    length: int
    name: str
    gibibytes: float
    milliseconds: float | None
    runs: int

    @property
    def time(self) -> str:
        """The time cell."""
        if self.milliseconds is None:
            return f"not run (needs {self.gibibytes:.1f} GiB)"
        return f"{self.milliseconds:.1f} ({self.runs})"


def methods() -> dict[str, tuple[Callable, bool]]:
    """From the name of a method to its attention function and whether it is trained."""
    sinkhorn = lambda budget: functools.partial(aj.sinkhorn_attention, spec=aj.SinkhornSpec(budget))
    esp = functools.partial(functools.partial, esp_attention)
    return {f"Sinkhorn (S={budget})": (sinkhorn(budget), True) for budget in BUDGETS} | {
        "ESP (soft)": (esp(), True),
        "ESP (soft), all slices at once": (esp(implementation="dense"), True),
        "ESP (hard), forward": (esp(mode="hard"), False),
    }


def step_of(function: Callable, trained: bool) -> Callable:
    """What is measured: value and gradients of a scalar of the output, or the output."""
    if not trained:
        return function
    loss = lambda *qkv: jnp.sum(jnp.sin(function(*qkv)))
    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def measure(name: str, step: Callable, length: int, *, limit_gib: float = LIMIT_GIB) -> Row:
    """Compiles ``step`` for one length and, where it fits, times it after one warm-up call.

    A step slower than ``SPEND_SECONDS`` is not repeated: its warm-up call, already compiled, is
    the measurement.
    """
    shape = (BATCH, length, HEADS, WIDTH)
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    compiled = jax.jit(step).lower(like, like, like).compile()
    analysis = compiled.memory_analysis()
    needed = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
    ) / GIB
    if needed > limit_gib:
        return Row(length, name, needed, None, 0)
    qkv = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3)]
    times = [_seconds(compiled, qkv)]
    if times[0] < SPEND_SECONDS:
        repeats = max(1, min(10, int(SPEND_SECONDS / max(times[0], 1e-3))))
        times = [_seconds(compiled, qkv) for _ in range(repeats)]
    return Row(length, name, needed, 1e3 * statistics.median(times), len(times))


def _seconds(compiled: Callable, arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def rows(lengths: Iterable[int] = LENGTHS, *, limit_gib: float = LIMIT_GIB) -> Iterator[Row]:
    """The rows of the table, each as soon as it is measured."""
    for length in lengths:
        for name, (function, trained) in methods().items():
            yield measure(name, step_of(function, trained), length, limit_gib=limit_gib)


def run(lengths: Iterable[int] = LENGTHS, *, limit_gib: float = LIMIT_GIB) -> list[Row]:
    """Prints the table as it is measured and returns its rows."""
    print(f"one train step, B{BATCH} H{HEADS} d{WIDTH}, {WIDTH} slices, float32")
    print(f"{'N':>6}  {'method':<32} {'GiB':>8}  ms (timed runs)")
    done = []
    for row in rows(lengths, limit_gib=limit_gib):
        print(f"{row.length:>6}  {row.name:<32} {row.gibibytes:>8.2f}  {row.time}", flush=True)
        done.append(row)
    print("; ".join(f"{name}: {value}" for name, value in machine.facts().items()))
    return done
