"""The command line ``python -m train`` and its sub-commands."""

import argparse
import functools
import pathlib
import sys

from train import bench
from train.cli import (
    amortize_options,
    baseline_options,
    commands,
    esp_command,
    evaluate_options,
    fit_options,
    table_command,
)
from train.data.tfds import VARIABLE
from train.evaluation import compile_teacher
from train.recipes import catalogue, schema
from train.runtime import devices
from train.runtime.errors import UserError
from train.study import amortized, drift, ideas, refresh, teacher_figures
from train.training import checkpoints, run_folder


def parser() -> argparse.ArgumentParser:
    """The parser with all sub-commands; each sets ``run``, a function of the parsed arguments."""
    top = argparse.ArgumentParser(
        prog="python -m train",
        description="Train Sinkhorn-attention teachers, compile them to loop-free layers, and "
        "measure what that costs and saves.",
        epilog="Start with `python -m train demo`. Every sub-command has its own --help.",
    )
    subs = top.add_subparsers(title="sub-commands", required=True, metavar="COMMAND")
    _add_demo(subs)
    _add_recipes(subs)
    _add_train(subs)
    _add_baseline(subs)
    _add_compile(subs)
    _add_evaluate(subs)
    _add_ablate(subs)
    _add_esp(subs)
    _add_study(subs)
    _add_refresh(subs)
    _add_bench(subs)
    table_command.add(subs)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, or 1 after an error the user can fix."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except UserError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    return 0


def _add_demo(subs) -> None:
    sub = _command(
        subs,
        "demo",
        commands.run_demo,
        "train a small teacher on the packaged images, compile it, print the table",
        f"Trains the demo recipe ({catalogue.DEMO.cost}), compiles it, prints the fidelity table "
        "and writes it, with a picture of one head's plans. Needs no network.",
    )
    _add_seed(sub)
    files = "the checkpoint, table and picture; older ones are replaced"
    _add_out(sub, files, run_folder.DEFAULT / "demo")


def _add_recipes(subs) -> None:
    sub = _command(
        subs,
        "recipes",
        commands.run_recipes,
        "list the recipes with cost and expected accuracy, or the settings of one",
        "Lists the recipes of `python -m train train RECIPE`. With a name it lists every setting "
        "of that recipe, and whether the paper states it, it follows from the data set, or it is "
        "our choice.",
    )
    sub.add_argument("recipe", metavar="RECIPE", nargs="?", help="name of a recipe")


def _add_train(subs) -> None:
    sub = _command(
        subs,
        "train",
        commands.run_train,
        "train the teacher of a recipe",
        "Trains a recipe and writes checkpoints and metrics to a run folder. Ctrl-C saves and "
        "stops. The same command with --resume continues the run and ends with the same "
        "parameters as an uninterrupted run.",
    )
    _add_recipe(sub)
    sub.add_argument(
        "--run", dest="folder", metavar="DIR", help="run folder (default: runs/RECIPE-SEED)"
    )
    _add_seed(sub)
    sub.add_argument("--resume", action="store_true", help="resume the run in the folder")
    override = functools.partial(_add_override, sub)
    family = "attention family; some recipes train softmax and diff at another learning rate"
    override("--attention", family, choices=schema.FAMILIES)
    override("--num-steps", "number of Sinkhorn steps", type=int, metavar="S")
    override("--patch-size", "side of a patch in pixels", type=int, metavar="P")
    override("--length", "texts are cut or padded to this many tokens", type=int, metavar="TOKENS")
    share = "share of the training split, 0 to 1: the first examples of every class"
    override("--train-share", share, type=float, metavar="SHARE")
    override("--epochs", "number of epochs", type=int)
    override("--batch-size", "examples per step", type=int)
    override("--learning-rate", "initial learning rate of Adam", type=float)
    override("--compute-dtype", "bfloat16 means mixed precision", choices=schema.DTYPES)
    parts = "split each batch into PARTS and run them one after the other, to save memory"
    override("--accumulate", parts, type=int, metavar="PARTS")
    evaluate_options.add(sub)
    baseline_options.add(sub)
    amortize_options.add(sub)
    sub.add_argument(
        "--save-every",
        type=_positive,
        metavar="EPOCHS",
        help="epochs between checkpoints (default: 1, or a twentieth of a long run)",
    )
    sub.add_argument(
        "--keep-checkpoints",
        type=_positive,
        default=checkpoints.NUM_KEPT,
        metavar="N",
        help="number of the newest checkpoints to keep, for `compile --accumulate-last` (default: "
        "%(default)s)",
    )
    sub.add_argument(
        "--parallel",
        choices=tuple(devices.WAYS),
        default=devices.Sharded.name,
        help="how a batch is divided among the devices: jit over a mesh of all devices, pmap, or "
        "alone for the first device only (default: %(default)s)",
    )
    _add_hosts(sub)


