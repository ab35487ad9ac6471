"""Memory and time of one train step: Sinkhorn at three budgets, and ESP attention.

The shapes are those of the paper's table of train-step scaling with sequence length: batch 1,
8 heads, width 64, 64 slices (the coordinate axes), one attention layer on random inputs. A train
step is the forward pass and the gradient with respect to query, key and value. ESP with the
released hard flag trains with the gradient of soft sorting. ESP with exact sorting is an inference
operator, so only its forward pass is measured. The relaxations have two rows: ``esp_attention``
computes one slice at a time, and the released code keeps the plans of all slices in memory.

Memory is that of the compiled step: arguments, results and temporaries. A step that needs more than
``LIMIT_GIB`` is compiled but not run.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable

import asap_jax as aj
from train.bench.measure import LIMIT_GIB, SHAPE, Row, measure, sweep_shape, value_and_gradients
from train.reporting.table import Report, Table
from train.runtime import machine

LENGTHS = (197, 512, 1000, 2000)
BUDGETS = (3, 10, 20)
ROUNDS = 10
SPEND_SECONDS = 5.0  # limit for one method; a method whose step takes longer is timed once


def methods() -> dict[str, Callable]:
    """From the name of a method to its train step; ESP (exact hard) has only a forward pass."""
    steps = {}
    for budget in BUDGETS:
        attend = functools.partial(aj.sinkhorn_attention, spec=aj.SinkhornSpec(budget))
        steps[f"Sinkhorn (S={budget})"] = value_and_gradients(attend)
    for name, mode in (("soft", "soft"), ("released hard", "hard_released")):
        for suffix, implementation in (("", "streaming"), (", all slices at once", "dense")):
            attend = functools.partial(aj.esp_attention, mode=mode, implementation=implementation)
            steps[f"ESP ({name}){suffix}"] = value_and_gradients(attend)
    forward = functools.partial(aj.esp_attention, mode="hard")
    return steps | {"ESP (exact hard), forward": forward}


def table(rows: Iterable[Row]) -> Table:
    """The table: memory of the whole step, and its time with the number of timed calls."""
    cells = []
    for row in rows:
        time = f"{row.milliseconds:.1f} ({row.calls})" if row.calls else row.reason
        cells.append([row.shape, row.name, f"{row.whole_gibibytes:.2f}", time])
    return Table(["length", "attention", "GiB", "ms (timed calls)"], cells, num_names=2)


def run(
    lengths: Iterable[int] = LENGTHS,
    *,
    limit_gib: float = LIMIT_GIB,
    out: pathlib.Path | None = None,
) -> list[Row]:
    """Prints a table for each length and writes ``esp-resources.json`` and ``.md`` into ``out``."""
    rows = []
    for length in lengths:
        measured = measure(
            f"N={length}",
            sweep_shape(length),
            methods(),
            rounds=ROUNDS,
            limit_gib=limit_gib,
            at_most=SPEND_SECONDS,
        )
        print(table(measured).markdown(), flush=True)
        rows += measured
    batch, heads, width = SHAPE
    facts = {
        "step": f"one train step, batch {batch}, {heads} heads, head_dim {width}, {width} slices, "
        "float32",
        "time": f"median of up to {ROUNDS} calls, at most {SPEND_SECONDS:g} seconds per method",
        **machine.facts(),
    }
    report = Report("Train steps of ESP attention", [table(rows)], facts, {"rows": rows})
    print(report.facts_text())
    if out is not None:
        report.write(out, "esp-resources")
    return rows
