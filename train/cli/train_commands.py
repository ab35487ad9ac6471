"""The sub-commands that train: ``demo``, ``recipes``, ``train``, ``baseline`` and ``refresh``."""

import argparse
import functools
import pathlib

from train.cli import (
    amortize_options,
    arguments,
    baseline_options,
    demo,
    evaluate_options,
    output,
    recipe_options,
)
from train.evaluation import put_in
from train.recipes import catalogue, schema
from train.recipes.presets import settings_table
from train.recipes.schema import Recipe
from train.reporting import progress
from train.runtime import devices
from train.study import refresh
from train.training import checkpoints, linear_baseline, loop, run_folder
from train.training.splits import announce, load_data
from train.training.teacher import accuracy_on


def add(subs) -> None:
    """Adds the sub-commands."""
    _add_demo(subs)
    _add_recipes(subs)
    _add_train(subs)
    _add_baseline(subs)
    _add_refresh(subs)


def run_demo(options: argparse.Namespace) -> None:
    """Runs the demo without network access."""
    demo.run(options.seed, options.out)


def run_recipes(options: argparse.Namespace) -> None:
    """Lists the recipes, or all settings of one with their sources."""
    screen = progress.console()
    one = None if options.recipe is None else catalogue.presets(options.recipe)
    for recipe in catalogue.listed() if one is None else one.recipes():
        screen.print(f"[bold]{recipe.name} ({recipe.preset})[/bold]: {recipe.summary}")
        screen.print(f"  cost: {recipe.cost}", markup=False)
        screen.print(f"  expected test accuracy: {recipe.expected}", markup=False)
        if one is not None:
            settings_table(one, recipe).print(screen)


def run_train(options: argparse.Namespace) -> None:
    """Trains a teacher and prints its test accuracy."""
    recipe = recipe_options.read(options)
    output.connect(options)
    folder = run_folder.folder(recipe.name, options.seed, options.folder)
    split = load_data(recipe, options.data_dir, folder)
    if devices.is_first():
        progress.console().print(announced(recipe), markup=False)
    announce(split)
    trained = loop.train(
        recipe,
        split.train,
        folder,
        seed=options.seed,
        resume=options.resume,
        save_every=options.save_every,
        keep_checkpoints=options.keep_checkpoints,
        way=options.parallel,
    )
    if not devices.is_first():
        return
    if recipe.keeps_best:
        print(f"kept the parameters of step {trained.step}, the best on the held-out part")
    if recipe.amortize is None:
        score = accuracy_on(trained, split.test)
        print(f"test accuracy {score:.3f} on {len(split.test)} {split.test.unit}")
    else:
        tested = put_in.measure(trained, split.test)
        print(
            f"test accuracy {tested.own:.3f} with the compiled layers that it trained through, "
            f"{tested.sinkhorn:.3f} with Sinkhorn in their place, agreement "
            f"{tested.agreement:.3f}, on {tested.examples} {split.test.unit}"
        )
    if recipe.attention == "sinkhorn":
        print(f"next: {arguments.next_command('compile', options, folder)}")


def announced(recipe: Recipe) -> str:
    """The recipe, its preset and its cost, and those of the small preset if it is another one."""
    line = f"training {recipe.name}, preset {recipe.preset}: {recipe.cost}"
    small = catalogue.SMALL.get(recipe.name)
    if recipe.preset == "small" or small is None:
        return line
    return f"{line}; --preset small: {small.cost}"


def run_baseline(options: argparse.Namespace) -> None:
    """Prints the accuracy of the linear baseline on a recipe's data."""
    recipe = catalogue.find(options.recipe, options.preset)
    split = load_data(recipe, options.data_dir)
    announce(split)
    score, decay = linear_baseline.run(recipe, split)
    kind = "a bag of tokens" if recipe.is_text else "pixels"
    print(
        f"test accuracy {score:.3f} on {len(split.test)} {split.test.unit}: logistic regression "
        f"on {kind}, weight decay {decay:g} chosen on held-out training {split.train.unit}"
    )


def run_refresh(options: argparse.Namespace) -> None:
    """Trains compiled models for a few more epochs, and their teachers for comparison."""
    settings = refresh.Settings(
        frozen=options.frozen,
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        num_images=options.images,
        num_slices=options.num_slices,
    )
    report = refresh.run(options.folders, options.data_dir, settings)
    output.show(report, options.out or options.folders[0], "refresh")


