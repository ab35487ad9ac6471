"""A teacher's figures, kept in its run folder: a study that was stopped goes on from there."""

import json
import pathlib
from typing import Any

from train.study.table import Measured, TeacherFigures, plain

FILE = "study-fidelity.json"


def read(folder: pathlib.Path, settings: dict[str, Any]) -> TeacherFigures | None:
    """The figures that were measured under the same settings, or None.

    Args:
      folder: the teacher's.
      settings: everything that decides the figures, as JSON has it.
    """
    try:
        stored = json.loads((folder / FILE).read_text())
        if stored["settings"] != settings:
            return None
        figures = stored["figures"]
        rows = [Measured(**{**row, "values": _numbers(row["values"])}) for row in figures["rows"]]
        return TeacherFigures(**{**figures, "run": str(folder), "rows": tuple(rows)})
    except (OSError, ValueError, KeyError, TypeError):  # none, or not whole: measured anew
        return None


def write(folder: pathlib.Path, settings: dict[str, Any], figures: TeacherFigures) -> None:
    """Keeps ``figures``, in place of what was kept before."""
    text = json.dumps({"settings": settings, "figures": plain(figures)}, indent=1, allow_nan=False)
    draft = folder / f"{FILE}.tmp"
    draft.write_text(text + "\n")
    draft.replace(folder / FILE)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """Values with the texts that stand for infinities and NaN as numbers again."""
    return {name: float(value) for name, value in values.items()}
