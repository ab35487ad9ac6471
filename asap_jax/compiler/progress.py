"""How far a compile is: shown on a terminal or in a notebook, or given to a function.

``Calibration`` opens a ``stage`` for each part of its work and calls ``begin`` before every step.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator

WINDOW = 30.0  # seconds of the past from which the time left is estimated
PATIENCE = 2.0  # seconds of a stage before a terminal shows it
COLUMNS = 100  # longest line


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a compile is, at the start of a step or at the end of a stage.

    Attributes:
      stage: ``"calibrate"`` (the teacher runs on the batches), ``"fit"`` or ``"report"``.
      note: the step that starts, such as a batch, or a layer and a candidate; empty at the end.
      done: steps of the stage that are done.
      total: all its steps, or None if it is not known.
      seconds: time since the stage began.
      left: estimated seconds until its end, or None if there is no estimate yet. Estimated from the
        latest steps, so programs that were compiled in the first ones do not count for long.
    """

    stage: str
    note: str
    done: int
    total: int | None
    seconds: float
    left: float | None

    def __str__(self) -> str:
        """One line, for example ``fit 3/24, 0:41 left: layer 'attention', codebook``."""
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        left = "" if self.left is None else f", {clock(self.left)} left"
        note = f": {self.note}" if self.note else ""
        return f"{self.stage} {count}{left}{note}"


Report = Callable[[Progress], None]
_report: contextvars.ContextVar[Report | None] = contextvars.ContextVar("asap_jax_progress")
_stage: contextvars.ContextVar[_Stage | None] = contextvars.ContextVar(
    "asap_jax_stage", default=None
)


@contextlib.contextmanager
def progress(report: Report | None) -> Iterator[None]:
    """Gives the progress of every compile inside the block to ``report``.

    Without it a compile that takes longer than two seconds shows one line on a terminal (on
    ``sys.stderr``) or in a notebook, and removes it at the end. Nothing is written to a file or a
    pipe.

    Args:
      report: a function of a ``Progress``, such as ``print``; None to show nothing.

    Raises:
      TypeError: ``report`` is neither None nor a function.
    """
    if report is not None and not callable(report):
        raise TypeError(f"report must be a function or None, got {type(report).__name__}")
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


@contextlib.contextmanager
def stage(name: str, total: int | None) -> Iterator[None]:
    """A part of a compile, of ``total`` steps."""
    report = _report.get(_line if _shows_lines() else None)
    token = _stage.set(None if report is None else _Stage(name, total, report))
    try:
        yield
        if (current := _stage.get()) is not None:
            current.end()
    finally:
        _stage.reset(token)
        if report is _line:
            _line.clear()


def begin(note: str) -> None:
    """Says that a step of the current stage starts, and that the one before it is done."""
    current = _stage.get()
    if current is not None:
        current.begin(note)


class Pace:
    """The time that is left, from the latest steps.

    Steps that were done before the first ``add``, and those older than ``WINDOW``, do not count, so
    neither compilation nor skipped steps distort the estimate for long.
    """

    def __init__(self) -> None:
        self._past: collections.deque[tuple[float, int]] = collections.deque()

    def add(self, now: float, done: int) -> None:
        """At the time ``now`` (in seconds), ``done`` steps were done."""
        self._past.append((now, done))
        while len(self._past) > 2 and self._past[1][0] < now - WINDOW:
            self._past.popleft()

    def left(self, total: int | None) -> float | None:
        """Seconds until ``total`` steps are done; None without two points in time."""
        if total is None or len(self._past) < 2 or self._past[-1][1] <= self._past[0][1]:
            return None
        (first, done_first), (last, done) = self._past[0], self._past[-1]
        return (last - first) / (done - done_first) * max(total - done, 0)


class _Stage:
    """Counts the steps of a stage and reports them."""

    def __init__(self, name: str, total: int | None, report: Report):
        self.name, self.total, self.report = name, total, report
        self.began, self.begun, self.pace = time.monotonic(), 0, Pace()

    def begin(self, note: str) -> None:
        self._tell(self.begun, note)
        self.begun += 1

    def end(self) -> None:
        self._tell(self.begun, "")

    def _tell(self, done: int, note: str) -> None:
        now = time.monotonic()
        # The first step compiles the programs that all steps share.
        if done:
            self.pace.add(now, done)
        left = self.pace.left(self.total)
        self.report(Progress(self.name, note, done, self.total, now - self.began, left))


class _Line:
    """One line on ``sys.stderr`` that every report replaces."""

    shown = 0  # characters on the line

    def __call__(self, progress: Progress) -> None:
        if progress.seconds >= PATIENCE:
            text = str(progress)[:COLUMNS]
            self._write(f"\r{text}{' ' * (self.shown - len(text))}")
            self.shown = len(text)

    def clear(self) -> None:
        if self.shown:
            self._write(f"\r{' ' * self.shown}\r")
            self.shown = 0

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


_line = _Line()


def _shows_lines() -> bool:
    """Whether ``sys.stderr`` is a terminal, or the output of a notebook's cell."""
    notebook = type(sys.stderr).__module__.startswith("ipykernel")
    return notebook or bool(getattr(sys.stderr, "isatty", bool)())


def clock(seconds: float) -> str:
    """``minutes:seconds``."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
