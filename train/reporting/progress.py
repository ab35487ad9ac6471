"""Progress and time left: a bar on a terminal, otherwise a plain line every few seconds."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from train.runtime import devices
from train.runtime.errors import need

PLAIN_EVERY = 10.0  # seconds between two plain lines
WIDTH = 100  # columns of output to a file or a pipe


def console() -> Any:
    """A rich console for the output of the command line."""
    screen = need("rich.console").Console(highlight=False, soft_wrap=True)
    if not screen.is_terminal:
        screen.width = WIDTH
    return screen


@contextlib.contextmanager
def bar(title: str, total: int, start: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Shows how far a loop is and how long it will still take.

    On several hosts only the first one shows it.

    Args:
      title: what the loop does.
      total: number of steps.
      start: steps that are already done (a resumed run).

    Yields:
      ``report(done, note)``, to be called with the number of steps done and a short text such as
      the loss.
    """
    screen = console()
    if not devices.is_first():
        yield lambda done, note="": None
    elif screen.is_terminal:
        yield from _drawn(screen, title, total, start)
    else:
        yield _plain(screen, title, total, start)


def _drawn(screen, title, total, start):
    rich = need("rich.progress")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[note]}"),
    )
    with rich.Progress(*columns, console=screen) as progress:
        task = progress.add_task(title, total=total, completed=start, note="")
        yield lambda done, note="": progress.update(task, completed=done, note=note)


def _plain(screen, title, total, start):
    began = last = time.monotonic()

    def report(done: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < PLAIN_EVERY:
            return
        last = now
        left = (now - began) / max(done - start, 1) * (total - done)
        screen.print(
            f"{title}: {done}/{total}, {_clock(now - began)} elapsed, {_clock(left)} left, {note}"
        )

    return report


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
