"""The sub-command ``bench``: speed and memory."""

import argparse
import inspect

from train import bench
from train.cli import arguments
from train.runtime.errors import UserError


def add(subs) -> None:
    """Adds the sub-command."""
    lines = "; ".join(f"{name}: {text}" for name, (_, text) in bench.BENCHES.items())
    sub = arguments.command(
        subs,
        "bench",
        run_bench,
        "measure memory and time",
        f"{lines}. Prints a table. Takes minutes; `make bench` runs eight of them in 20 minutes on "
        "two CPU cores, and gpu stops after 11.",
    )
    sub.add_argument("what", choices=tuple(bench.BENCHES))
    sub.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="token counts (default: depends on the benchmark)",
    )
    sub.add_argument(
        "--shapes",
        nargs="*",
        choices=(*bench.layer.NAMED, "sharp"),
        metavar="NAME",
        help=f"further layer shapes: {', '.join(bench.layer.NAMED)}, sharp (default: all)",
    )
    sub.add_argument(
        "--minutes", type=float, help="gpu only: nothing is started after this time (default: 11)"
    )
    arguments.add_out(sub, "the table as JSON and Markdown (default: write nothing)")


def run_bench(options: argparse.Namespace) -> None:
    """Runs one benchmark.

    Raises:
      UserError: an option that this benchmark does not have.
    """
    function, _ = bench.BENCHES[options.what]
    settings = {name: getattr(options, name) for name in ("lengths", "shapes", "minutes", "out")}
    settings = {name: value for name, value in settings.items() if value is not None}
    for name in settings:
        if name not in inspect.signature(function).parameters:
            raise UserError(f"bench {options.what} takes no --{name}")
    function(**settings)
