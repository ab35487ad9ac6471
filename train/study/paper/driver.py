"""Runs one table, or all of them one after the other."""

import pathlib
import time
import traceback
from collections.abc import Sequence

from train.reporting import progress
from train.runtime.errors import Stopped, UserError
from train.study.paper.catalogue import TABLES, Entry
from train.study.paper.result import Result
from train.study.paper.runs import Models


def run_table(name: str, models: Models, out: pathlib.Path) -> Result:
    """Makes one table, prints it and writes its files.

    Args:
      name: a key of ``TABLES``.
      models: the trained models.
      out: folder for ``NAME.json``, ``NAME.md`` and ``NAME.png``.

    Raises:
      Stopped: Ctrl-C.
    """
    screen = progress.console()
    began = time.perf_counter()

    def report(text: str) -> None:
        elapsed = (time.perf_counter() - began) / 60
        screen.print(f"{name}: {elapsed:.1f} min, {text}", markup=False)

    try:
        result = TABLES[name].make(models, report)
    except (KeyboardInterrupt, Stopped):
        raise Stopped(f"stopped in table {name}") from None
    result.report(out, models.preset.name, models.seeds).print(screen)
    for path in result.write(out, models.preset.name, models.seeds):
        screen.print(f"wrote {path}", markup=False)
    return result


def run_all(models: Models, out: pathlib.Path) -> dict[str, str]:
    """Makes the tables one after the other; one that fails does not stop the others.

    Args:
      models, out: see ``run_table``.

    Returns:
      From the name of a table that failed to the reason.

    Raises:
      Stopped: Ctrl-C.
    """
    screen, names = progress.console(), tuple(TABLES)
    failed: dict[str, str] = {}
    began = time.perf_counter()
    for index, name in enumerate(names):
        left = _left(names[:index], names[index:], (time.perf_counter() - began) / 60, models)
        screen.print(f"table {index + 1} of {len(names)}: {name}{left}", markup=False)
        try:
            run_table(name, models, out)
        except Stopped:
            raise
        except UserError as fault:
            failed[name] = str(fault)
        except Exception as fault:  # the other tables do not depend on this one
            traceback.print_exc()
            failed[name] = f"{type(fault).__name__}: {fault}"
        if name in failed:
            screen.print(f"table {name} failed: {failed[name]}", markup=False)
    return failed


def _left(done: Sequence[str], todo: Sequence[str], minutes: float, models: Models) -> str:
    """The time left, from the estimates of the small preset and the time of the tables so far."""
    if models.preset.name != "small":
        return ""
    expected = sum(TABLES[name].minutes for name in done)
    pace = minutes / expected if expected else 1.0
    return f", about {pace * sum(TABLES[name].minutes for name in todo):.0f} min left"


def listing() -> list[str]:
    """Lines on every table."""
    return [line for name, entry in TABLES.items() for line in _described(name, entry)]


def _described(name: str, entry: Entry) -> list[str]:
    return [
        f"{name}: {entry.summary}",
        f"  trains: {entry.trains}",
        f"  small preset from nothing, on 2 CPU cores: about {entry.minutes:g} min",
    ]
