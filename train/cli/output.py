"""What the sub-commands read and print in the same way."""

import argparse
import os
import pathlib
from collections.abc import Iterable

from train.reporting import progress
from train.reporting.table import Report
from train.runtime import devices
from train.training.splits import Split, announce, load_data
from train.training.teacher import Teacher, load_teacher


def connect(options: argparse.Namespace) -> None:
    """Connects the hosts that the command line names."""
    devices.connect(options.coordinator, options.num_processes, options.process_id)


def open_run(options: argparse.Namespace) -> tuple[Teacher, Split]:
    """Loads the teacher and the data of a run, and prints which data were read."""
    trained = load_teacher(options.folder)
    split = load_data(trained.recipe, options.data_dir, options.folder)
    announce(split)
    return trained, split


def show(report: Report, out: pathlib.Path, name: str, lines: Iterable[str] = ()) -> None:
    """Prints the tables and then ``lines``, and writes ``NAME.md`` and ``NAME.json``."""
    report.print(progress.console())
    for line in lines:
        print(line)
    print_written(report.write(out, name))


def print_written(paths: Iterable[str | os.PathLike]) -> None:
    """Prints a line for every file that was written."""
    for path in paths:
        print(f"wrote {path}")
