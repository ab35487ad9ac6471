"""Times of attention layers beside the floor of the card."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import asap_jax as aj
from train.bench import layer
from train.bench.gpu import work
from train.bench.gpu.attempts import Clock, Outcome, Task, attempts
from train.bench.gpu.cards import Card
from train.bench.gpu.operators import OPERATORS
from train.bench.gpu.page import Section
from train.bench.measure import Row, compiled, gaussians, value_and_gradients, with_times
from train.runtime import timing

ROUNDS = 10
WINDOW = 20.0  # milliseconds of a sample, or one call
AT_MOST = 1.5  # seconds for a row
WIDTH = 1024  # of the model in the paper's timings
SLICES = 32  # of the paper's layers
STORED = {"scaling": "kernel", "log": "scores"}
"""What implementations store of N x N scores; others store nothing."""
SECTION = Section(
    "Times",
    ("shape", "pass", "operator", "implementation"),
    ("ms", "low", "high", "over softmax", "floor ms", "over floor", "temporary MiB", "compile s"),
    f"ms: median of up to {ROUNDS} samples, with their quartiles; a sample is one call. If "
    f"a call takes less than {WINDOW:g} ms, several are queued and the sample is their mean. Over "
    "softmax: the ratio to the fastest softmax row of the same shape and pass. Floor: the longest "
    "of the times for memory, for products and "
    "for exponentials at the card's peak rates; its name stands beside it. It is the floor of a "
    "method that stores no scores, except for scaling, which stores exponentials in float32, and "
    "log, which stores scores. Compile s: while other programs are compiled, too.",
)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A row to time.

    Attributes:
      labels: its name under the headings of ``SECTION``.
      function: from ``num_inputs`` arrays of one shape, and the weights, to an array.
      shape: the shape of every input.
      dtype: the dtype of every input.
      least: the work of a call.
      gradient: time a scalar of the output with its gradient.
      softmax: whether other rows are compared with this one.
      num_inputs: number of inputs.
      weights: further arguments.
    """

    labels: dict[str, str]
    function: Callable
    shape: tuple[int, ...]
    dtype: str
    least: work.Work
    gradient: bool = False
    softmax: bool = False
    num_inputs: int = 3
    weights: tuple[np.ndarray, ...] = ()

    def compile(self, limit_gib: float) -> tuple[Row, Callable]:
        """The program, and its row without a time. MemoryError if it needs too much memory."""
        function = self.function
        if self.gradient:
            function = value_and_gradients(function, self.num_inputs)
        like = [jax.ShapeDtypeStruct(self.shape, self.dtype)] * self.num_inputs
        like += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.weights]
        row, program = compiled("", self.labels["operator"], function, like, limit_gib)
        if program is None:
            raise MemoryError(f"needs {row.whole_gibibytes:.1f} GiB")
        return row, program

    def measure(self, row: Row, program: Callable) -> Row:
        """The row with its time."""
        inputs = gaussians(self.shape, self.num_inputs, self.dtype)
        inputs += [jax.device_put(x) for x in self.weights]
        call = {row.name: functools.partial(program, *inputs)}
        (times,) = timing.samples(call, rounds=ROUNDS, at_most=AT_MOST, window=WINDOW).values()
        return with_times(row, times, float(np.median(times)))


def measure(
    rows: Sequence[Timed], clock: Clock, card: Card | None, *, workers: int, limit_gib: float
) -> Iterator[Outcome]:
    """Compiles all rows, several at a time, then times them one by one.

    The value of an outcome is a line of ``SECTION``, and its task has the labels of one.
    """
    programs = {}
    compiling = {Task(row.labels, functools.partial(row.compile, limit_gib)): row for row in rows}
    for outcome in attempts(compiling, clock, workers=workers):
        if outcome.reason:
            yield outcome
        else:
            programs[outcome.task] = outcome.value
    timing_tasks = {
        Task(row.labels, functools.partial(row.measure, *programs[task])): row
        for task, row in compiling.items()
        if task in programs
    }
    softmax = None
    for outcome in attempts(timing_tasks, clock):
        timed = timing_tasks[outcome.task]
        if outcome.value is not None:
            if timed.softmax:
                softmax = min(softmax or np.inf, outcome.value.milliseconds)
            line = figures(outcome.value, timed, card, softmax)
            outcome = dataclasses.replace(outcome, value=line)
        yield outcome


def figures(row: Row, timed: Timed, card: Card | None, softmax: float | None) -> dict[str, Any]:
    """The figures of a timed row; without a floor if the card is not known."""
    assert row.milliseconds is not None
    assert row.gibibytes is not None
    result = {
        "ms": row.milliseconds,
        "low": row.low,
        "high": row.high,
        "temporary MiB": 1024 * row.gibibytes,
        "compile s": row.compile_seconds,
    }
    if softmax is not None:
        result["over softmax"] = row.milliseconds / softmax
    if card is not None:
        floor, kind = timed.least.floor(card, timed.dtype)
        result["floor ms"] = f"{floor:.3g} ({kind})"
        result["over floor"] = row.milliseconds / floor
    return result


