"""The result of one table, and how it is printed and written."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.reporting.figure import save
from train.reporting.table import Report, Table, plain
from train.runtime import machine
from train.study.paper import published


@dataclasses.dataclass(frozen=True)
class Result:
    """One table of the paper with our figures.

    Attributes:
      name: name on the command line.
      label: label of the table or figure in the paper.
      title: one line on what it is.
      tables: the tables to print.
      facts: what the figures were measured on.
      values: the figures as JSON values, for the results page.
      missing: what the paper's table has and this one has not, one sentence each.
      figure: draws the picture, None for no picture.
    """

    name: str
    label: str
    title: str
    tables: Sequence[Table]
    facts: Mapping[str, str]
    values: Mapping[str, Any]
    missing: Sequence[str] = ()
    figure: Callable[[], Any] | None = None

    def report(self, out: pathlib.Path, preset: str, seeds: Sequence[int]) -> Report:
        """The report, with the command, the preset, the seeds, the date and the machine.

        Figures that are in ``NAME.json`` of ``out`` already keep its date, machine and command.
        """
        facts = {
            "paper": f"{self.label}; columns that begin with paper are its own figures",
            "preset": preset,
            "seeds": ", ".join(map(str, seeds)),
            **self.facts,
            "missing": "; ".join(self.missing) or "nothing",
            "date": time.strftime("%Y-%m-%d"),
            **machine.facts(),
        }
        values = {"table": self.name, "label": self.label, "missing": list(self.missing)}
        values |= {"preset": preset, "seeds": list(seeds), **self.values}
        report = Report(self.title, self.tables, facts, values)
        return dataclasses.replace(report, facts=_measured(report, out / f"{self.name}.json"))

    def write(
        self, out: pathlib.Path, preset: str, seeds: Sequence[int]
    ) -> tuple[pathlib.Path, ...]:
        """Writes ``NAME.md`` and ``NAME.json``, and ``NAME.png`` if there is a picture."""
        written = self.report(out, preset, seeds).write(out, self.name)
        if self.figure is None:
            return written
        return (*written, save(self.figure(), out / f"{self.name}.png"))


def _measured(report: Report, path: pathlib.Path) -> Mapping[str, str]:
    """The facts of the file ``path`` if it has the figures of ``report``, else those of ``report``.

    A table that is made again from stored figures was not measured today.
    """
    try:
        stored = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # no such table yet, or a damaged file
        return report.facts
    facts, today = stored.pop("facts", {}), {"date", *machine.facts()}
    others = lambda facts: {name: fact for name, fact in facts.items() if name not in today}
    figures = json.loads(json.dumps(plain({"title": report.title, **report.values})))
    same = stored == figures and others(facts) == others(report.facts)
    return facts if same else report.facts


def beside(label: str, row: str, columns: Sequence[str]) -> list[str]:
    """The paper's cells of a row, for the columns of our table that the paper has."""
    return [published.cell(label, row, column) for column in columns]
