"""The judgement of a report: is a compiled layer worth it, and what to try if not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

ROWS_PER_COEFFICIENT = 20
"""With fewer regression rows for each coefficient, more calibration data usually help."""
FAR = 0.2
"""A layer with a larger rel-l2 is named at the head of the report and by ``diagnose``."""
Rows = Mapping[str, Mapping[str, float]]


class Verdict(NamedTuple):
    """How one compiled operator compares with Sinkhorn at no more attention calls.

    Attributes:
      operator: its name in the report.
      closer: whether it is closer to the teacher; None if no Sinkhorn has so few calls.
      error: its rel-l2 of the weights, or of the head outputs if it ends on rows.
      rival, rival_error: the closest Sinkhorn with no more calls, and its error.
      enough: the Sinkhorn with the fewest calls among those that are at least as close, or None.
    """

    operator: str
    closer: bool | None
    error: float
    rival: str | None
    rival_error: float
    enough: str | None


def is_budget(name: str) -> bool:
    """Whether a row of a report is Sinkhorn with fewer steps."""
    return name.startswith("Sinkhorn S=")


def is_compiled(name: str) -> bool:
    """Whether a row of a report is a compiled operator."""
    return not name.startswith(("Sinkhorn", "teacher"))


def verdicts(rows: Rows, ending: str) -> list[Verdict]:
    """The verdict on every compiled operator of a layer.

    Args:
      rows: operator name to its figures, see ``LayerReport``.
      ending: of the compiled layer. Layers that end on rows cannot have the weights of a teacher
        that ends on columns, so they are judged by their outputs.
    """
    metric = "output_rel_l2" if ending == "row" else "rel_l2"
    budgets = {name: row for name, row in rows.items() if is_budget(name)}
    found = []
    for name in filter(is_compiled, rows):
        calls, error = rows[name]["calls"], rows[name][metric]
        affordable = {n: row[metric] for n, row in budgets.items() if row["calls"] <= calls}
        rival = min(affordable, key=affordable.__getitem__, default=None)
        rival_error = math.nan if rival is None else affordable[rival]
        closer = None if rival is None else error < rival_error
        good = [n for n, row in budgets.items() if row[metric] <= error]
        enough = min(good, key=lambda n: budgets[n]["calls"], default=None)
        found.append(Verdict(name, closer, error, rival, rival_error, enough))
    return found


def sentence(verdict: Verdict, rows: Rows) -> str:
    """The verdict in plain words."""
    v, calls = verdict, lambda name: f"{rows[name]['calls']:.0f} calls"
    if v.rival is None:
        text = f"{v.operator!r}: no Sinkhorn has so few calls"
    else:
        how = "closer" if v.closer else "NO CLOSER"
        text = (
            f"{v.operator!r} ({calls(v.operator)}) is {how} than {v.rival} ({calls(v.rival)}): "
            f"{v.error:.3g} against {v.rival_error:.3g}"
        )
    if v.enough is not None:
        return f"{text}; {v.enough} ({calls(v.enough)}) is at least as close"
    return f"{text}; no smaller budget listed is as close" if v.closer else text


def advice(fit: Mapping[str, Any], closures: str | int, num_steps: int) -> list[str]:
    """What to try for a layer that is not close enough, the most promising first.

    Args:
      fit: ``LayerReport.fit``.
      closures: of the compiled layer.
      num_steps: of the teacher.
    """
    ways = []
    if fit.get("featureless_queries"):
        ways.append('padding="none" in the fit (padded queries take part in the column sums)')
    paper = fit.get("setting") == "PaperFit"
    if paper:
        ways.append('fit="moments" (the paper\'s fit usually loses more)')
    if fit["num_rows"] < ROWS_PER_COEFFICIENT * fit.get("num_coefficients", 0):
        ways.append("more calibration batches (few rows for each coefficient)")
    number = closures if isinstance(closures, int) else 3
    if not paper and number + 1 < num_steps:
        ways.append(f"closures={number + 1}")
    if not paper and "candidate" not in fit:
        ways.append('fit="auto" (tries richer features)')
    return ways or ["more closures, or leave this layer as it is with layers=[...]"]
