"""Prints and writes all tables: on a terminal, as Markdown and as JSON."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from train.runtime.errors import need


@dataclasses.dataclass(frozen=True)
class Table:
    """Text cells under headings.

    Attributes:
      headings: one for each column.
      rows: the cells, one for each heading.
      title: printed above the table; empty for no title.
      facts: what this table was measured on; printed below it.
      num_names: the first ``num_names`` columns hold names; the others hold numbers and are aligned
        right.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_names: int = 1

    def markdown(self) -> str:
        """The cells as a Markdown table."""
        numbers = len(self.headings) - self.num_names
        lines = [
            f"| {' | '.join(self.headings)} |",
            f"|{' --- |' * self.num_names}{' ---: |' * numbers}",
            *(f"| {' | '.join(cells)} |" for cells in self.rows),
        ]
        return "\n".join(lines)

    def print(self, console: Any, *, gap: int = 2) -> None:
        """Prints the cells to a rich console, ``gap`` (1 or 2) apart, and the facts.

        A table that is wider than the console is printed with longer lines, so nothing is cut off.
        """
        drawn = need("rich.table").Table(
            title=self.title,
            title_style="bold",
            box=need("rich.box").SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 0, 0, gap - 1),
        )
        for index, heading in enumerate(self.headings):
            if index < self.num_names:
                drawn.add_column(heading, no_wrap=True)
            else:
                drawn.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
        for cells in self.rows:
            drawn.add_row(*cells)
        unlimited = console.options.update(max_width=10_000)
        needed = need("rich.measure").Measurement.get(console, unlimited, drawn).maximum
        width = console.width
        console.width = max(needed, width)
        console.print(drawn, soft_wrap=False)
        console.width = width
        print_facts(console, self.facts)


@dataclasses.dataclass(frozen=True)
class Report:
    """Tables with their facts, and the numbers behind them.

    Attributes:
      title: title of the report.
      tables: in the order in which they are printed.
      facts: what holds for all tables, such as the machine and the command.
      values: contents of the JSON file, in addition to title and facts.
    """

    title: str
    tables: Sequence[Table]
    facts: Mapping[str, str]
    values: Mapping[str, Any]

    def text(self) -> str:
        """The tables as Markdown without the title."""
        parts = []
        for table in self.tables:
            parts += [f"## {table.title}"] if table.title else []
            parts += [table.markdown()]
            parts += [_listed(table.facts)] if table.facts else []
        if any(table.facts for table in self.tables):
            parts.append("## All tables")
        return "\n\n".join([*parts, self.facts_text()])

    def facts_text(self) -> str:
        """The facts as a Markdown list."""
        return _listed(self.facts)

    def print(self, console: Any, *, gap: int = 2) -> None:
        """Prints the tables and the facts to a rich console."""
        for table in self.tables:
            table = table if table.title else dataclasses.replace(table, title=self.title)
            table.print(console, gap=gap)
            if table.facts:
                console.print()
        print_facts(console, self.facts)

    def write(self, folder: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes ``NAME.md`` and ``NAME.json`` into ``folder`` and returns their paths.

        Each file is replaced at once, so a run that is cut off leaves the files of its last write.
        """
        folder.mkdir(parents=True, exist_ok=True)
        text, values = folder / f"{name}.md", folder / f"{name}.json"
        stored = {"title": self.title, **self.values, "facts": self.facts}
        _replace(text, f"# {self.title}\n\n{self.text()}\n")
        _replace(values, json.dumps(plain(stored), indent=1, allow_nan=False) + "\n")
        return text, values

    def print_and_write(self, folder: pathlib.Path | None, name: str) -> None:
        """Prints the tables as Markdown, which does not need rich, and writes them to ``folder``.

        None for ``folder`` writes nothing.
        """
        print(self.text())
        if folder is not None:
            self.write(folder, name)


def _replace(path: pathlib.Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


def print_facts(console: Any, facts: Mapping[str, str]) -> None:
    """Prints a line for each fact."""
    for name, fact in facts.items():
        console.print(f"{name}: {fact}", markup=False)


def _listed(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items())


def plain(value: Any) -> Any:
    """``value`` in a form that JSON can hold.

    Dataclasses become dicts. Infinities and NaN become text, because JSON has no number for them.
    """
    if dataclasses.is_dataclass(value):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
