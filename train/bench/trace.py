"""Where the time of a layer's compiled program goes on a CPU, from JAX's profiler.

Every instruction of the program is assigned to a part of the method, by its shape and by the names
that the library gives (``jax.named_scope``). Its time is the sum of its events in the trace.
Instructions may run at the same time, so the parts can add up to more than the call.
"""

from __future__ import annotations

import pathlib
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from train.bench import layer
from train.bench.measure import SHAPE, SHAPE_FACT, sweep_shape
from train.reporting.table import Report, Table
from train.runtime import machine, timing
from train.runtime.errors import UserError

LENGTHS = (512, 2000)
COMPARED = ("softmax, softmax_attention", "Sinkhorn S=10", "ASAP n=2, moments")
PARTS = {
    "scores": "queries times keys",
    "exponentials": "of all entries",
    "closures": "kernel times vector",
    "values": "kernel times values",
    "prediction": "from moments",
    "moving data": "copies, slices, other layouts",
    "rest": "vectors, norms of queries and keys",
}
_MOVES = {"copy", "transpose", "bitcast", "dynamic-slice", "dynamic-update-slice", "broadcast"}
_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element"}
_NESTING = {"while", "conditional", "call"}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\S+) ([\w\-]+)\(([^)]*)\)(.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")


def parts_of(text: str, length: int) -> dict[str, str]:
    """From the names of a compiled program's instructions to the parts of the method.

    Args:
      text: the program of one attention layer, from ``as_text``.
      length: number of queries and of keys; must differ from the width of a head.
    """
    computations: dict[str, list] = {}
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            current = computations.setdefault(begin[1], [])
        elif instruction := _INSTRUCTION.match(line):
            current.append(instruction.groups())
    result = {}
    for instructions in computations.values():
        shapes = {name: shape for name, shape, *_ in instructions}
        for instruction in instructions:
            name, _, kind, _, rest = instruction
            called = re.search(r"calls=%?([\w.\-]+)", rest)
            if kind in _NESTING | _NO_WORK:
                continue
            if called and called[1] in computations:
                inner = computations[called[1]]
                inner_shapes = {name: shape for name, shape, *_ in inner}
                result[name] = _part([instruction, *inner], inner_shapes, length)
            else:
                result[name] = _part([instruction], shapes, length)
    return result


def _part(instructions, shapes, length: int) -> str:
    kinds = {kind for _, _, kind, _, _ in instructions} - _NO_WORK - {"fusion"}
    names = " ".join(re.findall(r'op_name="([^"]*)"', " ".join(i[-1] for i in instructions)))
    if "/prediction/" in names and not kinds <= _MOVES:
        return "prediction"
    for _, shape, kind, operands, rest in instructions:
        if kind == "dot":
            return _product(shape, shapes.get(_names(operands)[0], ""), rest, length)
    if kinds <= _MOVES:
        return "moving data"
    return "exponentials" if "exponential" in kinds else "rest"


def _product(shape: str, left: str, rest: str, length: int) -> str:
    """The part of the method that a product of this shape and left operand belongs to."""
    *_, rows, columns = _sizes(shape)
    axis = re.search(r"lhs_contracting_dims=\{(\d+)\}", rest)
    summed = _sizes(left)[int(axis[1])] if axis and _sizes(left) else None
    if rows == columns == length:
        return "scores"
    if 1 in (rows, columns) and length in (rows, columns):
        return "closures"
    return "values" if rows == length == summed else "prediction"


def _names(operands: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", operands) or [operands.split(",")[0].strip()]


def _sizes(shape: str) -> list[int]:
    sizes = re.match(r"\(?\w+\[([\d,]+)\]", shape)
    return [int(n) for n in sizes[1].split(",")] if sizes else []


def traced(
    program: Callable, inputs: Sequence[jax.Array], parts: dict[str, str], calls: int
) -> dict[str, float]:
    """Milliseconds per call of each part, and of the whole traced call under ``"call"``."""
    for _ in range(3):
        jax.block_until_ready(program(*inputs))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            for _ in range(calls):
                jax.block_until_ready(program(*inputs))
            whole = 1e3 * (time.perf_counter() - start) / calls
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    nanoseconds: Counter = Counter()
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in parts:
                    nanoseconds[parts[event.name]] += event.duration_ns
    return {"call": whole, **{part: nanoseconds[part] / 1e6 / calls for part in PARTS}}


def run(
    lengths: Iterable[int] = LENGTHS, *, calls: int = 50, out: pathlib.Path | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """Prints a table for each length and writes ``trace.json`` and ``trace.md`` into ``out``.

    Returns:
      From shapes to row names to parts to milliseconds.

    Raises:
      UserError: a length equals the width of a head, or the backend is not a CPU.
    """
    lengths, width = tuple(lengths), SHAPE[-1]
    if width in lengths:
        raise UserError(
            f"bench trace recognises products by their shapes: give --lengths other than {width}, "
            "the width of a head"
        )
    if jax.default_backend() != "cpu":
        raise UserError(f"bench trace works on CPUs only, not on {jax.default_backend()}")
    measured = {}
    for length in lengths:
        shape = sweep_shape(length)
        inputs = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3)]
        like = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 3
        rows = measured.setdefault(f"N={length}", {})
        for name in COMPARED:
            _, program = timing.compiled(layer.methods(width)[name], *like)
            parts = parts_of(program.as_text(), length)
            rows[name] = traced(program, inputs, parts, calls)
    facts = {
        **SHAPE_FACT,
        "time": f"milliseconds per call, mean of {calls} calls, slowed by jax.profiler",
        **machine.facts(),
    }
    tables = [_table(name, rows) for name, rows in measured.items()]
    title = "Where a compiled program's time goes"
    Report(title, tables, facts, {"rows": measured}).print_and_write(out, "trace")
    return measured


def _table(shape: str, rows: dict[str, dict[str, float]]) -> Table:
    names = {"call": "a call", **{part: f"{part} ({what})" for part, what in PARTS.items()}}
    cells = [[name, *(f"{row[part]:.2f}" for row in rows.values())] for part, name in names.items()]
    return Table([f"{shape}, ms", *rows], cells)
