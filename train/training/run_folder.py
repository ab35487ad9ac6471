"""Run folders: where a run writes its checkpoints, metrics, compiled model, tables and pictures."""

import contextlib
import json
import os
import pathlib
from typing import Any

from train.runtime import devices
from train.runtime.errors import UserError

DEFAULT = pathlib.Path("runs")
METRICS = "metrics.jsonl"
ARTEFACT = "compiled.npz"


def folder(recipe_name: str, seed: int, chosen: str | os.PathLike | None = None) -> pathlib.Path:
    """The run's folder: ``chosen``, or ``runs/RECIPE-SEED``."""
    return pathlib.Path(chosen) if chosen is not None else DEFAULT / f"{recipe_name}-{seed}"


class MetricsLog:
    """Metrics as JSON lines, each with its ``step``; flushed line by line.

    Of a run on several hosts only the first writes.
    """

    def __init__(self, run: pathlib.Path, *, resumed_at: int = 0):
        """Opens ``metrics.jsonl`` in ``run``; lines past step ``resumed_at`` are dropped."""
        self._file = None
        if not devices.is_first():
            return
        path = run / METRICS
        lines = []
        if path.exists():
            for line in path.read_text().splitlines():
                with_step = _parse(line)
                if with_step is not None and with_step["step"] <= resumed_at:
                    lines.append(line)
        run.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text("".join(line + "\n" for line in lines))
        draft.replace(path)
        self._file = path.open("a")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_):
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk was reported when a line was written
                self._file.close()

    def write(self, step: int, **values: Any) -> None:
        """Adds one line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as fault:
            raise UserError(
                f"cannot write {self._file.name} ({fault.strerror}): make room and continue with "
                f"--resume"
            ) from fault


def _parse(line: str) -> dict | None:
    """A line of the log, or None for one that a killed run left unfinished."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
