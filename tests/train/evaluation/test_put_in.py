"""Accuracies with a model's own attention and with true Sinkhorn, against the models themselves."""

import dataclasses

import numpy as np

import asap_jax as aj
from train.evaluation import put_in
from train.training import factory
from train.training.teacher import Teacher


def test_a_teacher_of_the_same_sinkhorn_agrees_with_itself(trained, test_examples):
    found = put_in.measure(trained, test_examples)
    assert found.own == found.sinkhorn
    assert (found.agreement, found.examples) == (1.0, len(test_examples))


def test_the_attention_is_replaced_and_the_parameters_stay(trained, test_examples):
    recipe = dataclasses.replace(trained.recipe, attention="softmax")
    other = Teacher(recipe, trained.seed, trained.step, trained.variables)
    spec = aj.SinkhornSpec(num_steps=4)
    found = put_in.measure(other, test_examples, spec)
    inputs = recipe.inputs.prepare(test_examples)
    logits = [
        factory.build(recipe, factory.attention(name, spec)).apply(trained.variables, inputs)
        for name in ("softmax", "sinkhorn")
    ]
    own, sinkhorn = (np.asarray(x).argmax(-1) for x in logits)
    assert found.own == np.mean(own == test_examples.labels)
    assert found.sinkhorn == np.mean(sinkhorn == test_examples.labels)
    np.testing.assert_allclose(found.agreement, np.mean(own == sinkhorn), rtol=1e-6)


def test_compiled_layers_are_a_models_own(trained, test_examples):
    inputs = trained.recipe.inputs.prepare(test_examples)
    model = factory.build(trained.recipe)
    compiled = aj.linen.compile(model, trained.variables, [inputs], closures=1, holdout=0).variables
    through = dataclasses.replace(trained, compiled=compiled)
    found = put_in.measure(through, test_examples)
    own, sinkhorn = (
        np.asarray(model.apply(v, inputs)).argmax(-1) for v in (compiled, trained.variables)
    )
    assert found.own == np.mean(own == test_examples.labels)
    np.testing.assert_allclose(found.agreement, np.mean(own == sinkhorn), rtol=1e-6)