def _add_baseline(subs) -> None:
    sub = _command(
        subs,
        "baseline",
        commands.run_baseline,
        "print the accuracy of a linear model on a recipe's data",
        "Fits logistic regression to the pixels of an image, or to the set of tokens of a text, on "
        "the training examples of the teacher.",
    )
    _add_recipe(sub)


def _add_recipe(sub) -> None:
    sub.add_argument(
        "recipe", metavar="RECIPE", help=f"one of: {', '.join(sorted(catalogue.RECIPES))}"
    )
    sub.add_argument(
        "--preset",
        choices=schema.PRESETS,
        type=lambda text: schema.OLD_PRESETS.get(text, text),
        help="size (default: paper if the recipe has both)",
    )
    _add_data_dir(sub)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _add_hosts(sub) -> None:
    """Adds the options of a run on several hosts.

    Every host runs the same command with its own ``--process-id``.
    """
    group = sub.add_argument_group("several hosts")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0, or auto on Slurm and TPU pods (default: one process)",
    )
    group.add_argument("--num-processes", type=_positive, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="this process, counted from 0")


def _add_compile(subs) -> None:
    sub = _command(
        subs,
        "compile",
        commands.run_compile,
        "compile a trained teacher to layers without the Sinkhorn loop",
        "Fits the layers on unlabeled training examples, prints a report on held-out examples and "
        f"saves the compiled layers as {run_folder.ARTEFACT} in the run folder.",
    )
    _add_run(sub)
    fit_options.add(sub)
    _add_calibration(sub, "--images", compile_teacher.NUM_IMAGES)
    sub.add_argument(
        "--accumulate-last",
        type=_positive,
        metavar="K",
        help="add up the sums over the newest K checkpoints, each on its part of the examples, and "
        "compare with the fit to the frozen teacher; train with --keep-checkpoints K, and "
        "--save-every 1 for the last K epochs",
    )
    sub.add_argument(
        "--artefact", metavar="FILE", help=f"file to write (default: RUN/{run_folder.ARTEFACT})"
    )
    _add_hosts(sub)


def _add_ablate(subs) -> None:
    sub = _command(
        subs,
        "ablate",
        commands.run_ablate,
        "measure all methods and ablations of the paper on one teacher",
        "Compiles the teacher with every setting in the paper's tables (LS and KL, fit sizes, "
        "slice counts, shared coefficients, other features, both duals without a c-transform, the "
        "residual fit with token bias) and prints one table with break-even points.",
    )
    _add_run(sub)
    _add_rounds(sub, 10)
    _add_out(sub, "ablations.md and .json (default: RUN)")


def _add_esp(subs) -> None:
    sub = _command(
        subs,
        "esp",
        esp_command.run_esp,
        "evaluate one ESP checkpoint softly and with hard sorting",
        "Evaluates a model trained with --attention esp or esp_annealed under three operators: the "
        "soft one that it trained with, the released hard flag, and exact sorting.",
    )
    _add_run(sub)
    _add_rounds(sub, 10)
    _add_out(sub, "esp.md and .json (default: RUN)")


