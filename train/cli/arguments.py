"""Arguments that several sub-commands share, and the hints that name the next command."""

import argparse
import os
import pathlib
import shlex
from collections.abc import Callable

from train.data.tfds import VARIABLE
from train.recipes import catalogue, schema
from train.reporting import progress


def command(
    subs,
    name: str,
    run: Callable[[argparse.Namespace], None],
    summary: str,
    description: str,
    resume: str | None = None,
) -> argparse.ArgumentParser:
    """A new sub-command.

    Args:
      subs: the sub-commands of a parser.
      name: its name.
      run: what it does, a function of the parsed arguments.
      summary: its line in the list of sub-commands.
      description: what it does, what it prints (a sentence with "Prints") and how long it takes
        (one with "Takes").
      resume: what to add to the command to continue after Ctrl-C; None if it starts again.
    """
    sub = subs.add_parser(name, help=summary, description=description)
    sub.set_defaults(run=run, parser=sub, resume_with=resume)
    sub.add_argument(
        "--progress",
        choices=progress.MODES,
        default="auto",
        help="auto: a bar on a terminal, elsewhere only the log of a training run; lines: a plain "
        "line every few seconds; none: nothing (default: %(default)s)",
    )
    return sub


def next_command(name: str, options: argparse.Namespace, run: str | os.PathLike) -> str:
    """``python -m train NAME RUN``, with the ``--data-dir`` that this command was given."""
    words = ["python", "-m", "train", name, os.fspath(run)]
    if options.data_dir is not None:
        words += ["--data-dir", options.data_dir]
    return shlex.join(words)


def positive(text: str) -> int:
    """An integer of at least 1. Raises ArgumentTypeError for a smaller one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def add_recipe(sub) -> None:
    """Adds ``RECIPE``, ``--preset`` and ``--data-dir``."""
    sub.add_argument(
        "recipe", metavar="RECIPE", help=f"one of: {', '.join(sorted(catalogue.RECIPES))}"
    )
    sub.add_argument(
        "--preset",
        choices=schema.PRESETS,
        type=lambda text: schema.OLD_PRESETS.get(text, text),
        help="size (default: paper if the recipe has both)",
    )
    add_data_dir(sub)


def add_run(sub) -> None:
    """Adds ``RUN`` and ``--data-dir``."""
    sub.add_argument("folder", metavar="RUN", type=pathlib.Path, help="run folder of `train`")
    add_data_dir(sub)


def add_data_dir(sub) -> None:
    """Adds ``--data-dir``."""
    sub.add_argument(
        "--data-dir",
        metavar="DIR",
        help=f"TFDS folder of array_record files (default: ${VARIABLE}, else the packaged images)",
    )


def add_seed(sub) -> None:
    """Adds ``--seed``."""
    sub.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")


def add_calibration(sub, name: str, default: int) -> None:
    """Adds the number of calibration examples, as the option ``name``."""
    text = "unlabeled training examples to fit on (default: %(default)s)"
    sub.add_argument(name, type=positive, default=default, metavar="N", help=text)


def add_test_examples(sub, default: int) -> None:
    """Adds ``--test-examples``."""
    text = "largest number of test examples to measure on (default: %(default)s)"
    sub.add_argument("--test-examples", type=positive, default=default, metavar="N", help=text)


def add_rounds(sub, default: int) -> None:
    """Adds ``--rounds``."""
    text = "number of timed calls of each row (default: %(default)s)"
    sub.add_argument("--rounds", type=positive, default=default, help=text)


def add_out(sub, files: str, default: pathlib.Path | None = None) -> None:
    """Adds ``--out``, the folder for ``files``."""
    text = f"folder for {files}" + (" (default: %(default)s)" if default else "")
    sub.add_argument("--out", type=pathlib.Path, default=default, metavar="DIR", help=text)


def add_hosts(sub) -> None:
    """Adds the options of a run on several hosts.

    Every host runs the same command with its own ``--process-id``.
    """
    group = sub.add_argument_group("several hosts")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0, or auto on Slurm and TPU pods (default: one process)",
    )
    group.add_argument("--num-processes", type=positive, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="this process, counted from 0")
