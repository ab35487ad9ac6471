"""Which models the tables of accuracies train."""

import dataclasses

import pytest

from train.recipes import catalogue as recipes
from train.study.paper import accuracy, families
from train.study.paper.presets import PRESETS
from train.study.paper.runs import Data, Models


@pytest.fixture
def models(tmp_path):
    return Models(PRESETS["small"], tmp_path, (4, 5, 6), Data(None))


def test_the_small_preset_trains_images_for_a_quarter_of_the_epochs(models):
    recipe = recipes.find("cifar10", "small")
    short, variant = accuracy.recipe_of(accuracy.cifar(models.preset), models)
    assert (short.epochs, variant) == (recipe.epochs // 4, f"-{recipe.epochs // 4}epochs")
    assert short.drops == tuple(round(drop / 4) for drop in recipe.drops)
    paper = dataclasses.replace(models, preset=dataclasses.replace(models.preset, name="paper"))
    whole = dataclasses.replace(accuracy.cifar(models.preset), recipe="cifar10")
    assert accuracy.recipe_of(whole, paper)[1] == ""


def test_models_whose_losses_are_plotted_are_evaluated_while_they_train(models):
    table = accuracy.cifar(models.preset)
    assert recipes.find("cifar10", "small").evaluate is None
    assert accuracy.recipe_of(table, models)[0].evaluate is not None
    without = dataclasses.replace(table, curves=False)
    assert accuracy.recipe_of(without, models)[0].evaluate is None


def test_runs_are_named_by_recipe_attention_and_seed_and_baselines_have_fewer_seeds(models):
    recipe = recipes.find("ag_news", "small")
    folders = lambda family: [run.path.name for run in models.runs(family.recipe(recipe))]
    assert folders(families.TRANSFORMER) == [f"ag_news-softmax-{seed}" for seed in (4, 5, 6)]
    assert folders(families.DIFF) == ["ag_news-diff-4"]
    assert folders(families.ESP) == ["ag_news-esp-4"]
    three = families.Family("S=3", "sinkhorn", steps=3).recipe(recipe)
    assert (three.spec.num_steps, three.attention) == (3, "sinkhorn")


def test_a_family_is_trained_by_the_recipe_with_another_attention_and_nothing_else(models):
    recipe = recipes.find("ag_news", "small")
    changed = families.DIFF.recipe(recipe)
    assert dataclasses.replace(changed, attention="sinkhorn") == recipe
