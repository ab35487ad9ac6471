"""The table of a teacher and its replacements."""

import dataclasses

from train.reporting.table import Report, Table

COLUMNS = {
    "calls": ("calls", "{:d}"),
    "accuracy": ("test accuracy", "{:.3f}"),
    "agreement": ("agreement with teacher", "{:.3f}"),
    "rel_l2": ("attention rel-l2", "{:.3f}"),
    "output_rel_l2": ("output rel-l2", "{:.3f}"),
    "output_rmse": ("output RMSE", "{:.3f}"),
    "row_error": ("row error", "{:.3f}"),
    "column_error": ("column error", "{:.3f}"),
    "milliseconds": ("ms per batch", "{:.1f}"),
    "ratio": ("time / teacher", "{:.2f}"),
}
"""From a field of ``Row`` to its heading and format."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to run the trained model.

    Attributes:
      name: name of the operator.
      calls: softmax attention calls of a layer that stores no N x M array.
      accuracy: share of test examples classified correctly.
      agreement: share of test examples on which the prediction is the teacher's.
      rel_l2: relative Frobenius distance of the attention weights from the teacher's.
      output_rel_l2: relative distance of the head outputs from the teacher's.
      output_rmse: root mean square difference of the head outputs.
      row_error, column_error: mean distance of the weights' row and column sums from their target.
      milliseconds: time of one forward pass of the whole model.
      ratio: ``milliseconds`` over those of the teacher.
    """

    name: str
    calls: int
    accuracy: float
    agreement: float
    rel_l2: float
    output_rel_l2: float
    output_rmse: float
    row_error: float
    column_error: float
    milliseconds: float
    ratio: float


@dataclasses.dataclass(frozen=True)
class FidelityTable:
    """The rows of one teacher.

    Attributes:
      title: title of the table.
      rows: the rows, in the order in which they are printed.
      facts: the data, the machine and the command.
    """

    title: str
    rows: tuple[Row, ...]
    facts: dict[str, str]

    def row(self, name: str) -> Row:
        """The row with this name; KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]

    def report(self) -> Report:
        """The table, ready to be printed and written."""
        headings = ["attention", *(heading for heading, _ in COLUMNS.values())]
        cells = [
            [row.name, *(form.format(getattr(row, field)) for field, (_, form) in COLUMNS.items())]
            for row in self.rows
        ]
        return Report(self.title, [Table(headings, cells)], self.facts, {"rows": self.rows})
