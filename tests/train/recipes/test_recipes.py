"""Recipes survive JSON, differ where they should, and build their models."""

import dataclasses
import json

import jax
import pytest

import asap_jax as aj
from train.cli import parser
from train.recipes import catalogue, cifar, mnist
from train.recipes.amortization import Amortization
from train.recipes.esp import Esp
from train.recipes.presets import KINDS, Sources, settings
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


@pytest.mark.parametrize("name", ALL)
def test_every_setting_of_a_recipe_has_a_source_and_no_source_is_left_over(name):
    entry = catalogue.presets(name)
    for recipe in entry.recipes():
        tags = entry.tags(recipe)
        assert list(tags) == list(settings(recipe))
        assert set(tags.values()) <= set(KINDS)
    known = settings(entry.recipes()[0])
    parents = {setting.partition(".")[0] for setting in known}
    assert set(entry.sources.names()) <= set(known) | parents


def test_the_settings_of_a_small_preset_that_differ_from_the_paper_are_our_choice():
    (entry,) = mnist.PRESETS
    assert entry.tags(mnist.PAPER)["epochs"] == "paper"
    small = entry.tags(mnist.SMALL)
    assert (small["epochs"], small["batch_size"]) == ("assumed", "paper")
    assert (small["inputs.mean"], small["model.dropout"]) == ("data", "assumed")


def test_a_setting_without_a_source_or_with_two_is_an_error():
    with pytest.raises(ValueError, match=r"'model.width' has no source"):
        Sources(paper=("epochs",)).of("model.width")
    with pytest.raises(ValueError, match="'epochs' has the sources 'paper' and 'data'"):
        Sources(paper=("epochs",), data=("epochs",)).names()


def test_the_settings_of_one_recipe_are_listed_with_their_sources(capsys):
    assert parser.main(["recipes", "cifar10"]) == 0
    text = capsys.readouterr().out
    assert "stands in for CIFAR-100" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["dataset", "cifar10", "assumed"] in lines
    assert ["spec.num_steps", "10", "paper"] in lines
    assert ["inputs.shape", "(32,", "32,", "3)", "data"] in lines
    assert cifar.SMALL.cost in text
    assert "mnist" not in text


def test_softmax_families_train_at_their_own_learning_rate():
    assert mnist.PAPER.with_attention("softmax").learning_rate == 1e-3
    assert mnist.PAPER.with_attention("esp").learning_rate == 2e-3
    assert catalogue.DEMO.with_attention("softmax").learning_rate == catalogue.DEMO.learning_rate


def test_settings_of_esp_are_compared_in_runs_of_esp_only():
    other = dataclasses.replace(catalogue.DEMO, esp=Esp(inverse_temperature=10.0))
    assert differences(catalogue.DEMO, other) == []
    (line,) = differences(catalogue.DEMO.with_attention("esp"), other.with_attention("esp"))
    assert line.startswith("esp was Esp(slices=None, inverse_temperature=0.1)")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(attention="softmax"), "for sinkhorn attention, got 'softmax'"),
        (dict(spec=aj.SinkhornSpec(num_steps=1)), "needs num_steps >= 2"),
        (dict(amortize=Amortization(5)), "training with the loop, got amortize"),
    ],
    ids=["softmax", "one step", "amortize"],
)
def test_a_detached_key_dual_needs_the_loop(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(catalogue.DEMO, detach_key_dual=True, **settings)


def test_the_model_of_a_recipe_has_its_baseline_settings():
    detached = dataclasses.replace(catalogue.DEMO, detach_key_dual=True)
    assert factory.build(detached).attention(0).detach_key_dual
    assert not factory.build(catalogue.DEMO).attention(0).detach_key_dual
    esp = catalogue.DEMO.with_attention("esp")
    assert factory.build(esp).attention(0).directions is None
    sliced = dataclasses.replace(esp, esp=Esp(slices=5, inverse_temperature=3.0))
    module = factory.build(sliced).attention(0)
    assert module.directions.shape == (5, esp.model.head_dim)
    assert (module.mode, module.inverse_temperature) == ("hard", 3.0)
    soft = factory.training(sliced, 10)(0).attention(0)
    assert (soft.mode, soft.inverse_temperature) == ("soft", 3.0)
    assert soft.directions.shape == module.directions.shape


def test_differential_attention_needs_pairs_of_heads():
    with pytest.raises(ValueError, match="difference of two heads: num_heads 1 must be even"):
        mnist.PAPER.with_attention("diff")


def test_the_old_name_of_the_papers_preset_is_still_read():
    stored = {**mnist.PAPER.to_json(), "preset": "full"}
    for name in ("softmax_learning_rate", "train_share"):
        del stored[name]
    old = Recipe.from_json(stored)
    assert old.preset == "paper"
    assert differences(old, mnist.PAPER) == []
    options = parser.parser().parse_args(["train", "mnist", "--preset", "full"])
    assert options.preset == "paper"


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
