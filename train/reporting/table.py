"""The fidelity table as a value, and its three forms: for the terminal, Markdown and JSON."""

import dataclasses
import json
import pathlib

from train.runtime.errors import need

COLUMNS = {
    "accuracy": ("test accuracy", "{:.3f}"),
    "agreement": ("agreement with teacher", "{:.3f}"),
    "rel_l2": ("attention rel-l2", "{:.3f}"),
    "output_rmse": ("output RMSE", "{:.3f}"),
    "row_error": ("row error", "{:.3f}"),
    "column_error": ("column error", "{:.3f}"),
    "milliseconds": ("ms per batch", "{:.1f}"),
    "ratio": ("time / teacher", "{:.2f}"),
}
"""Field of ``Row``: heading and format."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to run the trained model.

    Attributes:
      name: the operator.
      accuracy: share of test examples classified rightly.
      agreement: share of test examples on which the prediction is the teacher's.
      rel_l2: relative Frobenius distance of the attention weights from the teacher's.
      output_rmse: root mean square difference of the head outputs.
      row_error, column_error: mean distance of the weights' row and column sums from their target.
      milliseconds: one forward pass of the whole model.
      ratio: that over the teacher's.
    """

    name: str
    accuracy: float
    agreement: float
    rel_l2: float
    output_rmse: float
    row_error: float
    column_error: float
    milliseconds: float
    ratio: float

    def cells(self) -> list[str]:
        """The row as texts, name first."""
        return [self.name] + [
            form.format(getattr(self, field)) for field, (_, form) in COLUMNS.items()
        ]


@dataclasses.dataclass(frozen=True)
class Table:
    """A fidelity table.

    Attributes:
      title: what was measured.
      rows: in the order they are printed.
      facts: what it was measured on and with which command.
    """

    title: str
    rows: tuple[Row, ...]
    facts: dict[str, str]

    def row(self, name: str) -> Row:
        """The row of that name (KeyError when there is none)."""
        return {row.name: row for row in self.rows}[name]

    def print(self, console) -> None:
        """Prints it to a rich console."""
        headings = ["attention", *(heading for heading, _ in COLUMNS.values())]
        draw(console, self.title, headings, [row.cells() for row in self.rows])
        for name, fact in self.facts.items():
            console.print(f"{name}: {fact}", markup=False)

    def markdown(self) -> str:
        """The table as Markdown, its facts below it."""
        headings = ["attention", *(heading for heading, _ in COLUMNS.values())]
        lines = [
            f"# {self.title}",
            "",
            *markdown_lines(headings, [row.cells() for row in self.rows]),
            "",
            *(f"- {name}: {fact}" for name, fact in self.facts.items()),
        ]
        return "\n".join(lines) + "\n"

    def write(
        self, folder: pathlib.Path, name: str = "fidelity"
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes ``NAME.md`` and ``NAME.json`` into ``folder`` and returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        text, values = folder / f"{name}.md", folder / f"{name}.json"
        text.write_text(self.markdown())
        values.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        return text, values


def draw(console, title: str, headings: list[str], rows: list[list[str]], *, gap: int = 2) -> None:
    """Prints cells to a rich console, ``gap`` (1 or 2) apart: names, then columns of numbers.

    Nothing is cut off: where the table is wider than the console its lines are longer.
    """
    drawn = need("rich.table").Table(
        title=title,
        title_style="bold",
        box=need("rich.box").SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, gap - 1),
    )
    drawn.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        drawn.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for cells in rows:
        drawn.add_row(*cells)
    unlimited = console.options.update(max_width=10_000)
    needed = need("rich.measure").Measurement.get(console, unlimited, drawn).maximum
    width = console.width
    console.width = max(needed, width)
    console.print(drawn, soft_wrap=False)
    console.width = width


def markdown_lines(headings: list[str], rows: list[list[str]]) -> list[str]:
    """The same as lines of a Markdown table."""
    return [
        f"| {' | '.join(headings)} |",
        f"| --- |{' ---: |' * (len(headings) - 1)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
