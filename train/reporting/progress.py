"""Progress with time left: a bar on a terminal, a plain line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from train.runtime import devices
from train.runtime.errors import need

PLAIN_EVERY = 10.0
WIDTH = 100  # of output to a file or a pipe


def console() -> Any:
    """The rich console all output of the command line goes to."""
    screen = need("rich.console").Console(highlight=False, soft_wrap=True)
    if not screen.is_terminal:
        screen.width = WIDTH
    return screen


@contextlib.contextmanager
def bar(title: str, total: int, start: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Shows how far a loop is and how long it will still take.

    Args:
      title: what is going on.
      total: steps in all.
      start: steps done already (a resumed run).

    Of a run on several hosts only the first shows it.

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
            f"{title}: {done}/{total}, {_clock(now - began)} gone, {_clock(left)} left, {note}"
        )

    return report


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
