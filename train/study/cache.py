"""Stores the figures of a teacher in its run folder, so that the next study can read them."""

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
    """Everything that the figures of a teacher depend on, as JSON values."""
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
    """The figures stored for the same settings; if there are none, measures and stores them.

    Args:
      path: a file in the teacher's run folder.
      settings: see ``settings_of``.
      measure: measures the figures.
      decode: makes the figures from JSON values.
      again: measure even if figures are stored.
    """
    figures = None if again else read(path, settings, decode)
    if figures is None:
        figures = measure()
        write(path, settings, figures)
    return figures


def read(path: pathlib.Path, settings: dict[str, Any], decode: Callable[[Any], Any]) -> Any:
    """The figures stored for the same settings, or None."""
    try:
        stored = json.loads(path.read_text())
        return decode(stored["figures"]) if stored["settings"] == settings else None
    except (OSError, ValueError, KeyError, TypeError):  # missing or incomplete: measure again
        return None


def write(path: pathlib.Path, settings: dict[str, Any], figures: Any) -> None:
    """Stores ``figures``; they replace those in the file."""
    text = json.dumps({"settings": settings, "figures": plain(figures)}, indent=1, allow_nan=False)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text + "\n")
    draft.replace(path)