def _add_demo(subs) -> None:
    sub = arguments.command(
        subs,
        "demo",
        run_demo,
        "train a small teacher on the packaged images, compile it, print the table",
        "Trains the demo recipe, compiles it, and writes a fidelity table and a picture of one "
        "head's plans. Needs no network. Prints the report of the compile and the table. Takes "
        f"{catalogue.DEMO.cost}.",
    )
    arguments.add_seed(sub)
    files = "the checkpoint, table and picture; older ones are replaced"
    arguments.add_out(sub, files, run_folder.DEFAULT / "demo")


def _add_recipes(subs) -> None:
    sub = arguments.command(
        subs,
        "recipes",
        run_recipes,
        "list the recipes with cost and expected accuracy, or the settings of one",
        "Prints the recipes of `python -m train train RECIPE`. With a name it prints every setting "
        "of that recipe, and whether the paper states it, it follows from the data set, or it is "
        "our choice. Takes seconds.",
    )
    sub.add_argument("recipe", metavar="RECIPE", nargs="?", help="name of a recipe")


def _add_train(subs) -> None:
    sub = arguments.command(
        subs,
        "train",
        run_train,
        "train the teacher of a recipe",
        "Trains a recipe and writes checkpoints and metrics to a run folder. Ctrl-C saves and "
        "stops. The same command with --resume continues the run and ends with the same "
        "parameters as an uninterrupted run. Prints preset and cost, the progress with loss and "
        "time left, and the test accuracy. Takes 2 to 12 minutes on two CPU cores for --preset "
        "small; `python -m train recipes` has the cost of each.",
        resume="--resume",
    )
    arguments.add_recipe(sub)
    sub.add_argument(
        "--run", dest="folder", metavar="DIR", help="run folder (default: runs/RECIPE-SEED)"
    )
    arguments.add_seed(sub)
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
        type=arguments.positive,
        metavar="EPOCHS",
        help="epochs between checkpoints (default: 1, or a twentieth of a long run)",
    )
    sub.add_argument(
        "--keep-checkpoints",
        type=arguments.positive,
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
    arguments.add_hosts(sub)


def _add_override(sub, flag: str, text: str, **settings) -> None:
    """Adds an option that changes a setting of the recipe."""
    sub.add_argument(flag, help=f"{text} (default: the recipe's)", **settings)


def _add_baseline(subs) -> None:
    sub = arguments.command(
        subs,
        "baseline",
        run_baseline,
        "print the accuracy of a linear model on a recipe's data",
        "Fits logistic regression to the pixels of an image, or to the set of tokens of a text, on "
        "the training examples of the teacher. Prints its test accuracy. Takes 16 seconds for "
        "the demo on one CPU core.",
    )
    arguments.add_recipe(sub)


def _add_refresh(subs) -> None:
    sub = arguments.command(
        subs,
        "refresh",
        run_refresh,
        "train compiled models for a few more epochs, and their teachers for comparison",
        "The paper's refresh: compiles with a residual log-sum-exp fit and a token bias, then "
        "trains coefficients, token bias, output projection, norms and classifier on labels. For "
        "comparison, the teacher is trained for the same number of epochs. Prints a table with "
        "every seed, mean and standard deviation. Takes a compile and twice --epochs "
        "epochs of training for every RUN.",
    )
    default = refresh.Settings()
    sub.add_argument(
        "folders",
        metavar="RUN",
        nargs="+",
        type=pathlib.Path,
        help="run folders of `train`: one recipe, several seeds",
    )
    arguments.add_data_dir(sub)
    sub.add_argument(
        "--epochs", type=arguments.positive, default=default.epochs, help="(default: %(default)s)"
    )
    sub.add_argument(
        "--learning-rate", type=float, default=default.learning_rate, help="(default: %(default)s)"
    )
    arguments.add_calibration(sub, "--images", default.num_images)
    sub.add_argument(
        "--num-slices",
        type=arguments.positive,
        default=default.num_slices,
        help="(default: %(default)s)",
    )
    sub.add_argument(
        "--frozen",
        action="store_true",
        help="pass no gradient through the sorts in the features (default: gradients pass)",
    )
    arguments.add_out(sub, "refresh.md and .json (default: the first RUN)")
