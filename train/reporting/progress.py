"""Progress and time left: a bar on a terminal, plain lines where they are asked for."""

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from typing import Any

import asap_jax as aj
from asap_jax.compiler.progress import Pace, clock
from train.runtime import devices
from train.runtime.errors import need

PLAIN_EVERY = 10.0  # seconds between two plain lines
WIDTH = 100  # columns of output to a file or a pipe
MODES = ("auto", "lines", "none")
"""auto: a bar on a terminal, elsewhere only the log of a training run; lines: a plain line
every few seconds; none: nothing."""
_mode: contextvars.ContextVar[str] = contextvars.ContextVar("train_progress", default="auto")


@contextlib.contextmanager
def shown_as(mode: str) -> Iterator[None]:
    """Shows the progress inside the block as one of ``MODES``, also that of the library."""
    token = _mode.set(mode)
    report = {"lines": _every(PLAIN_EVERY, _print_plainly), "none": None}
    try:
        with aj.progress(report[mode]) if mode in report else contextlib.nullcontext():
            yield
    finally:
        _mode.reset(token)


def console() -> Any:
    """A rich console for the output of the command line."""
    screen = need("rich.console").Console(highlight=False, soft_wrap=True)
    if not screen.is_terminal:
        screen.width = WIDTH
    return screen


@contextlib.contextmanager
def bar(
    title: str, total: int, start: int = 0, *, log: bool = False
) -> Iterator[Callable[[int, str], None]]:
    """Shows how far a loop is and how long it will still take.

    On several hosts only the first one shows it. The library's own progress inside the block is the
    note of the bar.

    Args:
      title: what the loop does.
      total: number of steps.
      start: steps that are already done (a resumed run).
      log: the notes are results, such as a loss: show them as lines where there is no terminal.

    Yields:
      ``report(done, note)``, to be called with the number of steps done and a short text such as
      the loss.
    """
    screen, mode = console(), _mode.get()
    if not devices.is_first() or mode == "none":
        yield lambda done, note="": None
    elif mode == "auto" and (screen.is_terminal or screen.is_jupyter):
        yield from _drawn(screen, title, total, start)
    elif mode == "lines" or log:
        yield _plain(screen, title, total, start)
    else:
        yield lambda done, note="": None


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
        # Two live lines would overwrite each other.
        with aj.progress(lambda inner: progress.update(task, note=str(inner))):
            yield lambda done, note="": progress.update(task, completed=done, note=note)


def _plain(screen, title, total, start):
    began, pace = time.monotonic(), Pace()

    def show(done: int, note: str) -> None:
        left = pace.left(total)
        left = "" if left is None else f", {clock(left)} left"
        elapsed = clock(time.monotonic() - began)
        screen.print(f"{title}: {done}/{total}, {elapsed} elapsed{left}, {note}", markup=False)

    shown = _every(PLAIN_EVERY, show)

    def report(done: int, note: str = "") -> None:
        pace.add(time.monotonic(), done)
        if done < total:
            shown(done, note)
        else:
            show(done, note)

    return report


def _every(seconds: float, function: Callable[..., None]) -> Callable[..., None]:
    """``function``, of whose calls those are left out that come too soon after the one before."""
    last = time.monotonic()

    def limited(*arguments: Any) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            function(*arguments)

    return limited


def _print_plainly(inner: aj.Progress) -> None:
    if devices.is_first():
        console().print(str(inner), markup=False)
