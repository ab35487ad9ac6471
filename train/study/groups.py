"""Loads the teachers of a study, and groups those that differ only in the seed."""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

from train.recipes.schema import Recipe
from train.runtime.errors import UserError
from train.training.teacher import Teacher, load_teacher


def load(folders: Sequence[pathlib.Path]) -> list[tuple[pathlib.Path, Teacher]]:
    """Loads the teachers of the run folders.

    Raises:
      UserError: there is no folder, a folder has no checkpoint, or a teacher cannot be compiled.
    """
    if not folders:
        raise UserError(
            "there is no run folder: train teachers with `python -m train train RECIPE --seed N` "
            "and name their run folders"
        )
    teachers = [(folder, load_teacher(folder)) for folder in folders]
    for folder, trained in teachers:
        recipe = trained.recipe
        if recipe.attention != "sinkhorn":
            raise UserError(
                f"{folder} was trained with {recipe.attention} attention: leave it out, or train "
                f"it with --attention sinkhorn"
            )
        if recipe.spec.num_steps < 2:
            raise UserError(
                f"{folder} has a budget of 1 Sinkhorn step, which is softmax: leave it out, or "
                f"train it with --num-steps 2 or more"
            )
    return teachers


def groups_of(
    teachers: Sequence[tuple[pathlib.Path, Teacher]],
) -> dict[str, list[tuple[pathlib.Path, Teacher]]]:
    """Groups teachers with equal recipes, each group under its own label.

    A label names the recipe, preset, steps and learning rate. If that is not enough to tell two
    groups apart, it also names the settings that differ.

    Raises:
      UserError: two teachers of one group have the same seed.
    """
    groups = collections.defaultdict(list)
    for folder, trained in teachers:
        settings = dataclasses.replace(trained.recipe, summary="", cost="", expected="")
        for other_folder, other in groups[settings]:
            if other.seed == trained.seed:
                raise UserError(
                    f"{other_folder} and {folder} have the same recipe and seed {trained.seed}: "
                    f"leave one out, or train one with another --seed"
                )
        groups[settings].append((folder, trained))
    alike = collections.defaultdict(list)
    for recipe in groups:
        alike[_label(recipe)].append(recipe)
    return {
        _label(recipe) + _further(recipe, alike[_label(recipe)]): members
        for recipe, members in groups.items()
    }


def _label(recipe: Recipe) -> str:
    steps, rate = recipe.spec.num_steps, recipe.learning_rate
    return f"{recipe.name} ({recipe.preset}), S={steps}, learning rate {rate:g}"


def _further(recipe: Recipe, alike: Sequence[Recipe]) -> str:
    """The settings in which recipes with the same label differ, with this recipe's values."""
    names = [field.name for field in dataclasses.fields(Recipe)]
    differ = [name for name in names if len({getattr(other, name) for other in alike}) > 1]
    return "".join(f", {name} {getattr(recipe, name)}" for name in differ)
