"""The sub-commands ``table`` and ``all``: the paper's tables."""

import argparse
import pathlib

from train.cli import arguments
from train.data.tfds import VARIABLE
from train.reporting import progress
from train.runtime.errors import UserError
from train.study.paper import driver, page
from train.study.paper.accuracy import TEXTS
from train.study.paper.catalogue import TABLES, TEXT
from train.study.paper.presets import PRESETS, SEEDS
from train.study.paper.runs import Data, Models
from train.training import run_folder

OUT = pathlib.Path("docs/results/paper")
RUNS = run_folder.DEFAULT / "paper"


def add(subs) -> None:
    """Adds both sub-commands."""
    sub = arguments.command(
        subs,
        "table",
        run_table,
        "make one of the paper's tables",
        "Trains what is missing, measures what is missing, and writes NAME.json, NAME.md and a "
        "plot. A table that was stopped continues there. A table that is made again reads its "
        "figures. Prints the paper's figures beside ours. Takes at most 45 minutes on two CPU "
        "cores for --preset small; --list has the time of each.",
        resume="",
    )
    sub.add_argument(
        "name", nargs="?", metavar="NAME", help=f"one of: {', '.join((*TABLES, TEXT))}"
    )
    sub.add_argument("--dataset", choices=tuple(TEXTS), help=f"the data set of table {TEXT}")
    sub.add_argument("--list", action="store_true", help="say what each table is and costs")
    sub.add_argument(
        "--page", action="store_true", help="write the results page from the tables in --out"
    )
    _add_options(sub)
    minutes = sum(entry.minutes for entry in TABLES.values())
    every = arguments.command(
        subs,
        "all",
        run_all,
        "make all of the paper's tables",
        "Makes all tables one after the other. A table that fails does not stop the others; the "
        "exit status is then 1. The same command continues after a stop. Prints every table, and "
        f"the time left. Takes about {minutes / 60:.0f} hours on two CPU cores for --preset small.",
        resume="",
    )
    _add_options(every)


def _add_options(sub) -> None:
    sub.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="small",
        help="small: at most 45 minutes a table on two CPU cores; paper: the paper's own sizes "
        "(default: %(default)s)",
    )
    sub.add_argument(
        "--data-dir",
        metavar="DIR",
        help=f"TFDS folder of array_record files (default: ${VARIABLE})",
    )
    sub.add_argument(
        "--runs",
        type=pathlib.Path,
        metavar="DIR",
        help=f"folder of the run folders RECIPE-ATTENTION-SEED (default: {RUNS}/PRESET)",
    )
    sub.add_argument(
        "--out",
        type=pathlib.Path,
        default=OUT,
        metavar="DIR",
        help="folder for the tables and the page (default: %(default)s)",
    )
    sub.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=list(SEEDS),
        metavar="SEED",
        help="seeds of the runs (default: 0 1 2)",
    )


def run_table(options: argparse.Namespace) -> None:
    """Makes one table, lists them, or writes the page.

    Raises:
      UserError: no table, an unknown one, or options that do not belong together.
    """
    screen = progress.console()
    chosen = [flag for flag in ("list", "page") if getattr(options, flag)]
    if len(chosen) + (options.name is not None) != 1:
        raise UserError("give one of: a table NAME, --list, --page")
    if options.list:
        for line in driver.listing():
            screen.print(line, markup=False)
    elif options.page:
        screen.print(f"wrote {page.write(options.out)}", markup=False)
    else:
        driver.run_table(_name(options), _models(options), options.out)


def run_all(options: argparse.Namespace) -> None:
    """Makes all tables and the page.

    Raises:
      UserError: some tables failed; the message names them.
    """
    failed = driver.run_all(_models(options), options.out)
    page.write(options.out)
    if failed:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in failed.items())
        raise UserError(f"{len(failed)} of {len(TABLES)} tables failed: {reasons}")


def _name(options: argparse.Namespace) -> str:
    """The table to make."""
    name = options.name
    if name == TEXT:
        if options.dataset is None:
            raise UserError(f"table {TEXT} needs --dataset: one of {', '.join(TEXTS)}")
        return f"{TEXT}_{options.dataset}"
    if options.dataset is not None:
        raise UserError(f"--dataset is for table {TEXT}, not for {name}")
    if name not in TABLES:
        raise UserError(f"no table {name!r}: choose one of {', '.join((*TABLES, TEXT))}")
    return name


def _models(options: argparse.Namespace) -> Models:
    seeds = tuple(dict.fromkeys(options.seeds))
    folder = options.runs or RUNS / options.preset
    return Models(PRESETS[options.preset], folder, seeds, Data(options.data_dir))
