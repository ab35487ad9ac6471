"""Recipes survive JSON, differ where they should, and build their models."""

import dataclasses
import json

import jax
import pytest

from train.recipes import catalogue
from train.recipes.schema import Recipe, differences
from train.runtime.errors import UserError
from train.training import factory

ALL = sorted(catalogue.RECIPES)


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_survives_a_round_trip_through_json(name):
    recipe = catalogue.find(name)
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert hash(again) == hash(recipe)


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_states_its_cost_and_expected_accuracy(name):
    recipe = catalogue.find(name)
    assert recipe.name == name
    assert recipe.summary
    assert recipe.cost
    assert recipe.expected


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_builds_a_model_for_its_inputs(name):
    recipe = catalogue.find(name)
    model = factory.build(recipe)
    images = recipe.example_inputs(2)
    logits = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), images)[0])
    assert logits.shape == (2, recipe.num_classes)


def test_the_demo_has_two_layers_and_ten_steps():
    assert catalogue.DEMO.model.depth >= 2
    assert catalogue.DEMO.spec.num_steps == 10
    assert catalogue.DEMO.packaged


def test_differences_name_the_setting_and_both_values():
    other = dataclasses.replace(catalogue.DEMO, batch_size=7, cost="none")
    (line,) = differences(catalogue.DEMO, other)
    assert line == f"batch_size was {catalogue.DEMO.batch_size} and is now 7"


def test_an_unknown_recipe_is_an_error_that_lists_the_recipes():
    with pytest.raises(UserError, match=r"no recipe 'nothing': choose one of .*demo"):
        catalogue.find("nothing")


def test_an_unknown_attention_family_is_refused():
    with pytest.raises(ValueError, match="attention 'hard' must be one of"):
        dataclasses.replace(catalogue.DEMO, attention="hard")
