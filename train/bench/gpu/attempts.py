"""Runs tasks under a time budget, so that none of them can end or stop the others."""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

OVER = "not run: the time is over"
LIMIT = 60.0  # seconds for one task
GRACE = 30.0  # seconds that a task may go on after the end of the budget


class Clock:
    """The time budget of a run, which begins now."""

    def __init__(self, minutes: float):
        self._began, self._seconds = time.monotonic(), 60 * minutes

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the budget has passed; negative after that."""
        return self._began + share * self._seconds - time.monotonic()


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Something to try: ``labels`` name it in a table, ``work()`` does it."""

    labels: dict[str, str]
    work: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a task, or the reason why there is none; an empty reason means success."""

    task: Task
    value: Any = None
    reason: str = ""


def attempts(
    tasks: Iterable[Task],
    clock: Clock,
    *,
    share: float = 1.0,
    workers: int = 1,
    limit: float | None = None,
) -> Iterator[Outcome]:
    """The outcome of every task, as they end; those not started come last.

    An exception is an outcome. A task that takes too long is one too, and its thread is left alone.

    Args:
      tasks: started in this order.
      clock: the time budget.
      share: no task is started after this share of it.
      workers: tasks at a time.
      limit: seconds for one task; ``LIMIT`` when None.
    """
    limit = LIMIT if limit is None else limit
    waiting = collections.deque(tasks)
    running: dict[int, tuple[Task, float]] = {}
    done: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
    started = 0
    while True:
        while waiting and len(running) < workers and clock.left(share) > 0:
            task, started = waiting.popleft(), started + 1
            end = time.monotonic() + min(limit, clock.left() + GRACE)
            running[started] = task, end
            work = lambda number, task: done.put((number, _outcome(task)))
            threading.Thread(target=work, args=(started, task), daemon=True).start()
        if not running:
            break
        number, (task, end) = min(running.items(), key=lambda item: item[1][1])
        try:
            number, outcome = done.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            outcome = Outcome(task, reason=f"failed: no result after {limit:g} s")
        if running.pop(number, None):
            yield outcome
    yield from (Outcome(task, reason=OVER) for task in waiting)


def _outcome(task: Task) -> Outcome:
    try:
        return Outcome(task, task.work())
    except Exception as fault:
        return Outcome(task, reason=reason_of(fault))


def reason_of(fault: Exception) -> str:
    """One line about an exception. A ValueError is an implementation that cannot run here."""
    lines = str(fault).strip().splitlines() or [""]
    text = lines[0].replace("|", "/")[:200]
    if isinstance(fault, ValueError):
        return f"cannot run: {text}"
    if isinstance(fault, MemoryError) or "RESOURCE_EXHAUSTED" in str(fault):
        return f"out of memory: {text}"
    return f"failed: {type(fault).__name__}: {text}"
