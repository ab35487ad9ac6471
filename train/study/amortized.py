"""The study of training through compiled layers (``python -m train study amortized``).

Every recipe is trained in several ways: with the whole Sinkhorn loop, through compiled layers, with
fewer Sinkhorn steps, and with softmax. Each model is tested with the attention that it trained
through, and with the recipe's Sinkhorn attention put in its place.
"""

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from train.data import tfds
from train.evaluation import put_in
from train.recipes.amortization import Amortization
from train.recipes.schema import Recipe
from train.reporting.table import Report, Table
from train.runtime import machine
from train.study.results import Spread
from train.study.teacher_figures import sample
from train.training import loop, run_folder
from train.training.splits import Split, announce, load_data

RECIPES = ("demo", "ag_news")
SEEDS = (0, 1)
STEPS = 500
EVERY = 20
TEST_EXAMPLES = 2000
BUDGETS = (2, 4)
WINDOWS = 10  # of a run, for its time per step
HEADINGS = (
    "trained through",
    "test accuracy",
    "with true Sinkhorn",
    "agreement",
    "seconds of training",
    "rel-l2 at a refresh",
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """One training run.

    Attributes:
      way: what it trained through, a key of ``ways``.
      seed: seed of the run.
      tested: its accuracies.
      seconds: see ``seconds_of``.
      rel_l2: distance of the compiled layers from true Sinkhorn at the last refresh, before it;
        None without compiled layers.
    """

    way: str
    seed: int
    tested: put_in.PutIn
    seconds: float
    rel_l2: float | None


def ways(recipe: Recipe, every: int) -> dict[str, Recipe]:
    """Name to recipe of each way to train; the first is the recipe itself.

    Args:
      recipe: a recipe with Sinkhorn attention.
      every: steps from one refresh to the next.
    """
    steps = recipe.spec.num_steps
    small = {
        f"Sinkhorn S={budget}": dataclasses.replace(
            recipe, spec=dataclasses.replace(recipe.spec, num_steps=budget)
        )
        for budget in BUDGETS
        if budget < steps
    }
    amortize = lambda **settings: dataclasses.replace(
        recipe, amortize=Amortization(every, **settings)
    )
    return {
        f"Sinkhorn S={steps}": recipe,
        "compiled, 2 closures": amortize(closures=2),
        "compiled, 1 closure, row ending": amortize(closures=1, ending="row"),
        **small,
        "softmax": recipe.with_attention("softmax"),
    }


def of_length(recipe: Recipe, num_examples: int, steps: int) -> Recipe:
    """The recipe with about ``steps`` steps: as many epochs as come closest, at least one."""
    return recipe.with_epochs(round(steps / (num_examples // recipe.batch_size)))


def run(
    recipes: Sequence[Recipe],
    data_dir: str | None,
    out: pathlib.Path,
    runs: pathlib.Path,
    *,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
    every: int = EVERY,
    test_examples: int = TEST_EXAMPLES,
) -> tuple[Report, tuple[pathlib.Path, ...]]:
    """Trains and tests every recipe in every way, and writes the report after each of them.

    The run folders are kept. A study that was stopped continues there.

    Args:
      recipes: recipes with Sinkhorn attention.
      data_dir: TFDS folder, see ``load_data``; recipes for the packaged images read these.
      out: folder for ``amortized.md`` and ``amortized.json``.
      runs: folder for the run folders.
      seeds: seeds of the runs.
      steps: about how many steps every run has, see ``of_length``.
      every: steps from one refresh to the next.
      test_examples: largest number of test examples.

    Returns:
      The report and the paths of its files.

    Raises:
      UserError: a data set does not exist, or a run folder has a run with other settings.
    """
    tables, values = {}, {}
    for recipe in recipes:
        folder = runs / recipe.name
        split = load_data(recipe, tfds.PACKAGED if recipe.packaged else data_dir, folder)
        announce(split)
        recipe = of_length(recipe, len(split.train), steps)
        done: list[Trained] = []
        for way, changed in ways(recipe, every).items():  # its seeds share the compiled programs
            done += [
                train(way, changed, recipe, split, folder, seed, test_examples) for seed in seeds
            ]
            tables[recipe.name] = table(recipe, done, split)
            values[recipe.name] = done
            report = Report(
                "Training through compiled layers",
                list(tables.values()),
                facts(every),
                {"runs": values},
            )
            written = report.write(out, "amortized")
    return report, written


def train(
    way: str,
    changed: Recipe,
    recipe: Recipe,
    split: Split,
    folder: pathlib.Path,
    seed: int,
    test_examples: int,
) -> Trained:
    """Trains in one way, or resumes, and tests.

    Args:
      way: name of the way.
      changed: the recipe to train.
      recipe: the recipe whose Sinkhorn attention is put in.
      split: the data.
      folder: the run folder is made in this folder.
      seed: seed of the run.
      test_examples: largest number of test examples.
    """
    run_path = folder / f"{way.replace(',', '').replace(' ', '-')}-{seed}"
    trained = loop.train(changed, split.train, run_path, seed=seed, resume=True)
    tested = put_in.measure(trained, sample(split.test, test_examples), recipe.spec)
    lines = [json.loads(line) for line in (run_path / run_folder.METRICS).read_text().splitlines()]
    return Trained(way, seed, tested, seconds_of(lines), lines[-1].get("rel_l2_before"))


def seconds_of(lines: Sequence[dict]) -> float:
    """Seconds of a whole run, without compilation: its number of steps times the time per step.

    The time per step is the median over windows of a tenth of the run.

    Args:
      lines: of ``metrics.jsonl``. The steps up to the first line are not timed, because they
        compile. A window in which the run was resumed, where the clock starts again, is left out.
    """
    marks = lines[:: max(1, len(lines) // WINDOWS)]
    rates = [
        (b["seconds"] - a["seconds"]) / (b["step"] - a["step"])
        for a, b in itertools.pairwise(marks)
        if b["seconds"] > a["seconds"]
    ]
    last = lines[-1]
    return float(np.median(rates)) * last["step"] if rates else last["seconds"]


def table(recipe: Recipe, done: Sequence[Trained], split: Split) -> Table:
    """The table of one recipe: medians and ranges over the seeds."""
    rows = []
    for way in dict.fromkeys(run.way for run in done):
        runs = [run for run in done if run.way == way]
        cell = lambda values, form="{:.3f}": Spread.of(list(values)).text(form)
        distances = [run.rel_l2 for run in runs if run.rel_l2 is not None]
        rows.append(
            [
                way,
                cell(run.tested.own for run in runs),
                cell(run.tested.sinkhorn for run in runs),
                cell(run.tested.agreement for run in runs),
                cell((run.seconds for run in runs), "{:.0f}"),
                cell(distances) if distances else "-",
            ]
        )
    steps = recipe.epochs * (len(split.train) // recipe.batch_size)
    seeds = dict.fromkeys(run.seed for run in done)
    examples, unit = done[0].tested.examples, split.test.unit
    about = {
        "seeds": ", ".join(map(str, seeds)),
        "training": f"{recipe.epochs} epochs, {steps} steps of {recipe.batch_size} {unit}",
        "data": f"{recipe.dataset}, {len(split.train)} training {unit}, accuracy and agreement on "
        f"{examples} of {len(split.test)} test {unit}",
    }
    return Table(HEADINGS, rows, f"{recipe.name} ({recipe.preset})", about)


def facts(every: int) -> dict[str, str]:
    """What holds for all tables."""
    return {
        "figures": "median over the seeds, and the range if they differ",
        "compiled": f"trained through compiled layers (moments), which are fitted again before "
        f"every {every}th step; running sums, decay {Amortization(every).decay:g}",
        "with true Sinkhorn": "the same parameters, with the Sinkhorn attention of the first row",
        "agreement": "share of test examples on which both predict the same class",
        "seconds of training": "number of steps times the time per step (the median over tenths "
        "of the run), without compilation",
        "rel-l2 at a refresh": "distance of the attention weights from true Sinkhorn, mean over "
        "layers, on the batch of the last refresh, before it is added to the sums",
        "date": time.strftime("%Y-%m-%d"),
        **machine.facts(),
    }
