"""What the sub-commands of ``python -m train`` do, each a function of the parsed arguments."""

import dataclasses
import pathlib

import asap_jax as aj
from train import bench as benches
from train import study as studies
from train.cli import demo as demonstration
from train.evaluation import ablations, compile_teacher, fidelity
from train.recipes import catalogue as recipe_list
from train.reporting import progress
from train.runtime import devices
from train.runtime.errors import UserError
from train.study import ideas
from train.training import linear_baseline, loop, run_folder, teacher
from train.training import refresh as refreshing
from train.training.teacher import Split, Teacher


def _fit_options(options, trained) -> aj.Options:
    """The fit that the command line asks for, with the run's seed."""
    names = ("recipe", "objective", "closures", "features", "num_slices", "slice_kind")
    names += ("coefficients", "baseline", "token_bias", "ridge", "ridge_scale", "padding")
    try:
        return aj.Options(seed=trained.seed, **{name: getattr(options, name) for name in names})
    except ValueError as fault:
        raise UserError(str(fault)) from fault


def demo(options) -> None:
    """Trains, compiles, measures and draws, offline."""
    demonstration.run(options.seed, options.out)


def recipes(options) -> None:
    """Lists the recipes."""
    screen = progress.console()
    for recipe in recipe_list.listed():
        screen.print(f"[bold]{recipe.name} ({recipe.preset})[/bold]: {recipe.summary}")
        screen.print(f"  cost: {recipe.cost}", markup=False)
        screen.print(f"  expected test accuracy: {recipe.expected}", markup=False)


def train(options) -> None:
    """Trains a teacher and prints its test accuracy."""
    recipe = _recipe(options)
    _connect(options)
    folder = run_folder.folder(recipe.name, options.seed, options.folder)
    split = teacher.load_data(recipe, options.data_dir, folder)
    teacher.announce(split)
    trained = loop.train(
        recipe,
        split.train,
        folder,
        seed=options.seed,
        resume=options.resume,
        save_every=options.save_every,
        way=options.parallel,
    )
    if not devices.is_first():
        return
    score = teacher.test_accuracy(trained, split.test)
    print(f"test accuracy {score:.3f} on {len(split.test)} {split.test.unit}")
    if recipe.attention == "sinkhorn":
        print(f"next: python -m train compile {folder}")


def _recipe(options) -> recipe_list.Recipe:
    """The recipe with what the command line changes of it."""
    recipe = recipe_list.find(options.recipe, options.preset)
    names = ("attention", "epochs", "batch_size", "learning_rate", "compute_dtype", "accumulate")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.patch_size is not None and recipe.tokens is not None:
        raise UserError(f"recipe {recipe.name!r} reads texts: --patch-size is for image recipes")
    if options.length is not None and recipe.tokens is None:
        raise UserError(f"recipe {recipe.name!r} reads images: --length is for text recipes")
    try:
        if options.num_steps is not None:
            given["spec"] = dataclasses.replace(recipe.spec, num_steps=options.num_steps)
        if options.patch_size is not None:
            given["model"] = dataclasses.replace(recipe.model, patch_size=options.patch_size)
        if options.length is not None:
            given["tokens"] = dataclasses.replace(recipe.tokens, length=options.length)
        return dataclasses.replace(recipe, **given)
    except ValueError as fault:
        raise UserError(str(fault)) from fault


def _connect(options) -> None:
    devices.connect(options.coordinator, options.num_processes, options.process_id)


def _open(options) -> tuple[Teacher, Split]:
    """The run's teacher and data, announced."""
    trained = teacher.load(options.folder)
    split = teacher.load_data(trained.recipe, options.data_dir, options.folder)
    teacher.announce(split)
    return trained, split


def baseline(options) -> None:
    """Prints the accuracy of the linear baseline on a recipe's data."""
    recipe = recipe_list.find(options.recipe, options.preset)
    split = teacher.load_data(recipe, options.data_dir)
    teacher.announce(split)
    score, decay = linear_baseline.run(recipe, split)
    kind = "pixels" if recipe.tokens is None else "a bag of tokens"
    print(
        f"test accuracy {score:.3f} on {len(split.test)} {split.test.unit}: logistic regression "
        f"on {kind}, weight decay {decay:g} chosen on held-out training {split.train.unit}"
    )


def compile(options) -> None:
    """Compiles a run's teacher, prints the report, saves the compiled layers."""
    _connect(options)
    trained, split = _open(options)
    fit = _fit_options(options, trained)
    result = compile_teacher.compile_teacher(trained, split.train, fit, num_images=options.images)
    if not devices.is_first():
        return
    print(result.report)
    path = options.artefact or options.folder / run_folder.ARTEFACT
    aj.save(path, result)
    print(f"saved {path}; next: python -m train evaluate {options.folder}")


def ablate(options) -> None:
    """Prints every method and ablation row of the paper on one teacher."""
    trained, split = _open(options)
    table, lines = ablations.run(trained, split, rounds=options.rounds)
    table.print(progress.console())
    for line in lines:
        print(line)
    for written in table.write(options.out or options.folder, name="ablations"):
        print(f"wrote {written}")


def study(options) -> None:
    """Measures operators on several teachers, prints the tables and writes them with a plot."""
    settings = dict(num_images=options.calibration)
    if options.test_examples is not None:
        settings["test_examples"] = options.test_examples
    if options.what == "ideas":
        if options.thorough:
            raise UserError("study ideas takes no --thorough")
        ideas.run(options.folders, options.data_dir, options.out, **settings, again=options.again)
        print(f"wrote {options.out / 'ideas.md'}")
        return
    found, written = studies.run(
        options.folders,
        options.data_dir,
        options.out,
        **settings,
        thorough=options.thorough,
        again=options.again,
    )
    found.print(progress.console())
    for path in written:
        print(f"wrote {path}")


def refresh(options) -> None:
    """Trains a compiled model on a little, beside its teacher."""
    trained, split = _open(options)
    fit = aj.Options(
        seed=trained.seed,
        num_slices=options.num_slices,
        baseline="first_step",
        token_bias=True,
    )
    result = compile_teacher.compile_teacher(trained, split.train, fit, num_images=options.images)
    print(result.report)
    scores = refreshing.run(
        trained,
        result.variables,
        split.train,
        split.test,
        frozen=not options.sort_gradients,
        epochs=options.epochs,
        learning_rate=options.learning_rate,
    )
    print(
        f"test accuracy on {len(split.test)} {split.test.unit} after {options.epochs} extra epochs:"
    )
    for name, value in dataclasses.asdict(scores).items():
        print(f"  {name:<10} {value:.4f}")


def bench(options) -> None:
    """Runs one benchmark."""
    given = {
        name: value
        for name in ("lengths", "shapes", "out")
        if (value := getattr(options, name)) is not None
    }
    benches.run(options.what, **given)


def evaluate(options) -> None:
    """Prints and writes the table of a teacher and its replacements."""
    trained, split = _open(options)
    path = pathlib.Path(options.artefact or options.folder / run_folder.ARTEFACT)
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
