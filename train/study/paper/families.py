"""Accuracy of models that were trained with one family of attention."""

import dataclasses
import json
from collections.abc import Callable

from train.evaluation import fidelity
from train.models.vit import AttentionFactory
from train.recipes.schema import ESP_FAMILIES, Recipe
from train.study import cache
from train.study.paper.presets import Preset
from train.study.paper.runs import FOLDER, Models, Run
from train.study.paper.summary import Spread
from train.study.teacher_figures import sample
from train.training import factory
from train.training.run_folder import METRICS
from train.training.teacher import accuracy, predict

SOFT = {"soft, init": 1e-3, "soft, sharp": 1e-6}
"""From a soft evaluation of ESP to SoftSort's temperature, the last of its schedule."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of trained models.

    Attributes:
      name: the row's label, as in the paper.
      attention: family of the recipe.
      steps: another number of Sinkhorn steps, or None.
      evaluation: None for the recipe's own, or a key of ``SOFT``.
    """

    name: str
    attention: str
    steps: int | None = None
    evaluation: str | None = None

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe that trains it."""
        changed = recipe.with_attention(self.attention)
        if self.steps is None:
            return changed
        spec = dataclasses.replace(recipe.spec, num_steps=self.steps)
        return dataclasses.replace(changed, spec=spec)

    def factory(self, recipe: Recipe) -> AttentionFactory | None:
        """The attention of its evaluation; None for that of the recipe."""
        if self.evaluation is None:
            return None
        temperature = SOFT[self.evaluation]
        return lambda layer: factory.esp(recipe, temperature=temperature)


TRANSFORMER = Family("Transformer", "softmax")
DIFF = Family("DiffTransformer", "diff")
ESP = Family("ESPFormer", "esp")


@dataclasses.dataclass(frozen=True)
class FamilyLine:
    """The accuracy of one family over its seeds, and the number of test examples.

    ``curve`` is the held-out loss of the first seed while it trained: pairs of step and nats.
    """

    name: str
    published: str
    accuracy: Spread
    examples: int
    curve: list[tuple[int, float]]


def of_preset(family: Family, recipe: Recipe, preset: Preset) -> Recipe:
    """The recipe that trains a family in a preset: ESP may have fewer slices."""
    changed = family.recipe(recipe)
    if changed.attention not in ESP_FAMILIES or preset.esp_slices_trained is None:
        return changed
    esp = dataclasses.replace(changed.esp, slices=preset.esp_slices_trained)
    return dataclasses.replace(changed, esp=esp)


def measure(
    family: Family,
    recipe: Recipe,
    models: Models,
    variant: str,
    test_examples: int | None,
    report: Callable[[str], None],
) -> FamilyLine:
    """Trains the models of a family that are missing, and gives their accuracy.

    Args:
      family: what to train.
      recipe: the recipe with Sinkhorn attention.
      models: the trained models.
      variant: names changed settings of the recipe in the run folders.
      test_examples: number of test examples; None for all.
      report: called with what is being done.
    """
    changed = of_preset(family, recipe, models.preset)
    if family.steps is not None:
        variant = f"{variant}-S{family.steps}"
    scores, examples, runs = [], 0, models.runs(changed, variant)
    for run in runs:
        report(f"{family.name}: {run.path.name}")
        score, examples = score_of(run, family, test_examples)
        scores.append(score)
    curve = held_out_loss(runs[0])
    return FamilyLine(family.name, family.name, Spread.of(scores), examples, curve)


def held_out_loss(run: Run) -> list[tuple[int, float]]:
    """Step and held-out loss of every evaluation of a run; empty if it did not evaluate."""
    lines = map(json.loads, (run.path / METRICS).read_text().splitlines())
    return [(x["step"], x["held_out_loss"]) for x in lines if "held_out_loss" in x]


def score_of(run: Run, family: Family, test_examples: int | None) -> tuple[float, int]:
    """Accuracy of one model and the number of test examples, measured or read."""

    def evaluate() -> list:
        test = run.split.test
        test = sample(test, len(test) if test_examples is None else test_examples)
        model = factory.build(run.recipe, family.factory(run.recipe))
        inputs = run.recipe.inputs.prepare(test)
        logits = predict(fidelity.jitted(model), run.teacher.variables, inputs)
        return [accuracy(logits, test.labels), len(test)]

    settings = cache.settings_of(
        run.about, examples=test_examples, evaluation=family.evaluation or "own"
    )
    name = f"accuracy-{settings['evaluation'].replace(', ', '-')}.json"
    path = run.path / FOLDER / name
    return cache.cached(path, settings, evaluate, tuple, again=False)
