"""The sub-commands that compile a run and measure it."""

import argparse
import dataclasses
import pathlib

import asap_jax as aj
from train.cli import arguments, fit_options, output
from train.evaluation import (
    compile_teacher,
    esp_modes,
    fidelity,
    late_accumulation,
    operators,
)
from train.reporting import progress
from train.runtime import devices
from train.runtime.errors import UserError
from train.training import held_out, run_folder
from train.training.teacher import load_states


def add(subs) -> None:
    """Adds the sub-commands."""
    _add_compile(subs)
    _add_evaluate(subs)
    _add_esp(subs)


def run_compile(options: argparse.Namespace) -> None:
    """Compiles a run's teacher, prints the report, saves the compiled layers."""
    settings = fit_options.read(options)  # reports bad options before the data are read
    output.connect(options)
    trained, split = output.open_run(options)
    settings = dataclasses.replace(settings, seed=trained.seed)
    result = compile_teacher.compile_teacher(
        trained, split.train, settings, num_images=options.images
    )
    late = None
    if options.accumulate_last is not None:
        states = load_states(options.folder, options.accumulate_last)
        late = late_accumulation.compile_late(
            states, trained, split.train, settings, num_images=options.images
        )
    if not devices.is_first():
        return
    print((late or result).report)
    if late is not None:
        name = f"last {options.accumulate_last} checkpoints"
        fits = {name: late.report, "frozen teacher": result.report}
        late_accumulation.comparison(fits).print(progress.console())
        result = late
    path = options.artefact or options.folder / run_folder.ARTEFACT
    aj.save(path, result)
    print(f"saved {path}; next: {arguments.next_command('evaluate', options, options.folder)}")


def run_evaluate(options: argparse.Namespace) -> None:
    """Prints and writes the table that compares a teacher with its replacements."""
    trained, split = output.open_run(options)
    path = pathlib.Path(options.artefact or options.folder / run_folder.ARTEFACT)
    if options.artefact and not path.exists():
        command = arguments.next_command("compile", options, options.folder)
        raise UserError(f"no compiled layers at {path}: run {command}")
    compiled = aj.load(path, like=trained.variables) if path.exists() else None
    more = []
    if trained.compiled is not None:
        more.append(operators.compiled_row("trained through", trained.recipe, trained.compiled))
    table = fidelity.measure(
        trained.recipe,
        trained.variables,
        split.test,
        compiled=compiled,
        more=more,
        rounds=options.rounds,
    )
    output.show(table.report(), options.out or options.folder, "fidelity")


def run_esp(options: argparse.Namespace) -> None:
    """Evaluates one ESP checkpoint under its three operators, and writes the table."""
    trained, split = output.open_run(options)
    recipe = trained.recipe
    kept, _ = held_out.divide(recipe, split.train)
    num_steps = recipe.epochs * (len(kept) // recipe.batch_size)
    rows = esp_modes.measure(trained, split.test, num_steps, rounds=options.rounds)
    report = esp_modes.report(trained, split.test, rows)
    output.show(report, options.out or options.folder, "esp")


def _add_compile(subs) -> None:
    sub = arguments.command(
        subs,
        "compile",
        run_compile,
        "compile a trained teacher to layers without the Sinkhorn loop",
        f"Fits the layers on unlabeled training examples and saves them as {run_folder.ARTEFACT} "
        "in the run folder. Prints a report on held-out examples. Takes a quarter of a minute "
        "for the demo on one CPU core with --fit moments, and one to two minutes a layer on two "
        "cores with --fit auto.",
    )
    arguments.add_run(sub)
    fit_options.add(sub)
    arguments.add_calibration(sub, "--images", compile_teacher.NUM_IMAGES)
    sub.add_argument(
        "--accumulate-last",
        type=arguments.positive,
        metavar="K",
        help="add up the sums over the newest K checkpoints, each on its part of the examples, and "
        "compare with the fit to the frozen teacher; train with --keep-checkpoints K, and "
        "--save-every 1 for the last K epochs",
    )
    sub.add_argument(
        "--artefact", metavar="FILE", help=f"file to write (default: RUN/{run_folder.ARTEFACT})"
    )
    arguments.add_hosts(sub)


def _add_evaluate(subs) -> None:
    sub = arguments.command(
        subs,
        "evaluate",
        run_evaluate,
        "compare a teacher with its replacements in fidelity and speed",
        "Replaces the attention of the trained model by softmax, by smaller Sinkhorn budgets and, "
        "if they exist, by the compiled layers. Prints a table of accuracy, fidelity and time on "
        "the test split. Takes 46 seconds for the demo on one CPU core; more with the test "
        "split, the rows and --rounds.",
    )
    arguments.add_run(sub)
    sub.add_argument(
        "--artefact",
        metavar="FILE",
        help=f"file of the compiled layers (default: RUN/{run_folder.ARTEFACT} if it exists)",
    )
    arguments.add_rounds(sub, 30)
    arguments.add_out(sub, "fidelity.md and .json (default: RUN)")


def _add_esp(subs) -> None:
    sub = arguments.command(
        subs,
        "esp",
        run_esp,
        "evaluate one ESP checkpoint softly and with hard sorting",
        "Evaluates a model trained with --attention esp or esp_annealed under three operators: the "
        "soft one that it trained with, the released hard flag, and exact sorting. Prints a table "
        "of accuracy, changed predictions, marginal errors and time. Takes a pass over the test "
        "split for each operator, and --rounds timed calls.",
    )
    arguments.add_run(sub)
    arguments.add_rounds(sub, 10)
    arguments.add_out(sub, "esp.md and .json (default: RUN)")
