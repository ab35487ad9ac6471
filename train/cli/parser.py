"""The command line ``python -m train``: the sub-commands, and how a command ends."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from train.cli import (
    bench_command,
    compile_commands,
    export_commands,
    study_commands,
    table_command,
    train_commands,
)
from train.reporting import progress
from train.runtime.errors import Stopped, UserError

FAMILIES = (
    train_commands,
    compile_commands,
    export_commands,
    study_commands,
    bench_command,
    table_command,
)
INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM, as of a shell."""


def parser() -> argparse.ArgumentParser:
    """The parser with all sub-commands.

    Each sets ``run``, a function of the parsed arguments, and ``parser``, its own parser.
    """
    top = argparse.ArgumentParser(
        prog="python -m train",
        description="Train Sinkhorn-attention teachers, compile them to loop-free layers, and "
        "measure what that costs and saves.",
        epilog="Start with `python -m train demo`. Every sub-command has its own --help.",
    )
    subs = top.add_subparsers(title="sub-commands", required=True, metavar="COMMAND")
    for family in FAMILIES:
        family.add(subs)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit status: 0, 1 after an error that the user can fix, 130 after Ctrl-C or SIGTERM.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options, unknown = parser().parse_known_args(words)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with progress.shown_as(options.progress):
            options.run(options)
    except (Stopped, KeyboardInterrupt) as stop:
        what = str(stop) if isinstance(stop, Stopped) else "stopped"
        print(f"{what}; {_hint(options.resume_with, words)}", file=sys.stderr)
        return INTERRUPTED
    except UserError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    except OSError as fault:
        print(f"error: {fault.strerror or fault}: {fault.filename}", file=sys.stderr)
        return 1
    return 0


def _hint(resume_with: str | None, words: Sequence[str]) -> str:
    """The command after a stop: what it needs to continue, or that it starts again."""
    if resume_with is None:
        return f"the same command starts again: {shlex.join(['python', '-m', 'train', *words])}"
    more = [word for word in resume_with.split() if word not in words]
    return f"continue with: {shlex.join(['python', '-m', 'train', *words, *more])}"
