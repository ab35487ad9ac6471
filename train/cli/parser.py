"""The command line, ``python -m train``: one sub-command per thing one runs."""

import argparse
import pathlib
import sys

import asap_jax as aj
from train import bench, study
from train.cli import commands
from train.data.images import VARIABLE
from train.evaluation import compile_teacher
from train.recipes import catalogue, schema
from train.runtime import devices
from train.runtime.errors import UserError
from train.study import ideas
from train.training import refresh, run_folder


def parser() -> argparse.ArgumentParser:
    """The parser with all sub-commands; each sets ``run``, a function of the parsed arguments."""
    top = argparse.ArgumentParser(
        prog="python -m train",
        description="Train Sinkhorn-attention teachers, compile them to loop-free layers, and "
        "measure what that costs and saves.",
        epilog="Start with `python -m train demo`. Each sub-command explains itself with --help.",
    )
    subs = top.add_subparsers(title="sub-commands", required=True, metavar="COMMAND")
    _add_demo(subs)
    _add_recipes(subs)
    _add_train(subs)
    _add_baseline(subs)
    _add_compile(subs)
    _add_evaluate(subs)
    _add_ablate(subs)
    _add_study(subs)
    _add_refresh(subs)
    _add_bench(subs)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, or 1 after a fault the user can mend."""
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
        commands.demo,
        "train a small teacher on the packaged images, compile it, print the table",
        f"Everything in one go, offline: trains the demo recipe ({catalogue.DEMO.cost}), compiles "
        "it, prints the fidelity table and writes it beside a picture of one head's plans.",
    )
    sub.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")
    sub.add_argument(
        "--out",
        type=pathlib.Path,
        default=run_folder.DEFAULT / "demo",
        help="folder for checkpoint, table and picture; replaced (default: %(default)s)",
    )


def _add_recipes(subs) -> None:
    _command(
        subs,
        "recipes",
        commands.recipes,
        "list the recipes with cost and expected accuracy",
        "Lists what `python -m train train RECIPE` can train.",
    )


def _add_train(subs) -> None:
    sub = _command(
        subs,
        "train",
        commands.train,
        "train a teacher by a recipe",
        "Trains a recipe and keeps checkpoints and metrics in a run folder. Ctrl-C saves; the "
        "same command with --resume goes on, to the same parameters as without the stop.",
    )
    _add_recipe(sub)
    _add_data_dir(sub)
    sub.add_argument("--run", dest="folder", metavar="DIR", help="default: runs/RECIPE-SEED")
    sub.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")
    sub.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    sub.add_argument(
        "--attention", choices=catalogue.FAMILIES, help="attention family (default: the recipe's)"
    )
    sub.add_argument(
        "--num-steps", type=int, metavar="S", help="Sinkhorn steps (default: the recipe's)"
    )
    sub.add_argument(
        "--patch-size",
        type=int,
        metavar="P",
        help="side of a patch in pixels (default: the recipe's)",
    )
    sub.add_argument(
        "--length", type=int, metavar="TOKENS", help="tokens kept of a text (default: the recipe's)"
    )
    sub.add_argument("--epochs", type=int, help="epochs (default: the recipe's)")
    sub.add_argument("--batch-size", type=int, help="examples a step (default: the recipe's)")
    sub.add_argument("--learning-rate", type=float, help="Adam's (default: the recipe's)")
    sub.add_argument(
        "--compute-dtype",
        choices=schema.DTYPES,
        help="bfloat16 is mixed precision (default: the recipe's)",
    )
    sub.add_argument(
        "--accumulate",
        type=int,
        metavar="PARTS",
        help="parts of a batch that go through one by one, to save memory (default: the recipe's)",
    )
    sub.add_argument(
        "--save-every",
        type=_positive,
        metavar="EPOCHS",
        help="epochs between checkpoints (default: 1, or a twentieth of the run)",
    )
    sub.add_argument(
        "--parallel",
        choices=tuple(devices.WAYS),
        default=devices.Sharded.name,
        help="how all devices share a batch: jit over a mesh, or pmap (default: %(default)s)",
    )
    _add_hosts(sub)


def _add_baseline(subs) -> None:
    sub = _command(
        subs,
        "baseline",
        commands.baseline,
        "print the accuracy of a linear model on a recipe's data",
        "Logistic regression on the pixels, or on which tokens a text holds, fitted to the same "
        "training examples that the teacher gets.",
    )
    _add_recipe(sub)
    _add_data_dir(sub)


def _add_recipe(sub) -> None:
    sub.add_argument(
        "recipe", metavar="RECIPE", help=f"one of: {', '.join(sorted(catalogue.RECIPES))}"
    )
    sub.add_argument(
        "--preset", choices=catalogue.PRESETS, help="size (default: full where there is both)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _add_hosts(sub) -> None:
    """A run of several processes: the same command in each, with its own ``--process-id``."""
    group = sub.add_argument_group("several hosts")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0; auto where the cluster tells JAX (default: one process)",
    )
    group.add_argument("--num-processes", type=_positive, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I", help="from 0")


def _add_compile(subs) -> None:
    sub = _command(
        subs,
        "compile",
        commands.compile,
        "compile a trained teacher to a layer without the Sinkhorn loop",
        "Fits the layers on unlabeled training images, prints the report on held-out ones and "
        f"saves the compiled layers as {run_folder.ARTEFACT} in the run folder.",
    )
    _add_run(sub)
    _add_data_dir(sub)
    _add_fit(sub)
    sub.add_argument(
        "--images",
        type=int,
        default=compile_teacher.NUM_IMAGES,
        help="calibration images (default: %(default)s)",
    )
    sub.add_argument(
        "--artefact", metavar="FILE", help=f"file to write (default: RUN/{run_folder.ARTEFACT})"
    )
    _add_hosts(sub)


def _add_fit(sub) -> None:
    """The settings of a fit, see ``asap_jax.Options``."""
    default = aj.Options()
    families = sorted(n for n, kind in aj.features.FAMILIES.items() if hasattr(kind, "create"))
    text = "(default: %(default)s)"
    sub.add_argument(
        "--recipe",
        choices=("paper", "auto"),
        default=default.recipe,
        help=f"auto chooses among moment and codebook fits on held-out batches {text}",
    )
    sub.add_argument(
        "--objective",
        choices=("ls", "kl"),
        default=default.objective,
        help=f"ls is ASAP-LS, kl ASAP-KL {text}",
    )
    sub.add_argument(
        "--closures",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="ENDING",
        help="two_sided is ASAP, one_sided ASAP-0, n closures end as the teacher does, "
        "none predicts both duals without a c-transform (default: two_sided; auto: 2)",
    )
    sub.add_argument(
        "--features",
        default=default.features,
        help=f"families joined by +, of {', '.join(families)} {text}",
    )
    sub.add_argument(
        "--num-slices",
        type=int,
        default=default.num_slices,
        metavar="L",
        help=f"slices {text}",
    )
    sub.add_argument(
        "--slice-kind",
        choices=("gaussian", "orthogonal", "axes"),
        default=default.slice_kind,
        help=f"slice directions {text}",
    )
    sub.add_argument(
        "--coefficients",
        choices=("pooled", "per_head", "shared"),
        default=default.coefficients,
        help=f"pooled over heads, per head, or shared by all layers {text}",
    )
    sub.add_argument(
        "--baseline",
        choices=("none", "first_step"),
        default=default.baseline,
        help=f"first_step fits the residual to the first row step {text}",
    )
    sub.add_argument("--token-bias", action="store_true", help="fit one bias per token position")
    sub.add_argument(
        "--ridge", type=float, default=default.ridge, help=f"ridge, unnormalised {text}"
    )
    sub.add_argument(
        "--ridge-scale",
        choices=("absolute", "trace", "diagonal"),
        default=default.ridge_scale,
        help=f"what the ridge is multiplied by {text}",
    )
    sub.add_argument(
        "--padding",
        choices=("self", "none"),
        default=default.padding,
        help="self: active tokens carry features; none: padded queries in the closures do too "
        "(default: the layer's own spec)",
    )


def _add_ablate(subs) -> None:
    sub = _command(
        subs,
        "ablate",
        commands.ablate,
        "print every method and ablation row of the paper on one teacher",
        "Compiles the teacher in every way of the paper's tables (LS and KL, fit sizes, slice "
        "counts, shared coefficients, other features, both duals without a c-transform, the "
        "residual fit with token bias) and prints one table with break-even points.",
    )
    _add_run(sub)
    _add_data_dir(sub)
    sub.add_argument(
        "--rounds", type=int, default=10, help="timed calls of each row (default: %(default)s)"
    )
    sub.add_argument(
        "--out", type=pathlib.Path, help="folder for ablations.md and .json (default: RUN)"
    )


def _add_study(subs) -> None:
    sub = _command(
        subs,
        "study",
        commands.study,
        "measure operators side by side on several teachers and seeds",
        "fidelity: softmax, Sinkhorn budgets, the paper's ASAP, moments and the automatic recipe "
        "for 1, 2 and 3 closures on every teacher; medians and ranges over the seeds of a recipe, "
        "as tables and as a plot of attention rel-l2 over closures. ideas: one change of the fit "
        "at a time on each teacher, those that do not help too.",
    )
    sub.add_argument("what", choices=("fidelity", "ideas"))
    runs_given = sub.add_argument(
        "folders",
        metavar="RUN",
        nargs="+",  # unlike "*" it can follow an option
        default=[],
        type=pathlib.Path,
        help="run folders of `train`",
    )
    runs_given.required = False  # the command says what to do without any
    _add_data_dir(sub)
    sub.add_argument(
        "--test-examples",
        type=_positive,
        metavar="N",
        help=f"test examples to measure on, at most (default: {study.TEST_EXAMPLES}, of ideas "
        f"{ideas.TEST_EXAMPLES})",
    )
    sub.add_argument(
        "--calibration",
        type=_positive,
        default=compile_teacher.NUM_IMAGES,
        metavar="N",
        help="training examples to fit on (default: %(default)s)",
    )
    sub.add_argument(
        "--thorough",
        action="store_true",
        help="fidelity: let the automatic recipe try the candidates that take long to fit too",
    )
    sub.add_argument(
        "--again",
        action="store_true",
        help="measure anew where a run folder keeps figures of the same settings too",
    )
    sub.add_argument(
        "--out",
        type=pathlib.Path,
        default=run_folder.DEFAULT / "study",
        help="folder for study.md, .json and .png, or ideas.md and .json (default: %(default)s)",
    )


def _add_refresh(subs) -> None:
    sub = _command(
        subs,
        "refresh",
        commands.refresh,
        "train a compiled model on a little, beside the teacher trained on as long",
        "The paper's refresh: compiles with a residual log-sum-exp fit and a token bias, then "
        "trains coefficients, token bias, output projection, norms and classifier on labels; the "
        "control trains the teacher for as many epochs.",
    )
    _add_run(sub)
    _add_data_dir(sub)
    sub.add_argument("--epochs", type=int, default=refresh.EPOCHS, help="(default: %(default)s)")
    sub.add_argument(
        "--learning-rate", type=float, default=refresh.LEARNING_RATE, help="(default: %(default)s)"
    )
    sub.add_argument(
        "--images", type=int, default=8192, help="calibration images (default: %(default)s)"
    )
    sub.add_argument("--num-slices", type=int, default=256, help="(default: %(default)s)")
    sub.add_argument(
        "--sort-gradients",
        action="store_true",
        help="let almost-everywhere sort gradients flow through the features (default: frozen)",
    )


def _add_bench(subs) -> None:
    lines = "; ".join(f"{name}: {text}" for name, (_, text) in bench.BENCHES.items())
    sub = _command(subs, "bench", commands.bench, "measure memory and time", f"{lines}.")
    sub.add_argument("what", choices=tuple(bench.BENCHES))
    sub.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="token counts (default: the benchmark's)",
    )
    sub.add_argument(
        "--shapes",
        nargs="*",
        choices=(*bench.layer.NAMED, "sharp"),
        metavar="NAME",
        help=f"further shapes of layer: {', '.join(bench.layer.NAMED)}, sharp (default: all)",
    )
    sub.add_argument(
        "--out", type=pathlib.Path, help="folder for the table as JSON and Markdown (default: none)"
    )


def _add_evaluate(subs) -> None:
    sub = _command(
        subs,
        "evaluate",
        commands.evaluate,
        "print the fidelity and speed table of a teacher and its replacements",
        "Swaps softmax, smaller Sinkhorn budgets and, where there is one, the compiled layers "
        "into the trained model and measures accuracy, fidelity and time on the test split.",
    )
    _add_run(sub)
    _add_data_dir(sub)
    sub.add_argument(
        "--artefact",
        metavar="FILE",
        help=f"compiled layers (default: RUN/{run_folder.ARTEFACT} if it is there)",
    )
    sub.add_argument(
        "--rounds", type=int, default=30, help="timed calls of each row (default: %(default)s)"
    )
    sub.add_argument(
        "--out", type=pathlib.Path, help="folder for fidelity.md and .json (default: RUN)"
    )


def _command(subs, name, run, summary, description) -> argparse.ArgumentParser:
    sub = subs.add_parser(name, help=summary, description=description)
    sub.set_defaults(run=run)
    return sub


def _add_data_dir(sub) -> None:
    sub.add_argument(
        "--data-dir",
        metavar="DIR",
        help=f"TFDS folder, array_record form (default: ${VARIABLE}, else the packaged images)",
    )


def _add_run(sub) -> None:
    sub.add_argument("folder", metavar="RUN", type=pathlib.Path, help="run folder of `train`")
