"""Memory of tiles and of whole kernels, forward and gradient, and time of the forward pass."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable

import jax.numpy as jnp

import asap_jax as aj
from train.bench import layer
from train.bench.measure import DENSE, SHAPE_FACT, Row, measure, report, sweep_shape

LENGTHS = (1000, 4000, 8000)
LIMIT_GIB = 6.0


def methods() -> dict[str, Callable]:
    """Row names to attention functions; compiled layers start from a zero dual, without cost."""
    rows = {DENSE[0]: layer.softmax_plain, DENSE[1]: layer.softmax_late}
    for closures in (1, 2, 3):
        predictor = aj.Predictor(
            (layer.ZeroFeature(),),
            aj.LinearHead(jnp.zeros(1)),
            side="query" if closures % 2 else "key",
        )
        for how in ("scaling", "streaming"):
            rows[f"{closures} closures, {how}"] = functools.partial(
                aj.asap_attention,
                predictor=predictor,
                spec=aj.SinkhornSpec(num_steps=10),
                closures=closures,
                implementation=how,
            )
    rows["Sinkhorn S=10, streaming"] = functools.partial(
        aj.sinkhorn_attention, spec=aj.SinkhornSpec(num_steps=10), implementation="streaming"
    )
    return rows


def run(
    lengths: Iterable[int] = LENGTHS, *, rounds: int = 3, out: pathlib.Path | None = None
) -> list[Row]:
    """Prints the table and writes ``memory.json`` and ``memory.md`` into ``out``."""
    rows, operators = [], methods()
    for length in lengths:
        for gradient in (False, True):
            rows += measure(
                f"N={length}, {'gradient' if gradient else 'forward'}",
                sweep_shape(length),
                operators,
                rounds=rounds,
                limit_gib=LIMIT_GIB,
                gradient=gradient,
                timed=not gradient,
            )
    time = f"median of {rounds} interleaved calls; ratio to the faster dense softmax"
    facts = {**SHAPE_FACT, "time": time}
    report("Tiles and whole kernels", rows, facts).print_and_write(out, "memory")
    return rows
