"""The figures of a row over all seeds: means, deviations, medians, and the worst layer."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

import asap_jax as aj
from train.study.paper import fits, rows
from train.study.paper.frozen import METRICS, Frozen, Times
from train.study.paper.rows import Compiled, Row

MISSING = "-"
SMALLEST = 1e-3  # smaller errors are printed in scientific notation


@dataclasses.dataclass(frozen=True)
class Spread:
    """Statistics of some values.

    Attributes:
      mean, std: mean, and the sample standard deviation (0 for one value).
      median: the median.
      count: number of values.
      worst_layer: the largest mean over the cases of one layer; None for values that are not cases.
    """

    mean: float
    std: float
    median: float
    count: int
    worst_layer: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], layers: Sequence[str] | None = None) -> "Spread":
        """The statistics of one or more values; ``layers`` names the layer of each case."""
        x = np.asarray(values, np.float64)
        worst = None
        if layers is not None:
            names = np.asarray(layers)
            worst = max(float(x[names == name].mean()) for name in sorted(set(layers)))
        std = float(x.std(ddof=1)) if len(x) > 1 else 0.0
        return cls(float(x.mean()), std, float(np.median(x)), len(x), worst)

    def text(self, form: str = "", scale: float = 1.0) -> str:
        """``mean ± deviation``; without a format, small values in scientific notation."""
        show = form.format if form else number
        mean = show(self.mean * scale)
        return f"{mean} ± {show(self.std * scale)}" if self.count > 1 else mean


def number(value: float) -> str:
    """Three decimals, or scientific notation for a value that these would hide."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}" if value == 0 else str(value)
    return f"{value:.3f}" if abs(value) >= SMALLEST else f"{value:.2e}"


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of a table over all seeds.

    Attributes:
      name: the row's label.
      published: name of the row in the paper's table.
      calls, passes: softmax attention calls of a layer; half-steps over the scores.
      final_update: the last update.
      num_fit: M, or None for a row without a fit.
      metrics: from a metric to its spread over all cases of all seeds.
      accuracy, agreement: over the seeds; None if they were not measured.
      examples: number of test examples behind them.
      fit_first, fit_warm: seconds of the fit, over the seeds; None without a fit.
      layer, model: milliseconds of all timed calls, None if the row was not timed.
      speedup: time of Sinkhorn with S=3 over that of this row, None without both.
    """

    name: str
    published: str
    calls: int
    passes: int
    final_update: str
    num_fit: int | None
    metrics: dict[str, Spread]
    accuracy: Spread | None = None
    agreement: Spread | None = None
    examples: int | None = None
    fit_first: Spread | None = None
    fit_warm: Spread | None = None
    layer: Spread | None = None
    model: Spread | None = None
    speedup: float | None = None


def line(
    row: Row,
    teachers: Sequence[Frozen],
    spec: aj.SinkhornSpec,
    *,
    score: bool,
    times: Sequence[dict[str, Times]] = (),
    base: str = "Sinkhorn normalizer (S=3)",
) -> Line:
    """Measures a row on all teachers, or reads what was measured.

    Args:
      row: the row.
      teachers: one teacher for each seed.
      spec: their spec.
      score: also measure accuracy and agreement.
      times: the times of all rows on each teacher; empty for no times.
      base: the row to which the speed-up is.
    """
    cases = [teacher.cases(row) for teacher in teachers]
    layers = [path for one in cases for path in one.layers]
    metrics = {
        name: Spread.of([x for one in cases for x in one.values[name]], layers) for name in METRICS
    }
    found: dict = {}
    if score:
        scores = [teacher.score(row) for teacher in teachers]
        for name in ("accuracy", "agreement"):
            found[name] = Spread.of([getattr(one, name) for one in scores])
        found["examples"] = scores[0].examples
    if isinstance(row, Compiled):
        seconds: list[fits.FitTime] = [teacher.fit_time(row) for teacher in teachers]
        found["fit_first"] = Spread.of([one.first for one in seconds])
        found["fit_warm"] = Spread.of([one.warm for one in seconds])
    if times:
        pooled = collections.defaultdict(list)
        for one in times:
            pooled["layer"] += one[row.name].layer
            pooled["model"] += one[row.name].model
            pooled["base"] += one[base].layer if base in one else []
        found["layer"] = Spread.of(pooled["layer"])
        found["model"] = Spread.of(pooled["model"])
        if pooled["base"]:
            found["speedup"] = float(np.mean(pooled["base"])) / found["layer"].mean
    return Line(
        row.name,
        rows.published(row),
        row.calls(spec),
        row.passes(spec),
        row.final_update(spec),
        row.num_fit if isinstance(row, Compiled) else None,
        metrics,
        **found,
    )
