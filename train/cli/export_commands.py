"""The sub-commands ``export`` and ``time``: a program for deployment, loaded and timed."""

import argparse
import pathlib

import asap_jax as aj
from train.cli import arguments
from train.evaluation import exported, operators
from train.reporting import progress
from train.runtime import machine
from train.runtime.errors import UserError
from train.training import run_folder
from train.training.teacher import load_teacher

FILE = "compiled.export"


def add(subs) -> None:
    """Adds the sub-commands."""
    _add_export(subs)
    _add_time(subs)


def run_export(options: argparse.Namespace) -> None:
    """Writes the compiled model of a run as one program.

    Raises:
      UserError: the run has no compiled layers.
    """
    trained = load_teacher(options.folder)
    artefact = pathlib.Path(options.artefact or options.folder / run_folder.ARTEFACT)
    if not artefact.exists():
        raise UserError(
            f"no compiled layers at {artefact}: run python -m train compile {options.folder} "
            f"--data-dir DIR"
        )
    variables = aj.load(artefact, like=trained.variables)
    operator = operators.compiled_row("compiled", trained.recipe, variables)
    path = options.out or options.folder / FILE
    program = exported.write(operator, trained.recipe, path, options.platforms)
    screen = progress.console()
    screen.print(exported.described(program), markup=False)
    size = path.stat().st_size / 2**20
    screen.print(f"wrote {path} ({size:.1f} MiB); next: python -m train time {path}", markup=False)


def run_time(options: argparse.Namespace) -> None:
    """Loads an exported program and prints its time."""
    program = exported.read(options.file)
    screen = progress.console()
    screen.print(exported.described(program), markup=False)
    sizes = dict(options.size)
    seconds, milliseconds = exported.measure(program, sizes, options.rounds)
    chosen = {name: sizes.get(name, exported.SIZE) for name in exported.symbols(program)}
    at = ", ".join(f"{name}={size}" for name, size in chosen.items()) or "its only size"
    screen.print(
        f"{milliseconds:.3g} ms a call at {at} (median of {options.rounds}), "
        f"compiled in {seconds:.1f} s",
        markup=False,
    )
    screen.print(machine.line(), markup=False)


def _add_export(subs) -> None:
    sub = arguments.command(
        subs,
        "export",
        run_export,
        "write the compiled model of a run as one program for deployment",
        "Writes the compiled model and its variables with `jax.export`, for a batch of any size. "
        "The file runs with JAX alone, without Flax and asap_jax. Prints the shapes of inputs and "
        "outputs. Takes half a minute for a small model.",
    )
    sub.add_argument("folder", metavar="RUN", type=pathlib.Path, help="run folder of `train`")
    sub.add_argument(
        "--artefact",
        metavar="FILE",
        help=f"file of the compiled layers (default: RUN/{run_folder.ARTEFACT})",
    )
    sub.add_argument(
        "--platforms",
        nargs="+",
        choices=exported.PLATFORMS,
        default=exported.PLATFORMS,
        help=f"platforms to lower for (default: {' '.join(exported.PLATFORMS)})",
    )
    text = f"file to write (default: RUN/{FILE})"
    sub.add_argument("--out", type=pathlib.Path, metavar="FILE", help=text)


def _add_time(subs) -> None:
    sub = arguments.command(
        subs,
        "time",
        run_time,
        "load an exported program and time it",
        "Loads any program that `jax.export` wrote, compiles it for this machine and calls it on "
        "random numbers, or ones for integers. Prints its shapes, the milliseconds of a call and "
        "the seconds of the compilation. Takes the compilation and --rounds calls.",
    )
    sub.add_argument("file", metavar="FILE", type=pathlib.Path, help="exported program")
    sub.add_argument(
        "--size",
        nargs="+",
        type=size,
        default=[],
        metavar="NAME=N",
        help=f"sizes of symbolic axes, such as batch=100 (default: {exported.SIZE} each)",
    )
    arguments.add_rounds(sub, 30)


def size(text: str) -> tuple[str, int]:
    """``NAME=N`` as a pair. Raises ArgumentTypeError for other texts."""
    name, _, number = text.partition("=")
    if not (name.isidentifier() and number.isdecimal() and int(number)):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=N, for example batch=100")
    return name, int(number)
