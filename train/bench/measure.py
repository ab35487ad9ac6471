"""Shared by the benchmarks: compiles and times rows, and makes their table."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.reporting.table import Report, Table
from train.runtime import machine, timing

GIB = 2**30
LIMIT_GIB = 12.0
SHAPE = (1, 8, 64)  # batch, heads, head_dim of a sweep over lengths
SHAPE_FACT = {"shape": "batch {}, {} heads, head_dim {}, float32".format(*SHAPE)}
DENSE = (
    "softmax, jax.nn.softmax",
    "softmax, divided late",
    "softmax, jax.nn.dot_product_attention",
)
"""Row names of softmax attention that keeps all scores, in several forms."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One attention function at one shape.

    Attributes:
      shape, name: names of the shape and of the function.
      gibibytes: temporary memory of the compiled program, without inputs and outputs; None for a
        function outside JAX.
      compile_seconds: time to compile the program; None for a function outside JAX.
      milliseconds: median of the timed calls; None if it was not timed.
      ratio: ``milliseconds`` over those of the fastest row in ``base``, see ``measure``.
      reason: why it was not timed.
      low, high: quartiles of the timed calls, in milliseconds.
      whole_gibibytes: memory with inputs and outputs.
      calls: number of timed calls.
    """

    shape: str
    name: str
    gibibytes: float | None
    compile_seconds: float | None
    milliseconds: float | None
    ratio: float | None
    reason: str = ""
    low: float | None = None
    high: float | None = None
    whole_gibibytes: float | None = None
    calls: int = 0


def sweep_shape(length: int) -> tuple[int, int, int, int]:
    """Batch, length, heads and head_dim at one length of a sweep."""
    batch, heads, width = SHAPE
    return batch, length, heads, width


def value_and_gradients(function: Callable, num_inputs: int = 3) -> Callable:
    """A function that gives a scalar of the output and its gradient with respect to every input."""
    loss = lambda *x: jnp.sum(jnp.sin(function(*x)))
    return jax.value_and_grad(loss, argnums=tuple(range(num_inputs)))


def measure(
    shape_name: str,
    shape: tuple[int, ...],
    rows: Mapping[str, Callable],
    *,
    rounds: int,
    limit_gib: float = LIMIT_GIB,
    gradient: bool = False,
    num_inputs: int = 3,
    timed: bool = True,
    at_most: float | None = None,
    sharpness: float = 1.0,
    foreign: Mapping[str, Callable[[], object]] | None = None,
    base: Collection[str] = DENSE,
) -> list[Row]:
    """Compiles and times all rows at one shape, interleaved.

    Args:
      shape_name: name of the shape in the table.
      shape: shape of every input: batch, length, heads, head_dim.
      rows: names and functions.
      rounds: timed calls of each row.
      limit_gib: rows that need more memory, including inputs and outputs, are not run.
      gradient: time value and gradient of a scalar of the output instead of the output.
      num_inputs: number of inputs of each function; they are Gaussian arrays of the same shape.
      timed: whether to run the rows; otherwise only memory is reported.
      at_most: seconds to spend on a row, see ``timing.samples``.
      sharpness: factor of the first input, and so the standard deviation of the scores.
      foreign: functions outside JAX, timed in the same rounds; their memory is not measured.
      base: ratios are relative to the fastest of these rows. If none of them was timed, they are
        relative to the fastest row.
    """
    like = [jax.ShapeDtypeStruct(shape, jnp.float32)] * num_inputs
    first, *rest = gaussians(shape, num_inputs)
    inputs = [sharpness * first, *rest]
    measured, calls = {}, {}
    for name, function in rows.items():
        if gradient:
            function = value_and_gradients(function, num_inputs)
        measured[name], program = compiled(shape_name, name, function, like, limit_gib)
        if program is not None and timed:
            calls[name] = functools.partial(program, *inputs)
    for name, call in (foreign or {}).items():
        measured[name], calls[name] = Row(shape_name, name, None, None, None, None), call
    samples = timing.samples(calls, rounds=rounds, at_most=at_most) if calls else {}
    medians = {name: statistics.median(times) for name, times in samples.items()}
    in_base = [medians[name] for name in base if name in medians] or list(medians.values())
    for name, times in samples.items():
        measured[name] = with_times(measured[name], times, min(in_base))
    return list(measured.values())


def gaussians(shape: tuple[int, ...], count: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """``count`` Gaussian arrays of one shape."""
    return [
        jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), count)
    ]


def compiled(
    shape_name: str, name: str, function: Callable, like: Sequence[Any], limit_gib: float
) -> tuple[Row, Callable | None]:
    """The row of a function before it is timed, and its program; None if it needs too much memory.

    ``like`` has the shapes and dtypes of its arguments.
    """
    seconds, program = timing.compiled(function, *like)
    memory = program.memory_analysis()
    temporary = memory.temp_size_in_bytes / GIB
    outside = memory.argument_size_in_bytes + memory.output_size_in_bytes
    whole = temporary + outside / GIB
    reason = "not timed" if whole <= limit_gib else f"not run (needs {whole:.1f} GiB)"
    row = Row(
        shape_name, name, temporary, seconds, None, None, reason=reason, whole_gibibytes=whole
    )
    return row, program if whole <= limit_gib else None


def with_times(row: Row, times: Sequence[float], base: float) -> Row:
    """The row with the median and the quartiles of its timed calls; its ratio is to ``base``."""
    low, median, high = map(float, np.percentile(times, (25, 50, 75)))
    return dataclasses.replace(
        row,
        milliseconds=median,
        ratio=median / base,
        reason="",
        low=low,
        high=high,
        calls=len(times),
    )


def table(rows: list[Row]) -> Table:
    """The rows as a table."""
    headings = ["shape", "attention", "ms", "quartiles", "ratio", "temporary MiB", "compile s"]
    return Table(headings, [_cells(row) for row in rows], num_names=2)


def _cells(row: Row) -> list[str]:
    if row.milliseconds is None:
        times = [row.reason, "", ""]
    else:
        times = [f"{row.milliseconds:.2f}", f"{row.low:.2f}..{row.high:.2f}", f"{row.ratio:.2f}"]
    if row.gibibytes is None:
        return [row.shape, row.name, *times, "?", "0"]
    memory = f"{1024 * row.gibibytes:.1f}"
    return [row.shape, row.name, *times, memory, f"{row.compile_seconds:.1f}"]


def report(title: str, rows: list[Row], facts: Mapping[str, str]) -> Report:
    """The report of a benchmark: its table, its facts and those of the machine."""
    return Report(title, [table(rows)], {**facts, **machine.facts()}, {"rows": rows})
