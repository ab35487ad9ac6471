"""Figures of a teacher, stored in its run folder for the next study."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from train.reporting.table import plain
from train.runtime import machine
from train.training.teacher import Teacher

FIDELITY = "study-fidelity.json"
IDEAS = "study-ideas.json"


def settings_of(trained: Teacher, **settings: Any) -> dict[str, Any]:
    """Everything that decides the figures of a teacher, as JSON has it."""
    versions = machine.facts()["versions"]
    return dict(step=trained.step, seed=trained.seed, versions=versions, **settings)


def cached(
    path: pathlib.Path,
    settings: dict[str, Any],
    measure: Callable[[], Any],
    decode: Callable[[Any], Any],
    *,
    again: bool,
) -> Any:
    """The figures stored under the same settings; otherwise measures and stores them.

    Args:
      path: a file in the teacher's folder.
      settings: see ``settings_of``.
      measure: gives the figures.
      decode: from the figures as JSON has them.
      again: measure although there are figures.
    """
    figures = None if again else read(path, settings, decode)
    if figures is None:
        figures = measure()
        write(path, settings, figures)
    return figures


def read(path: pathlib.Path, settings: dict[str, Any], decode: Callable[[Any], Any]) -> Any:
    """The figures stored under the same settings, or None."""
    try:
        stored = json.loads(path.read_text())
        return decode(stored["figures"]) if stored["settings"] == settings else None
    except (OSError, ValueError, KeyError, TypeError):  # missing or incomplete: measure again
        return None


def write(path: pathlib.Path, settings: dict[str, Any], figures: Any) -> None:
    """Stores ``figures`` in place of those stored before."""
    text = json.dumps({"settings": settings, "figures": plain(figures)}, indent=1, allow_nan=False)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text + "\n")
    draft.replace(path)
