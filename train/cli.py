"""The command line, ``python -m train``: one sub-command per thing one runs."""

import argparse
import dataclasses
import pathlib
import sys

import asap_jax as aj
from train import compiling, demo, fidelity, progress, recipes, runs, teacher
from train.data import VARIABLE
from train.extras import UserError


def parser() -> argparse.ArgumentParser:
    """The parser with all sub-commands; each sets ``run``, a function of the parsed arguments."""
    top = argparse.ArgumentParser(
        prog="python -m train",
        description="Train Sinkhorn-attention teachers, compile them to loop-free layers, and "
        "measure what that costs and saves.",
        epilog="Start with `python -m train demo`. Each sub-command explains itself with --help.",
    )
    commands = top.add_subparsers(title="sub-commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_recipes(commands)
    _add_train(commands)
    _add_compile(commands)
    _add_evaluate(commands)
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


def _add_demo(commands) -> None:
    sub = _command(
        commands,
        "demo",
        _demo,
        "train a small teacher on the packaged images, compile it, print the table",
        f"Everything in one go, offline: trains the demo recipe ({recipes.DEMO.cost}), compiles "
        "it, prints the fidelity table and writes it beside a picture of one head's plans.",
    )
    sub.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")
    sub.add_argument(
        "--out",
        type=pathlib.Path,
        default=runs.DEFAULT / "demo",
        help="folder for checkpoint, table and picture; replaced (default: %(default)s)",
    )


def _add_recipes(commands) -> None:
    _command(
        commands,
        "recipes",
        _recipes,
        "list the recipes with cost and expected accuracy",
        "Lists what `python -m train train RECIPE` can train.",
    )


def _add_train(commands) -> None:
    sub = _command(
        commands,
        "train",
        _train,
        "train a teacher by a recipe",
        "Trains a recipe and keeps checkpoints and metrics in a run folder. Ctrl-C saves; the "
        "same command with --resume goes on, to the same parameters as without the stop.",
    )
    sub.add_argument(
        "recipe", metavar="RECIPE", help=f"one of: {', '.join(sorted(recipes.RECIPES))}"
    )
    _add_data_dir(sub)
    sub.add_argument("--run", dest="folder", metavar="DIR", help="default: runs/RECIPE-SEED")
    sub.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")
    sub.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    sub.add_argument(
        "--attention", choices=recipes.FAMILIES, help="attention family (default: the recipe's)"
    )
    sub.add_argument(
        "--num-steps", type=int, metavar="S", help="Sinkhorn steps (default: the recipe's)"
    )
    sub.add_argument("--epochs", type=int, help="epochs (default: the recipe's)")
    sub.add_argument("--batch-size", type=int, help="images a step (default: the recipe's)")
    sub.add_argument("--learning-rate", type=float, help="Adam's (default: the recipe's)")


def _add_compile(commands) -> None:
    sub = _command(
        commands,
        "compile",
        _compile,
        "compile a trained teacher to a layer without the Sinkhorn loop",
        "Fits ASAP-LS on unlabeled training images, prints the report on held-out ones and saves "
        f"the compiled layers as {runs.ARTEFACT} in the run folder.",
    )
    _add_run(sub)
    _add_data_dir(sub)
    sub.add_argument(
        "--num-slices", type=int, default=32, metavar="L", help="slices (default: %(default)s)"
    )
    sub.add_argument(
        "--closures",
        choices=("two_sided", "one_sided"),
        default="two_sided",
        help="two_sided is ASAP, one_sided ASAP-0 (default: %(default)s)",
    )
    sub.add_argument(
        "--ridge", type=float, default=1e-3, help="ridge, unnormalised (default: %(default)s)"
    )
    sub.add_argument(
        "--images",
        type=int,
        default=compiling.NUM_IMAGES,
        help="calibration images (default: %(default)s)",
    )
    sub.add_argument(
        "--artefact", metavar="FILE", help=f"file to write (default: RUN/{runs.ARTEFACT})"
    )


def _add_evaluate(commands) -> None:
    sub = _command(
        commands,
        "evaluate",
        _evaluate,
        "print the fidelity and speed table of a teacher and its replacements",
        "Swaps softmax, smaller Sinkhorn budgets and, where there is one, the compiled layers "
        "into the trained model and measures accuracy, fidelity and time on the test split.",
    )
    _add_run(sub)
    _add_data_dir(sub)
    sub.add_argument(
        "--artefact",
        metavar="FILE",
        help=f"compiled layers (default: RUN/{runs.ARTEFACT} if it is there)",
    )
    sub.add_argument(
        "--rounds", type=int, default=30, help="timed calls of each row (default: %(default)s)"
    )
    sub.add_argument(
        "--out", type=pathlib.Path, help="folder for fidelity.md and .json (default: RUN)"
    )


def _command(commands, name, run, summary, description) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=summary, description=description)
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


def _demo(options) -> None:
    demo.run(options.seed, options.out)


def _recipes(options) -> None:
    screen = progress.console()
    for name in sorted(recipes.RECIPES):
        recipe = recipes.RECIPES[name]
        screen.print(f"[bold]{name}[/bold]: {recipe.summary}")
        screen.print(f"  cost: {recipe.cost}", markup=False)
        screen.print(f"  expected test accuracy: {recipe.expected}", markup=False)


def _train(options) -> None:
    recipe = recipes.find(options.recipe)
    given = {
        name: value
        for name in ("attention", "epochs", "batch_size", "learning_rate")
        if (value := getattr(options, name)) is not None
    }
    if options.num_steps is not None:
        given["spec"] = dataclasses.replace(recipe.spec, num_steps=options.num_steps)
    recipe = dataclasses.replace(recipe, **given)
    folder = runs.folder(recipe.name, options.seed, options.folder)
    split = teacher.load_data(recipe, options.data_dir)
    teacher.announce(split)
    trained = teacher.train(recipe, split.train, folder, seed=options.seed, resume=options.resume)
    score = teacher.test_accuracy(trained, split.test)
    print(f"test accuracy {score:.3f} on {len(split.test)} images")
    if recipe.attention == "sinkhorn":
        print(f"next: python -m train compile {folder}")


def _compile(options) -> None:
    trained = teacher.load(options.folder)
    split = teacher.load_data(trained.recipe, options.data_dir)
    teacher.announce(split)
    result = compiling.compile_teacher(
        trained,
        split.train,
        num_images=options.images,
        num_slices=options.num_slices,
        closures=options.closures,
        ridge=options.ridge,
    )
    print(result.report)
    path = options.artefact or options.folder / runs.ARTEFACT
    aj.save(path, result)
    print(f"saved {path}; next: python -m train evaluate {options.folder}")


def _evaluate(options) -> None:
    trained = teacher.load(options.folder)
    split = teacher.load_data(trained.recipe, options.data_dir)
    teacher.announce(split)
    path = pathlib.Path(options.artefact or options.folder / runs.ARTEFACT)
    if options.artefact and not path.exists():
        raise UserError(
            f"no compiled layers at {path}: run python -m train compile {options.folder}"
        )
    compiled = aj.load(path, like=trained.variables) if path.exists() else None
    table = fidelity.measure(
        trained.recipe, trained.variables, split.test, compiled=compiled, rounds=options.rounds
    )
    table.print(progress.console())
    for written in table.write(options.out or options.folder):
        print(f"wrote {written}")