def _add_study(subs) -> None:
    sub = subs.add_parser("study", help="compare operators, or ways to train, over seeds")
    kinds = sub.add_subparsers(dest="what", required=True, metavar="STUDY")
    fidelity = _command(
        kinds,
        "fidelity",
        commands.run_study,
        "compare operators on several teachers and seeds",
        "Measures softmax, Sinkhorn budgets, the paper's ASAP, moments and the automatic fit for "
        "1, 2 and 3 closures, and codebooks for one closure that ends on rows, on every teacher. "
        "It writes medians and ranges over the seeds of a recipe as tables, and plots attention "
        "rel-l2 over closures.",
    )
    _add_study_of_runs(fidelity, teacher_figures.TEST_EXAMPLES, "study.md, .json and .png")
    fidelity.add_argument(
        "--thorough",
        action="store_true",
        help="let the automatic fit also try candidates that take long to fit",
    )
    fidelity.add_argument(
        "--no-auto",
        action="store_true",
        help="leave out the automatic fit, which takes most of the time",
    )
    one_by_one = _command(
        kinds,
        "ideas",
        commands.run_study,
        "change one setting of the fit at a time",
        "Changes one setting of the fit at a time on each teacher, including changes that do not "
        "help.",
    )
    _add_study_of_runs(one_by_one, ideas.TEST_EXAMPLES, "ideas.md and .json")
    _add_study_amortized(kinds)
    _add_study_drift(kinds)


def _add_study_drift(kinds) -> None:
    sub = _command(
        kinds,
        "drift",
        commands.run_study_drift,
        "measure compiled layers on inputs unlike those of their calibration",
        "Compiles a teacher on its own training examples, multiplies its queries by numbers, and "
        "runs it on other inputs: other data sets in the TFDS folder, random tokens or pixels, and "
        "texts of other lengths. It writes the error of the layers, with and without a guard and a "
        "fit to scaled queries, beside Sinkhorn with fewer steps and what diagnose says.",
    )
    _add_run(sub)
    _add_test_examples(sub, drift.TEST_EXAMPLES)
    _add_calibration(sub, "--calibration", compile_teacher.NUM_IMAGES)
    _add_out(sub, "drift.md and .json", run_folder.DEFAULT / "study")


def _add_study_of_runs(sub, test_examples: int, files: str) -> None:
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
    _add_data_dir(sub)
    _add_test_examples(sub, test_examples)
    _add_calibration(sub, "--calibration", compile_teacher.NUM_IMAGES)
    sub.add_argument(
        "--again",
        action="store_true",
        help="measure again, even if a run folder has figures for the same settings",
    )
    _add_out(sub, files, run_folder.DEFAULT / "study")


def _add_study_amortized(kinds) -> None:
    sub = _command(
        kinds,
        "amortized",
        commands.run_study_amortized,
        "compare training through compiled layers with other ways to train",
        "Trains small recipes with the whole Sinkhorn loop, through compiled layers, with fewer "
        "Sinkhorn steps and with softmax, over several seeds. Tests every model with the attention "
        "that it trained through, and with the recipe's Sinkhorn attention in its place. A study "
        "that was stopped continues.",
    )
    names = ", ".join(sorted(catalogue.SMALL))
    sub.add_argument(
        "recipes",
        metavar="RECIPE",
        nargs="*",
        help=f"small presets (default: {' '.join(amortized.RECIPES)}); one of: {names}",
    )
    _add_data_dir(sub)
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
        type=_positive,
        default=amortized.STEPS,
        metavar="N",
        help="steps of a run, rounded to whole epochs (default: %(default)s)",
    )
    sub.add_argument(
        "--every",
        type=_positive,
        default=amortized.EVERY,
        metavar="K",
        help="steps from one refresh to the next (default: %(default)s)",
    )
    _add_test_examples(sub, amortized.TEST_EXAMPLES)
    folder = run_folder.DEFAULT / "amortized"
    sub.add_argument(
        "--runs",
        type=pathlib.Path,
        default=folder,
        metavar="DIR",
        help="folder for the run folders (default: %(default)s)",
    )
    _add_out(sub, "amortized.md and .json", folder)


