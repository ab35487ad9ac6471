"""The supervised refresh: what is trained and what stays."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import asap_jax as aj
from train.evaluation import compile_teacher
from train.training import factory, loop, refresh
from train.training.teacher import accuracy_on

OPTIONS = aj.Options(fit=aj.PaperFit(num_slices=4, baseline="first_step", token_bias=True))


@pytest.fixture(scope="module")
def trained(minute, examples, tmp_path_factory):
    recipe = dataclasses.replace(minute, epochs=1, spec=aj.SinkhornSpec(num_steps=4))
    return loop.train(recipe, examples, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def compiled(trained, examples):
    return compile_teacher.compile_teacher(trained, examples, OPTIONS, num_images=60).variables


def flat(variables):
    leaves, _ = jax.tree_util.tree_flatten_with_path(variables)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("frozen", [True, False])
def test_only_the_named_parts_are_trained(trained, compiled, examples, frozen):
    after = refresh.continue_training(
        trained.recipe,
        refresh.freeze_features(compiled, frozen),
        examples,
        refresh.trained_leaves,
        seed=0,
        epochs=1,
        title="refresh",
    )
    old, new = flat(compiled), flat(after)
    moved = {path for path in new if not np.array_equal(old[path], new[path])}
    for path in new:
        wanted = not {"mlp_in", "mlp_out"} & set(re.findall(r"\w+", path)) and any(
            part in path
            for part in ("coefficients", "token_bias", "'out'", "_norm'", "'norm'", "'classifier'")
        )
        assert (path in moved) == wanted, path
    assert sum("coefficients" in path for path in moved) == 1
    assert sum("token_bias" in path for path in moved) == 1


def test_frozen_features_pass_no_gradient_and_sort_gradients_do(trained, compiled, examples):
    model = factory.build(trained.recipe)
    images = trained.recipe.inputs.prepare(examples.take(slice(4)))

    def gradient(frozen):
        variables = refresh.freeze_features(compiled, frozen)
        loss = lambda v: (model.apply(v, images) ** 2).sum()
        grads = jax.grad(loss)(variables)
        return np.asarray(grads["params"]["block_0"]["attention"]["query"]["kernel"])

    assert np.isfinite(gradient(True)).all()
    assert not np.allclose(gradient(True), gradient(False), rtol=1e-3)


def test_refresh_and_control_start_from_the_same_teacher(
    trained, compiled, examples, test_examples
):
    scores = refresh.run(trained, compiled, examples, test_examples, epochs=1, learning_rate=0.0)
    assert scores.refreshed == scores.replaced
    assert scores.continued == scores.teacher == accuracy_on(trained, test_examples)
