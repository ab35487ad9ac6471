"""Resources of whole models: a train step and a forward pass, for each kind of attention."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import numpy as np

import asap_jax as aj
from train.models.vit import AttentionFactory
from train.recipes import catalogue
from train.recipes.schema import Recipe
from train.reporting.table import Table
from train.study.paper import plots, rows
from train.study.paper import profile as profiling
from train.study.paper.fits import solve
from train.study.paper.profile import Profile, Program
from train.study.paper.result import Result, beside
from train.study.paper.runs import Models
from train.study.paper.stored_profiles import Measured, measured
from train.study.paper.summary import MISSING
from train.training import factory, step

BUDGETS = (3, 10, 20)
REFERENCE = "Sinkformer (S=10)"
ESP_PARTS = 4  # micro-batches of ESP's train step on texts (paper: 4 of 8 examples)


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one table of resources shows.

    Attributes:
      name, label, title: see ``Result``.
      per_example: times are divided by the number of examples.
      columns: the paper's columns, in the order of ``_cells``.
    """

    name: str
    label: str
    title: str
    per_example: bool
    columns: tuple[str, ...]


IMDB = Resources(
    "imdb_resources",
    "tab:imdb_resource_budget_sweep",
    "Whole IMDb encoder: train step and forward pass",
    True,
    (
        "train ms/example",
        "train GB",
        "train time / S=10",
        "train memory / S=10",
        "forward ms/example",
        "forward GB",
    ),
)
CATS = Resources(
    "catsdogs_resources",
    "tab:catsdogs_resource_h100",
    "Whole Cats and Dogs ViT: train step and forward pass",
    False,
    ("train-step ms", "train-step GB", "", "", "forward ms", "forward GB"),
)


def run(table: Resources, models: Models, report: Callable[[str], None]) -> Result:
    """Measures one table; nothing is trained."""
    recipe, count, source = _subject(table, models)
    batch = functools.cache(lambda: _batch(table, models, recipe))
    report("train steps")
    steps = lambda: Measured(profiling.profile(train_programs(recipe, *batch())))
    trained = measured(models, table.name, "train", steps).profiles
    report("forward passes")
    passes = lambda: Measured(
        profiling.profile(forward_programs(recipe, batch()[0], models.seeds[0]))
    )
    forward = measured(models, table.name, "forward", passes).profiles
    facts = {
        "model": f"{recipe.name} ({recipe.preset}): {recipe.model.depth} layer(s), "
        f"{recipe.model.num_heads} heads of {recipe.model.head_dim}; {source}",
        "train step": "forward, gradient and Adam; the state's memory is reused",
        "ESP": f"{recipe.model.head_dim} slices, the coordinate axes; on texts its train step "
        f"computes the batch in {ESP_PARTS} parts, as in the paper",
        **profiling.facts(),
    }
    share = count if table.per_example else 1
    body = [_cells(name, trained, forward, share, table) for name in forward]
    unit = "ms/example" if table.per_example else "ms"
    ours = (f"train {unit}", "train GiB", "train time / S=10", "train memory / S=10")
    ours += (f"forward {unit}", "forward GiB")
    headings = ["row", *ours, *(f"paper: {name}" for name in table.columns if name)]
    values = {"train": trained, "forward": forward, "examples": count}
    draw = functools.partial(plots.resources, trained, forward)
    tables = [Table(headings, body)]
    return Result(table.name, table.label, table.title, tables, facts, values, (), draw)


def _subject(table: Resources, models: Models) -> tuple[Recipe, int, str]:
    """The recipe, the number of examples of a batch, and what they are."""
    preset = models.preset
    if table is IMDB:
        count = preset.text_batch
        return models.recipe("imdb"), count, f"the first {count} training texts"
    count = preset.image_batch
    source = f"{count} random images, the paper's ViT in every preset"
    return catalogue.find("cats_vs_dogs", "paper"), count, source


