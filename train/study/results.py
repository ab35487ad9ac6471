"""The results of a study, and their tables."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from train.reporting.table import Report, Table

COLUMNS = {
    "rel_l2": ("rel-l2 mean", "{:.4f}"),
    "rel_l2_median": ("rel-l2 median", "{:.4f}"),
    "output_median": ("output median", "{:.4f}"),
    "agreement": ("agree", "{:.3f}"),
    "accuracy": ("accu- racy", "{:.3f}"),
    "plan_kl": ("plan KL", "{:.1e}"),
    "logit_kl": ("logit KL", "{:.1e}"),
    "calls": ("calls", "{:.0f}"),
    "extra_cost": ("extra cost", "{:.2f}"),
}
"""From the name of a column to its heading and format."""
OTHER_ENDING = " *"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The figures of one operator, on one teacher or over the seeds of a group.

    Attributes:
      name: name of the operator.
      family: operators of one family are one curve of the plot.
      closures: passes over the scores: half-steps of Sinkhorn, or closures after a prediction.
      same_ending: whether it ends on the same side as the teacher.
      values: a number for each of ``COLUMNS``, or for a group a ``Spread``.
      chosen: on one teacher, the candidate that the automatic fit chose for each layer.
    """

    name: str
    family: str
    closures: int
    same_ending: bool
    values: dict[str, Any]
    chosen: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name, with a star if the operator does not end on the same side as the teacher."""
        return self.name + ("" if self.same_ending else OTHER_ENDING)


@dataclasses.dataclass(frozen=True)
class TeacherFigures:
    """The figures of one teacher.

    Attributes:
      run: its run folder.
      seed: seed of the run.
      accuracy: accuracy on the whole test split.
      score_std: standard deviation of its active scores, mean over heads, layers and test batches.
      cases: number of test batches times number of layers.
      seconds: time of fitting and measuring.
      rows: the figures of the operators.
    """

    run: str
    seed: int
    accuracy: float
    score_std: float
    cases: int
    seconds: float
    rows: tuple[Measured, ...]

    @classmethod
    def read(cls, plain: dict[str, Any]) -> "TeacherFigures":
        """Rebuilds the figures from the result of ``reporting.table.plain``.

        ``plain`` writes infinities and NaN as text; here they become numbers again.
        """
        numbers = lambda values: {name: float(value) for name, value in values.items()}
        rows = [Measured(**{**row, "values": numbers(row["values"])}) for row in plain["rows"]]
        return cls(**{**plain, "rows": tuple(rows)})


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and range over the seeds of a group."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of ``values``, one for each seed."""
        return cls(float(np.median(values)), float(min(values)), float(max(values)))

    def text(self, form: str) -> str:
        """The median, and the range if the values differ."""
        if self.low == self.high:
            return form.format(self.median)
        return f"{form.format(self.median)} ({self.range(form)})"

    def range(self, form: str) -> str:
        """The lowest and the highest value."""
        return f"{form.format(self.low)}..{form.format(self.high)}"


@dataclasses.dataclass(frozen=True)
class Group:
    """Teachers that differ only in the seed.

    Attributes:
      label: the recipe that they have in common.
      facts: what the figures were measured on.
      lines: the figures of the operators over the seeds.
      teachers: the figures of every seed.
    """

    label: str
    facts: dict[str, str]
    lines: tuple[Measured, ...]
    teachers: tuple[TeacherFigures, ...]


def lines_of(teachers: Sequence[TeacherFigures]) -> tuple[Measured, ...]:
    """Spreads of every operator over the teachers of one group, which have the same rows."""
    lines = []
    for rows in zip(*(teacher.rows for teacher in teachers), strict=True):
        values = {name: Spread.of([row.values[name] for row in rows]) for name in COLUMNS}
        lines.append(dataclasses.replace(rows[0], values=values, chosen={}))
    return tuple(lines)


@dataclasses.dataclass(frozen=True)
class Study:
    """All groups, and the facts that hold for all of them."""

    title: str
    groups: tuple[Group, ...]
    facts: dict[str, str]

    def print(self, console: Any) -> None:
        """Prints one table per group to a rich console: medians, and the range of rel-l2."""
        headings = ["attention", "clo- sures", "rel-l2 mean", "range over seeds"]
        headings += [heading for heading, _ in COLUMNS.values()][1:]
        self._report(headings, _short).print(console, gap=1)

    def write(self, folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes ``study.json``, and ``study.md`` with a range in every column."""
        headings = ["attention", "closures"]
        headings += [heading.replace("- ", "") for heading, _ in COLUMNS.values()]
        return self._report(headings, _long).write(folder, "study")

    def _report(self, headings: list[str], cells: Callable[[Measured], list[str]]) -> Report:
        tables = [
            Table(headings, [cells(line) for line in group.lines], group.label, group.facts)
            for group in self.groups
        ]
        return Report(self.title, tables, self.facts, {"groups": self.groups})


def _short(line: Measured) -> list[str]:
    """Cells of the table on the terminal."""
    form = COLUMNS["rel_l2"][1]
    spread = line.values["rel_l2"]
    seed_range = "-" if spread.low == spread.high else spread.range(form)
    medians = [form.format(line.values[name].median) for name, (_, form) in COLUMNS.items()]
    return [line.label, str(line.closures), medians[0], seed_range, *medians[1:]]


def _long(line: Measured) -> list[str]:
    """Cells of the Markdown table."""
    values = [line.values[name].text(form) for name, (_, form) in COLUMNS.items()]
    return [line.label.replace("*", r"\*"), str(line.closures), *values]
