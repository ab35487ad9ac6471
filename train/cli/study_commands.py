"""The sub-command ``study``: comparisons over several teachers and seeds."""

import argparse
import pathlib

from train.cli import arguments, output
from train.evaluation import compile_teacher
from train.recipes import catalogue
from train.reporting import progress
from train.study import amortized, drift, fidelity_study, ideas, teacher_figures
from train.training import run_folder


def add(subs) -> None:
    """Adds the sub-command with its kinds."""
    sub = subs.add_parser(
        "study",
        help="compare operators, or ways to train, over seeds",
        description="Prints and writes tables over several run folders or seeds. Takes minutes for "
        "every teacher; a study that was stopped continues.",
    )
    kinds = sub.add_subparsers(dest="what", required=True, metavar="STUDY")
    _add_fidelity(kinds)
    _add_ideas(kinds)
    _add_amortized(kinds)
    _add_drift(kinds)


def run_study(options: argparse.Namespace) -> None:
    """Measures operators on several teachers, prints the tables and writes them with a plot."""
    settings = dict(
        num_images=options.calibration, again=options.again, test_examples=options.test_examples
    )
    if options.what == "fidelity":
        settings |= dict(thorough=options.thorough, auto=not options.no_auto)
    study = {"fidelity": fidelity_study, "ideas": ideas}[options.what]
    measured, paths = study.run(options.folders, options.data_dir, options.out, **settings)
    measured.print(progress.console())
    output.print_written(paths)


def run_amortized(options: argparse.Namespace) -> None:
    """Trains recipes with and without the Sinkhorn loop, prints the tables and writes them."""
    recipes = [catalogue.find(name, "small") for name in options.recipes or amortized.RECIPES]
    report, paths = amortized.run(
        recipes,
        options.data_dir,
        options.out,
        options.runs,
        seeds=options.seeds,
        every=options.every,
        steps=options.steps,
        test_examples=options.test_examples,
    )
    report.print(progress.console())
    output.print_written(paths)


def run_drift(options: argparse.Namespace) -> None:
    """Measures compiled layers on inputs unlike those of their calibration."""
    report, paths = drift.run(
        options.folder,
        options.data_dir,
        options.out,
        test_examples=options.test_examples,
        num_images=options.calibration,
    )
    report.print(progress.console())
    output.print_written(paths)


def _add_fidelity(kinds) -> None:
    sub = arguments.command(
        kinds,
        "fidelity",
        run_study,
        "compare operators on several teachers and seeds",
        "Measures softmax, Sinkhorn budgets, the paper's ASAP, moments and the automatic fit for "
        "1, 2 and 3 closures, and codebooks for one closure that ends on rows, on every teacher. "
        "Prints medians and ranges over the seeds of a recipe as tables, and plots attention "
        "rel-l2 over closures. Takes half a minute to seven minutes a teacher on two CPU cores "
        "(the small presets), most of it for the automatic fit.",
        resume="",
    )
    _add_runs(sub, teacher_figures.TEST_EXAMPLES, "study.md, .json and .png")
    sub.add_argument(
        "--thorough",
        action="store_true",
        help="let the automatic fit also try candidates that take long to fit",
    )
    sub.add_argument(
        "--no-auto",
        action="store_true",
        help="leave out the automatic fit, which takes most of the time",
    )


def _add_ideas(kinds) -> None:
    sub = arguments.command(
        kinds,
        "ideas",
        run_study,
        "change one setting of the fit at a time",
        "Changes one setting of the fit at a time on each teacher, including changes that do not "
        "help. Prints a table of their errors. Takes a fit of every candidate for each number of "
        "closures, layer and teacher.",
        resume="",
    )
    _add_runs(sub, ideas.TEST_EXAMPLES, "ideas.md and .json")


def _add_runs(sub, test_examples: int, files: str) -> None:
    """Adds the options of a study of trained teachers."""
    runs = sub.add_argument(
        "folders",
        metavar="RUN",
        nargs="+",  # unlike "*" it can follow an option
        default=[],
        type=pathlib.Path,
        help="run folders of `train`",
    )
    runs.required = False  # without run folders, the command itself explains what to do
    arguments.add_data_dir(sub)
    arguments.add_test_examples(sub, test_examples)
    arguments.add_calibration(sub, "--calibration", compile_teacher.NUM_IMAGES)
    sub.add_argument(
        "--again",
        action="store_true",
        help="measure again, even if a run folder has figures for the same settings",
    )
    arguments.add_out(sub, files, run_folder.DEFAULT / "study")


def _add_amortized(kinds) -> None:
    sub = arguments.command(
        kinds,
        "amortized",
        run_amortized,
        "compare training through compiled layers with other ways to train",
        "Trains small recipes with the whole Sinkhorn loop, through compiled layers, with fewer "
        "Sinkhorn steps and with softmax, over several seeds. Tests every model with the attention "
        "that it trained through, and with the recipe's Sinkhorn attention in its place. Prints "
        "tables of accuracy, agreement and time. Takes six runs for every recipe and seed, "
        "together 8 minutes (demo) and 13 minutes (ag_news) on one CPU core, without "
        "compilation. A study that was stopped "
        "continues.",
        resume="",
    )
    names = ", ".join(sorted(catalogue.SMALL))
    sub.add_argument(
        "recipes",
        metavar="RECIPE",
        nargs="*",
        help=f"small presets (default: {' '.join(amortized.RECIPES)}); one of: {names}",
    )
    arguments.add_data_dir(sub)
    sub.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=list(amortized.SEEDS),
        metavar="SEED",
        help="seeds of the runs (default: 0 1)",
    )
    sub.add_argument(
        "--steps",
        type=arguments.positive,
        default=amortized.STEPS,
        metavar="N",
        help="steps of a run, rounded to whole epochs (default: %(default)s)",
    )
    sub.add_argument(
        "--every",
        type=arguments.positive,
        default=amortized.EVERY,
        metavar="K",
        help="steps from one refresh to the next (default: %(default)s)",
    )
    arguments.add_test_examples(sub, amortized.TEST_EXAMPLES)
    folder = run_folder.DEFAULT / "amortized"
    sub.add_argument(
        "--runs",
        type=pathlib.Path,
        default=folder,
        metavar="DIR",
        help="folder for the run folders (default: %(default)s)",
    )
    arguments.add_out(sub, "amortized.md and .json", folder)


def _add_drift(kinds) -> None:
    sub = arguments.command(
        kinds,
        "drift",
        run_drift,
        "measure compiled layers on inputs unlike those of their calibration",
        "Compiles a teacher on its own training examples, multiplies its queries by numbers, and "
        "runs it on other inputs: other data sets in the TFDS folder, random tokens or pixels, and "
        "texts of other lengths. Prints the error of the layers, with and without a guard and a "
        "fit to scaled queries, beside Sinkhorn with fewer steps and what diagnose says. Takes a "
        "few minutes on two CPU cores.",
    )
    arguments.add_run(sub)
    arguments.add_test_examples(sub, drift.TEST_EXAMPLES)
    arguments.add_calibration(sub, "--calibration", compile_teacher.NUM_IMAGES)
    arguments.add_out(sub, "drift.md and .json", run_folder.DEFAULT / "study")