def ceilings(size: int) -> list[Timed]:
    """What the card reaches: a copy, and a matrix product of bfloat16."""
    square = (size, size)
    copied = work.Work(moved=8.0 * size**2)
    product = work.Work(moved=6.0 * size**2, products=2.0 * size**3)
    labels = lambda name: {"shape": f"{size} x {size}", "pass": "forward", "operator": name}
    return [
        Timed(labels("copy"), lambda x: x + 1, square, "float32", copied, num_inputs=1),
        Timed(labels("product"), jnp.matmul, square, "bfloat16", product, num_inputs=2),
    ]


def sweep(
    length: int,
    problems: int,
    *,
    gradient: bool,
    implementations: Sequence[str],
    operators: Sequence[str],
    width: int = 64,
    heads: int = 8,
) -> list[Timed]:
    """Rows in bfloat16 at one length: softmax attention, then every operator in every way."""
    shape = work.Shape(problems, length, width, 2)
    array = (max(1, problems // heads), length, min(heads, problems), width)
    names = {
        "shape": f"N={length}, {problems} heads of {width}",
        "pass": "forward + backward" if gradient else "forward",
    }
    softmax = [
        Timed(
            {**names, "operator": "softmax", "implementation": f"jax.nn, {kernel}"},
            functools.partial(jax.nn.dot_product_attention, implementation=kernel),
            array,
            "bfloat16",
            work.attention(shape, 1, on_rows=True, gradient=gradient),
            gradient=gradient,
            softmax=True,
        )
        for kernel in ("cudnn", "xla")
    ]
    return softmax + [
        Timed(
            {**names, "operator": name, "implementation": implementation},
            OPERATORS[name].bind(implementation, width),
            array,
            "bfloat16",
            least(shape, name, implementation, gradient=gradient),
            gradient=gradient,
        )
        for name in operators
        for implementation in implementations
    ]


def least(
    shape: work.Shape, name: str, implementation: str, *, gradient: bool = False
) -> work.Work:
    """The work of an operator in one way of computing it."""
    operator = OPERATORS[name]
    closures = work.attention(
        shape,
        operator.half_steps,
        on_rows=operator.on_rows,
        stored=STORED.get(implementation, ""),
        gradient=gradient,
    )
    if operator.ending is None:
        return closures
    return work.total([closures, work.moments(shape, gradient=gradient)])


def paper(name: str, batch: int, length: int, heads: int, width: int) -> list[Timed]:
    """Rows of the paper's runtime table at one shape: float32, with a model's projections."""
    shape = work.Shape(batch * heads, length, width, 4)
    around = work.projections(shape, batch * length, WIDTH)
    closures = functools.partial(work.attention, shape)
    bank = np.random.default_rng(0).normal(size=(SLICES, width)).astype(np.float32)
    predictor = aj.Predictor(
        (aj.SlicedPotentials(bank),),
        aj.LinearHead(np.full(SLICES, 1 / SLICES, np.float32)),
    )
    sliced = lambda n: functools.partial(
        aj.asap_attention, predictor=predictor, spec=aj.SinkhornSpec(10), closures=n
    )
    by_slices = work.slices(shape, SLICES)
    weights = projection_weights(heads, width)
    rows = {
        "softmax": (layer.softmax_plain, closures(1, on_rows=True)),
        "n=1, rows": (OPERATORS["n=1, rows"].bind("auto", width), least(shape, "n=1, rows", "")),
        "S=20": (OPERATORS["S=20"].bind("auto", width), closures(20, on_rows=False)),
        "S=3": (OPERATORS["S=3"].bind("auto", width), closures(3, on_rows=True)),
        "ASAP-0, 32 slices": (sliced(1), work.total([closures(1, on_rows=False), by_slices])),
        "ASAP, 32 slices": (sliced(3), work.total([closures(3, on_rows=False), by_slices])),
    }
    return [
        Timed(
            {"shape": name, "pass": "forward", "operator": row, "implementation": "auto"},
            projected(function),
            (batch, length, WIDTH),
            "float32",
            work.total([part, around]),
            softmax=row == "softmax",
            num_inputs=1,
            weights=weights,
        )
        for row, (function, part) in rows.items()
    ]


def projected(function: Callable) -> Callable:
    """``function`` between projections, of ``x (batch, length, WIDTH)`` and their weights."""

    def attend(x, into, back):
        q, k, v = (jnp.einsum("bnw,whd->bnhd", x, w) for w in into)
        return jnp.einsum("bnhd,hdw->bnw", function(q, k, v), back)

    return attend


@functools.cache
def projection_weights(heads: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the projections of a model of width 1024, as in the paper's timings."""
    rng = np.random.default_rng(1)
    into = rng.normal(size=(3, WIDTH, heads, width)) / WIDTH**0.5
    back = rng.normal(size=(heads, width, WIDTH)) / (heads * width) ** 0.5
    return into.astype(np.float32), back.astype(np.float32)
