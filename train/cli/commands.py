"""One function for each sub-command of ``python -m train``; each takes the parsed arguments."""

import argparse
import dataclasses
import inspect
import pathlib

import asap_jax as aj
from train import bench
from train.cli import demo, fit_options, recipe_options
from train.evaluation import (
    ablations,
    compile_teacher,
    fidelity,
    late_accumulation,
    operators,
    put_in,
)
from train.recipes import catalogue
from train.recipes.presets import settings_table
from train.reporting import progress
from train.reporting.table import Report
from train.runtime import devices
from train.runtime.errors import UserError
from train.study import amortized, drift, fidelity_study, ideas, refresh
from train.training import linear_baseline, loop, run_folder
from train.training.splits import Split, announce, load_data
from train.training.teacher import Teacher, accuracy_on, load_states, load_teacher


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
    _connect(options)
    folder = run_folder.folder(recipe.name, options.seed, options.folder)
    split = load_data(recipe, options.data_dir, folder)
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
        print(f"next: python -m train compile {folder}")


def _connect(options: argparse.Namespace) -> None:
    devices.connect(options.coordinator, options.num_processes, options.process_id)


def _open(options: argparse.Namespace) -> tuple[Teacher, Split]:
    """Loads the teacher and the data of a run, and prints which data were read."""
    trained = load_teacher(options.folder)
    split = load_data(trained.recipe, options.data_dir, options.folder)
    announce(split)
    return trained, split


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


def run_compile(options: argparse.Namespace) -> None:
    """Compiles a run's teacher, prints the report, saves the compiled layers."""
    settings = fit_options.read(options)  # reports bad options before the data are read
    _connect(options)
    trained, split = _open(options)
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
    print(f"saved {path}; next: python -m train evaluate {options.folder}")


def run_ablate(options: argparse.Namespace) -> None:
    """Measures all methods and ablations of the paper on one teacher."""
    trained, split = _open(options)
    table, lines = ablations.run(trained, split, rounds=options.rounds)
    _show(table.report(), options.out or options.folder, "ablations", lines)


def _show(report: Report, out: pathlib.Path, name: str, lines=()) -> None:
    """Prints the tables and then ``lines``, and writes ``NAME.md`` and ``NAME.json``."""
    report.print(progress.console())
    for line in lines:
        print(line)
    _print_written(report.write(out, name))


def _print_written(paths) -> None:
    for path in paths:
        print(f"wrote {path}")


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
    _print_written(paths)


def run_study_amortized(options: argparse.Namespace) -> None:
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
    _print_written(paths)


def run_study_drift(options: argparse.Namespace) -> None:
    """Measures compiled layers on inputs unlike those of their calibration."""
    report, paths = drift.run(
        options.folder,
        options.data_dir,
        options.out,
        test_examples=options.test_examples,
        num_images=options.calibration,
    )
    report.print(progress.console())
    _print_written(paths)


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
    _show(report, options.out or options.folders[0], "refresh")


def run_bench(options: argparse.Namespace) -> None:
    """Runs one benchmark."""
    function, _ = bench.BENCHES[options.what]
    settings = {name: getattr(options, name) for name in ("lengths", "shapes", "minutes", "out")}
    settings = {name: value for name, value in settings.items() if value is not None}
    for name in settings:
        if name not in inspect.signature(function).parameters:
            raise UserError(f"bench {options.what} takes no --{name}")
    function(**settings)


def run_evaluate(options: argparse.Namespace) -> None:
    """Prints and writes the table that compares a teacher with its replacements."""
    trained, split = _open(options)
    path = pathlib.Path(options.artefact or options.folder / run_folder.ARTEFACT)
    if options.artefact and not path.exists():
        raise UserError(
            f"no compiled layers at {path}: run python -m train compile {options.folder}"
        )
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
    _show(table.report(), options.out or options.folder, "fidelity")
