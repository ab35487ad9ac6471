"""The paper's own figures, cell by cell, in the paper's notation.

``published.json`` maps the label of a table to its rows, and a row to its cells. A figure in the
text has the label of its section. A cell is text such as ``"14.14 ± 0.03"``,
``"(1.24 ± 0.15)e-7"``, ``"OOM"`` or ``"--"``.
"""

import functools
import json
import pathlib
import re

FILE = pathlib.Path(__file__).with_name("published.json")
NONE = "--"
_NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


@functools.cache
def tables() -> dict[str, dict[str, dict[str, str]]]:
    """From the label of a table to rows, and from a row to its cells."""
    return json.loads(FILE.read_text())


def cell(label: str, row: str, column: str) -> str:
    """The text of a cell, ``"--"`` where the paper has no such row.

    Raises:
      KeyError: an unknown table, or a row without this column.
    """
    rows = tables()[label]
    return rows[row][column] if row in rows else NONE


def mean(text: str) -> float | None:
    """The mean of a cell, None for a cell without a number.

    ``"(1.24 ± 0.15)e-7"`` is 1.24e-7, and of ``"accuracy / agreement"`` it is the accuracy.
    """
    if scaled := re.match(rf"\(({_NUMBER}) ± {_NUMBER}\)(e-?\d+)", text):
        return float("".join(scaled.groups()))
    found = re.match(_NUMBER, text)
    return float(found.group()) if found else None
