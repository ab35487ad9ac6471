"""What a study measured of a teacher, kept in its run folder for the next one."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from train.study.results import plain

FIDELITY = "study-fidelity.json"
IDEAS = "study-ideas.json"


def read(path: pathlib.Path, settings: dict[str, Any], decode: Callable[[Any], Any]) -> Any:
    """What was measured under the same settings, or None.

    Args:
      path: a file of the teacher's folder.
      settings: everything that decides the figures, as JSON has it.
      decode: from the figures as JSON has them.
    """
    try:
        stored = json.loads(path.read_text())
        return decode(stored["figures"]) if stored["settings"] == settings else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or not whole: measured anew
        return None


def write(path: pathlib.Path, settings: dict[str, Any], figures: Any) -> None:
    """Keeps ``figures``, in place of what was kept before."""
    text = json.dumps({"settings": settings, "figures": plain(figures)}, indent=1, allow_nan=False)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text + "\n")
    draft.replace(path)
