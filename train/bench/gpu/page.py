"""The page of a run: sections of lines, written again after every line."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from train.bench.gpu.attempts import Outcome
from train.reporting.table import Report, Table

RESULT = "result"


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of the page; its last column says how a line ended.

    Attributes:
      title: its title.
      names: headings of the columns that name a line.
      numbers: headings of its figures.
      about: what the figures mean.
    """

    title: str
    names: Sequence[str]
    numbers: Sequence[str]
    about: str

    @property
    def headings(self) -> tuple[str, ...]:
        """All headings."""
        return (*self.names, *self.numbers, RESULT)


class Page:
    """Lines by section. ``out`` is the folder of its files; None writes nothing."""

    def __init__(self, title: str, sections: Sequence[Section], out: pathlib.Path | None):
        self._title, self._out = title, out
        self.facts: dict[str, str] = {}
        self.lines: dict[str, list[dict[str, Any]]] = {s.title: [] for s in sections}
        self._sections = sections

    def add(self, section: Section, outcome: Outcome) -> None:
        """Prints the line of an outcome, whose value is figures by heading, and writes the page."""
        result = {RESULT: outcome.reason or "ok"}
        line = {**outcome.task.labels, **result, **(outcome.value or {})}
        self.lines[section.title].append(line)
        print(f"{section.title}: {', '.join(filter(None, cells(section, line)))}", flush=True)
        self.write()

    def write(self) -> None:
        """Replaces ``gpu.md`` and ``gpu.json``."""
        if self._out is not None:
            self.report().write(self._out, "gpu")

    def report(self) -> Report:
        """The page as a report."""
        tables = [
            Table(
                section.headings,
                [cells(section, line) for line in self.lines[section.title]],
                title=section.title,
                facts={"figures": section.about},
                num_names=len(section.names),
            )
            for section in self._sections
        ]
        return Report(self._title, tables, self.facts, {"sections": self.lines})


def cells(section: Section, line: Mapping[str, Any]) -> list[str]:
    """The line as text under the section's headings."""
    return [_text(line.get(heading)) for heading in section.headings]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
