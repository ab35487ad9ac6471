"""Run folders: a run writes its checkpoints, metrics, compiled layers and tables there."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from train.reporting import progress
from train.runtime import devices
from train.runtime.errors import UserError

DEFAULT = pathlib.Path("runs")
METRICS = "metrics.jsonl"
LOCK = "lock"
ARTEFACT = "compiled.npz"


def folder(recipe_name: str, seed: int, chosen: str | os.PathLike | None = None) -> pathlib.Path:
    """The run's folder: ``chosen``, or ``runs/RECIPE-SEED``."""
    return pathlib.Path(chosen) if chosen is not None else DEFAULT / f"{recipe_name}-{seed}"


@contextlib.contextmanager
def locked(run: pathlib.Path) -> Iterator[None]:
    """Keeps every other process from training in ``run``, until the block or the process ends.

    On several hosts the first process holds the lock for all.

    Raises:
      UserError: another process trains in ``run``; in every process of this run.
    """
    with contextlib.ExitStack() as stack:
        taken = False
        if devices.is_first():
            run.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((run / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                taken = True
            except OSError as fault:  # a file system without locks
                progress.console().print(
                    f"cannot lock {run} ({fault.strerror}): do not start a second run in it",
                    markup=False,
                )
        if devices.any_process(taken):
            raise UserError(
                f"another process is training in {run}: wait until it ends, or name another folder "
                f"with --run"
            )
        yield


class MetricsLog:
    """Writes metrics as JSON lines, each with its ``step``, and flushes every line.

    On several hosts only the first one writes.
    """

    def __init__(self, run: pathlib.Path, *, resumed_at: int = 0):
        """Opens ``metrics.jsonl`` in ``run`` and drops lines after step ``resumed_at``."""
        self._file = None
        if not devices.is_first():
            return
        path = run / METRICS
        lines = []
        if path.exists():
            for line in path.read_text().splitlines():
                entry = _parse(line)
                if entry is not None and entry["step"] <= resumed_at:
                    lines.append(line)
        try:
            run.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".tmp")
            draft.write_text("".join(line + "\n" for line in lines))
            draft.replace(path)
            self._file = path.open("a")
        except OSError as fault:  # its own message would name the draft
            raise UserError(f"cannot write {path}: {fault.strerror}") from fault

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_):
        if self._file is not None:
            with contextlib.suppress(OSError):  # write() has already reported a full disk
                self._file.close()

    def write(self, step: int, **values: Any) -> None:
        """Adds one line; raises UserError if it cannot be written."""
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
    """The values of one line, or None if a killed run left the line unfinished."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