def _batch(table: Resources, models: Models, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels."""
    if table is IMDB:
        split = models.run(recipe, models.seeds[0]).split
        examples = split.train.take(slice(models.preset.text_batch))
        return recipe.inputs.prepare(examples), examples.labels
    rng, count = np.random.default_rng(0), models.preset.image_batch
    images = rng.standard_normal((count, *recipe.inputs.shape), np.float32)
    return images, rng.integers(0, recipe.num_classes, count).astype(np.int32)


def families(recipe: Recipe) -> dict[str, AttentionFactory]:
    """From a row to the attention of its model: softmax, Sinkhorn budgets, and soft ESP."""
    padding = recipe.spec.padding
    esp = lambda implementation: (
        lambda layer: aj.linen.EspAttention(padding=padding, implementation=implementation)
    )
    spec = functools.partial(dataclasses.replace, recipe.spec)
    return {
        "Transformer": factory.attention("softmax", recipe.spec),
        **{
            f"Sinkformer (S={steps})": factory.attention("sinkhorn", spec(num_steps=steps))
            for steps in BUDGETS
        },
        "ESPFormer (Soft)": esp("dense"),
        "ESPFormer (Soft), a slice at a time": esp("streaming"),
    }


def train_programs(recipe: Recipe, inputs: np.ndarray, labels: np.ndarray) -> dict[str, Program]:
    """One train step of every family."""
    tx, programs = step.optimizer(recipe, 1), {}
    for name, attention in families(recipe).items():
        model = factory.build(recipe, attention)
        parts = ESP_PARTS if recipe.is_text and "ESP" in name else 1
        take_step = functools.partial(
            step.train_step,
            model_at=lambda count, model=model: model,
            tx=tx,
            accumulate=parts if len(labels) % parts == 0 else 1,
        )
        create = jax.jit(functools.partial(step.create, model, tx))
        state = create(inputs, jax.random.key(0))
        programs[name] = Program(take_step, (state, inputs, labels), carries=True)
    return programs


def forward_programs(recipe: Recipe, inputs: np.ndarray, seed: int) -> dict[str, Program]:
    """The forward pass of every family, of exactly sorted ESP, and of compiled layers."""
    padding = recipe.spec.padding
    hard = lambda layer: aj.linen.EspAttention(mode="hard", padding=padding)
    released = lambda layer: aj.linen.EspAttention(
        mode="hard_released", padding=padding, implementation="dense"
    )
    more = {"ESPFormer (Hard)": released, "ESPFormer (exact sort)": hard}
    programs = {}
    for name, attention in (families(recipe) | more).items():
        model = factory.build(recipe, attention)
        variables = _parameters(model, inputs, seed)
        programs[name] = Program(model.apply, (variables, inputs))
    model = factory.build(recipe)
    variables = _parameters(model, inputs, seed)
    for name, compiled in compiled_variables(model, variables, [inputs]).items():
        programs[name] = Program(model.apply, (compiled, inputs))
    return programs


def _parameters(model: nn.Module, inputs: np.ndarray, seed: int) -> dict:
    """Fresh parameters; other collections that the initialisation makes are left out."""
    return {"params": jax.jit(model.init)(jax.random.key(seed), inputs[:1])["params"]}


def compiled_variables(
    model: nn.Module, variables: dict, batches: Sequence[np.ndarray]
) -> dict[str, dict]:
    """Variables with compiled layers, by row; their time does not depend on the coefficients."""
    fits = [
        *rows.least_squares(1),
        rows.Compiled("Moments, 2 closures", aj.Options().fit, 2, 1),
        rows.Compiled("Moments, one call", aj.Options().fit, 1, 1, "row"),
    ]
    found = {}
    for row in fits:
        options = aj.Options(row.fit, row.fitted_closures, row.ending, holdout=0.0)
        calibration = aj.linen.Calibration(model, options)
        states, _ = solve(calibration, variables, batches)
        ended = {path: state.replace(closures=row.closures) for path, state in states.items()}
        found[row.name] = calibration.compiled(variables, ended)["variables"]
    return found


def _cells(
    name: str,
    trained: dict[str, Profile],
    forward: dict[str, Profile],
    share: int,
    table: Resources,
) -> list[str]:
    reference = trained[REFERENCE]
    one = trained.get(name)
    cells = [MISSING] * 4
    if one is not None:
        cells = [one.time(share=share), one.memory(), MISSING, MISSING]
        if one.milliseconds is not None and reference.milliseconds is not None:
            cells[2] = f"{one.milliseconds / reference.milliseconds:.2f}"
        if one.gib is not None and reference.gib is not None:
            cells[3] = f"{one.gib / reference.gib:.2f}"
    cells += [forward[name].time(share=share), forward[name].memory()]
    columns = [column for column in table.columns if column]
    return [name, *cells, *beside(table.label, name, columns)]