def _add_test_examples(sub, default: int) -> None:
    text = "largest number of test examples to measure on (default: %(default)s)"
    sub.add_argument("--test-examples", type=_positive, default=default, metavar="N", help=text)


def _add_refresh(subs) -> None:
    sub = _command(
        subs,
        "refresh",
        commands.run_refresh,
        "train compiled models for a few more epochs, and their teachers for comparison",
        "The paper's refresh: compiles with a residual log-sum-exp fit and a token bias, then "
        "trains coefficients, token bias, output projection, norms and classifier on labels. For "
        "comparison, the teacher is trained for the same number of epochs.",
    )
    default = refresh.Settings()
    sub.add_argument(
        "folders",
        metavar="RUN",
        nargs="+",
        type=pathlib.Path,
        help="run folders of `train`: one recipe, several seeds",
    )
    _add_data_dir(sub)
    sub.add_argument(
        "--epochs", type=_positive, default=default.epochs, help="(default: %(default)s)"
    )
    sub.add_argument(
        "--learning-rate", type=float, default=default.learning_rate, help="(default: %(default)s)"
    )
    _add_calibration(sub, "--images", default.num_images)
    sub.add_argument(
        "--num-slices", type=_positive, default=default.num_slices, help="(default: %(default)s)"
    )
    sub.add_argument(
        "--frozen",
        action="store_true",
        help="pass no gradient through the sorts in the features (default: gradients pass)",
    )
    _add_out(sub, "refresh.md and .json (default: the first RUN)")


def _add_bench(subs) -> None:
    lines = "; ".join(f"{name}: {text}" for name, (_, text) in bench.BENCHES.items())
    sub = _command(subs, "bench", commands.run_bench, "measure memory and time", f"{lines}.")
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
    _add_out(sub, "the table as JSON and Markdown (default: write nothing)")


def _add_evaluate(subs) -> None:
    sub = _command(
        subs,
        "evaluate",
        commands.run_evaluate,
        "compare a teacher with its replacements in fidelity and speed",
        "Replaces the attention of the trained model by softmax, by smaller Sinkhorn budgets and, "
        "if they exist, by the compiled layers. Measures accuracy, fidelity and time on the test "
        "split.",
    )
    _add_run(sub)
    sub.add_argument(
        "--artefact",
        metavar="FILE",
        help=f"file of the compiled layers (default: RUN/{run_folder.ARTEFACT} if it exists)",
    )
    _add_rounds(sub, 30)
    _add_out(sub, "fidelity.md and .json (default: RUN)")


def _command(subs, name, run, summary, description) -> argparse.ArgumentParser:
    sub = subs.add_parser(name, help=summary, description=description)
    sub.set_defaults(run=run)
    return sub


def _add_data_dir(sub) -> None:
    sub.add_argument(
        "--data-dir",
        metavar="DIR",
        help=f"TFDS folder of array_record files (default: ${VARIABLE}, else the packaged images)",
    )


def _add_override(sub, flag: str, text: str, **settings) -> None:
    """Adds an option that changes a setting of the recipe."""
    sub.add_argument(flag, help=f"{text} (default: the recipe's)", **settings)


def _add_seed(sub) -> None:
    sub.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")


def _add_calibration(sub, name: str, default: int) -> None:
    text = "unlabeled training examples to fit on (default: %(default)s)"
    sub.add_argument(name, type=_positive, default=default, metavar="N", help=text)


def _add_rounds(sub, default: int) -> None:
    text = "number of timed calls of each row (default: %(default)s)"
    sub.add_argument("--rounds", type=int, default=default, help=text)


def _add_out(sub, files: str, default: pathlib.Path | None = None) -> None:
    text = f"folder for {files}" + (" (default: %(default)s)" if default else "")
    sub.add_argument("--out", type=pathlib.Path, default=default, metavar="DIR", help=text)


def _add_run(sub) -> None:
    sub.add_argument("folder", metavar="RUN", type=pathlib.Path, help="run folder of `train`")
    _add_data_dir(sub)
