"""Long inputs without a stored kernel: one call, more closures and the Sinkhorn loop in blocks."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable

import asap_jax as aj
from train.bench import layer
from train.bench.measure import SHAPE_FACT, Row, measure, report, sweep_shape

LENGTHS = (8192, 16384)
BASE = "softmax"


def methods(head_dim: int) -> dict[str, Callable]:
    """Row names to attention functions in blocks; softmax has the same form as the others."""
    blocks, spec = dict(implementation="streaming"), aj.SinkhornSpec(10)
    predictor = layer.predictors(head_dim)["moments"].replace(side="key")
    compiled = functools.partial(aj.asap_attention, predictor=predictor, spec=spec, **blocks)
    rows = {
        BASE: functools.partial(aj.softmax_attention, **blocks),
        "one closure, row ending": functools.partial(compiled, closures=1, ending="row"),
        "two closures": functools.partial(compiled, closures=2),
    }
    for steps in (2, 4, 20):
        budget = aj.SinkhornSpec(steps)
        rows[f"Sinkhorn S={steps}"] = functools.partial(
            aj.sinkhorn_attention, spec=budget, **blocks
        )
    return rows


def run(
    lengths: Iterable[int] = LENGTHS, *, rounds: int = 3, out: pathlib.Path | None = None
) -> list[Row]:
    """Prints the table and writes ``long.json`` and ``long.md`` into ``out``."""
    rows = []
    for length in lengths:
        shape = sweep_shape(length)
        operators = methods(shape[-1])
        rows += measure(f"N={length}", shape, operators, rounds=rounds, base=(BASE,))
    time = f"median and quartiles of {rounds} interleaved calls; ratio to softmax in blocks"
    facts = {**SHAPE_FACT, "prediction": "from moments", "time": time}
    report("Long inputs, nothing of size N x N stored", rows, facts).print_and_write(out, "long")
    return rows
