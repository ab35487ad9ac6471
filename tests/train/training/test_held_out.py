"""Evaluation while training: the held-out part, its curve, the best parameters, and resuming."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest

from train.recipes.amortization import Amortization
from train.recipes.evaluation import Evaluation
from train.recipes.schema import Recipe
from train.runtime.errors import UserError
from train.training import factory, held_out, loop, run_folder
from train.training.teacher import load_teacher


@pytest.fixture(scope="module")
def recipe(minute):
    """Three epochs of nine steps on 182 images; 18 are held out."""
    return dataclasses.replace(minute, epochs=3, drops=(2,), evaluate=Evaluation(keep="best"))


@pytest.fixture(scope="module")
def whole(recipe, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return loop.train(recipe, examples, folder, seed=5), folder


def lines(folder):
    return [json.loads(line) for line in (folder / run_folder.METRICS).read_text().splitlines()]


def curve(folder):
    """Step, loss and accuracy of every evaluation."""
    return [
        (line["step"], line["held_out_loss"], line["held_out_accuracy"])
        for line in lines(folder)
        if "held_out_loss" in line
    ]


def test_the_last_examples_of_every_class_are_held_out(recipe, examples):
    train, rest = held_out.divide(recipe, examples)
    assert (len(train), len(rest)) == (182, 18)
    for label in range(10):
        values = examples.values[examples.labels == label]
        both = [part.values[part.labels == label] for part in (train, rest)]
        np.testing.assert_array_equal(np.concatenate(both), values)
    without = dataclasses.replace(recipe, evaluate=None)
    assert held_out.divide(without, examples) == (examples, None)


def test_a_part_without_examples_is_refused(recipe, examples):
    few = dataclasses.replace(recipe, evaluate=Evaluation(held_out=0.001))
    with pytest.raises(
        UserError, match=r"--held-out 0.001 of 200 training images holds no example"
    ):
        held_out.divide(few, examples)


def test_every_epoch_is_evaluated(whole):
    _, folder = whole
    assert [step for step, _, _ in curve(folder)] == [9, 18, 27]
    assert [line["step"] for line in lines(folder)] == [9, 18, 20, 27]


def test_a_resumed_run_has_the_same_parameters_the_same_best_and_the_same_curve(
    recipe, whole, examples, tmp_path
):
    loop.train(recipe, examples, tmp_path, seed=5, stop_after=13)
    parts = loop.train(recipe, examples, tmp_path, seed=5, resume=True)
    trained, folder = whole
    assert parts.step == trained.step
    chex.assert_trees_all_equal(parts.variables, trained.variables)
    loaded = load_teacher(tmp_path)
    assert loaded.step == trained.step
    chex.assert_trees_all_equal(loaded.variables, trained.variables)
    assert curve(tmp_path) == curve(folder)


def test_the_result_has_the_best_accuracy_and_the_figures_are_those_of_the_model(
    recipe, whole, examples
):
    trained, folder = whole
    best = max(accuracy for _, _, accuracy in curve(folder))
    assert trained.step == next(step for step, _, accuracy in curve(folder) if accuracy == best)
    _, rest = held_out.divide(recipe, examples)
    inputs = recipe.inputs.prepare(rest)
    logits = np.asarray(factory.build(recipe).apply(trained.variables, inputs), np.float64)
    at_label = logits[np.arange(len(rest)), rest.labels]
    loss = np.mean(np.log(np.exp(logits).sum(-1)) - at_label)
    (found,) = (values for step, *values in curve(folder) if step == trained.step)
    np.testing.assert_allclose(found, [loss, np.mean(logits.argmax(-1) == rest.labels)], rtol=1e-5)


def test_the_earliest_of_equal_evaluations_is_kept(recipe, examples, monkeypatch):
    correct = iter([3, 5, 5, 4])
    monkeypatch.setattr(held_out, "program", lambda *_: lambda *_: (1.0, next(correct)))
    best = {"step": np.int32(0), "correct": np.int32(-1), "params": {"w": np.zeros(1)}}
    _, rest = held_out.divide(recipe, examples)
    evaluator = held_out.Evaluator(recipe, rest, 9, best)
    for step in (9, 18, 27, 36):
        evaluator.run(step, {"w": np.full(1, step)}, None)
    assert (evaluator.best["step"], evaluator.best["correct"]) == (18, 5)
    assert evaluator.best["params"] == {"w": np.full(1, 18)}


def test_before_an_evaluation_the_result_has_the_last_parameters(recipe, examples, tmp_path):
    trained = loop.train(recipe, examples, tmp_path, stop_after=4)
    loaded = load_teacher(tmp_path)
    assert loaded.step == trained.step == 4
    chex.assert_trees_all_equal(loaded.variables, trained.variables)


def test_the_last_step_is_evaluated_even_between_two_evaluations(recipe, examples):
    every_two = dataclasses.replace(recipe, evaluate=Evaluation(every=2))
    _, rest = held_out.divide(every_two, examples)
    evaluator = held_out.Evaluator(every_two, rest, 9, None)
    assert [step for step in range(1, 28) if evaluator.due(step)] == [18, 27]


def test_the_settings_survive_json_and_are_checked(recipe):
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    for settings, message in (
        (dict(held_out=1.0), r"held_out 1.0 must be in \(0, 1\)"),
        (dict(every=0), "every=0 must be at least 1"),
        (dict(keep="worst"), "keep 'worst' must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            Evaluation(**settings)


def test_compiled_layers_are_kept_with_the_best_parameters(recipe, examples, tmp_path):
    spec = dataclasses.replace(recipe.spec, num_steps=4)
    through = dataclasses.replace(recipe, spec=spec, epochs=1, amortize=Amortization(4))
    trained = loop.train(through, examples, tmp_path)
    loaded = load_teacher(tmp_path)
    assert loaded.step == trained.step == 9
    leaves = lambda tree: [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    chex.assert_trees_all_equal(leaves(loaded.compiled), leaves(trained.compiled))
