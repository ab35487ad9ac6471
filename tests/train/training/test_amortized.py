"""Training through compiled layers: it resumes, it reports its distance, it refuses to mix."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest

from train.recipes.amortization import Amortization
from train.recipes.schema import Recipe
from train.runtime.errors import UserError
from train.training import amortized, factory, loop, run_folder, step
from train.training.teacher import load_teacher

EVERY = 3


@pytest.fixture(scope="module")
def recipe(minute):
    """One layer with four steps, refreshed before steps 1, 4, 7, ..."""
    spec = dataclasses.replace(minute.spec, num_steps=4)
    return dataclasses.replace(minute, spec=spec, amortize=Amortization(EVERY))


@pytest.fixture(scope="module")
def whole(recipe, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return loop.train(recipe, examples, folder, seed=5), folder


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_resumed_run_ends_in_the_same_bits(recipe, whole, examples, tmp_path):
    """Interrupted between two refreshes: the sums and the layers come from the checkpoint."""
    loop.train(recipe, examples, tmp_path, seed=5, stop_after=8)
    parts = loop.train(recipe, examples, tmp_path, seed=5, resume=True)
    trained, folder = whole
    assert trained.step == parts.step == 20
    chex.assert_trees_all_equal(parts.variables, trained.variables)
    chex.assert_trees_all_equal(leaves(parts.compiled), leaves(trained.compiled))
    last = [(run / run_folder.METRICS).read_text().splitlines()[-1] for run in (folder, tmp_path)]
    figures = [json.loads(line) for line in last]
    for name in ("loss", "rel_l2", "rel_l2_before"):
        assert figures[0][name] == figures[1][name]


def test_a_checkpoint_gives_the_layers_it_trained_through(whole, examples):
    trained, folder = whole
    loaded = load_teacher(folder)
    chex.assert_trees_all_equal(leaves(loaded.compiled), leaves(trained.compiled))
    model = factory.build(trained.recipe)
    inputs = trained.recipe.inputs.prepare(examples.take(slice(4)))
    own, same, sinkhorn = (
        model.apply(v, inputs) for v in (trained.compiled, loaded.compiled, trained.variables)
    )
    chex.assert_trees_all_equal(own, same)
    assert np.abs(own - sinkhorn).max() > 1e-6
    assert set(trained.variables) == {"params"}


def test_the_steps_train_through_the_compiled_layers(recipe, whole, examples, tmp_path):
    """Not through the loop: the parameters become other ones than with it, but not by much."""
    plain = loop.train(dataclasses.replace(recipe, amortize=None), examples, tmp_path, seed=5)
    assert plain.compiled is None
    trained, _ = whole
    pairs = zip(leaves(trained.variables), leaves(plain.variables), strict=True)
    largest = max(np.abs(a - b).max() for a, b in pairs)
    assert 1e-6 < largest < 0.05


def test_the_log_has_the_distance_of_the_latest_refresh(whole):
    _, folder = whole
    lines = [json.loads(line) for line in (folder / run_folder.METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20]
    for line in lines:
        assert 0 < line["rel_l2"] < 0.5
        assert 0 < line["rel_l2_before"] < 0.5


def test_pmap_trains_as_one_device(recipe, whole, examples, tmp_path):
    trained, _ = whole
    mapped = loop.train(recipe, examples, tmp_path, seed=5, way="pmap")
    pairs = zip(leaves(mapped.variables), leaves(trained.variables), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) < 1e-2


def test_a_refresh_takes_no_more_of_a_batch_than_a_part_of_a_step():
    class Spy:
        def refresh(self, state, variables, inputs, *, axis_name):
            return variables, inputs, axis_name

    state = step.TrainState(np.zeros(()), "params", None, None, "layers")
    inputs = np.arange(12).reshape(6, 2)
    settings = dict(amortized=Spy(), axis_name="devices", accumulate=3)
    variables, part, axis_name = amortized.refresh(state, inputs, **settings).amortized
    assert (variables, axis_name) == ({"params": "params"}, "devices")
    np.testing.assert_array_equal(part, inputs[[0, 3]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "amortize was Amortization.* and is now None"),
        ({"every": 4}, r"amortize was Amortization\(every=3.*now Amortization\(every=4"),
        ({"ending": "row"}, "ending='row'"),
        ({"decay": 0.5}, "decay=0.5"),
    ],
    ids=str,
)
def test_resuming_with_other_settings_is_an_error_that_names_them(
    recipe, whole, examples, changes, message
):
    amortize = None if changes is None else dataclasses.replace(recipe.amortize, **changes)
    other = dataclasses.replace(recipe, amortize=amortize)
    with pytest.raises(UserError, match=message):
        loop.train(other, examples, whole[1], seed=5, resume=True)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"every": 0}, {}, "amortize: every=0 must be at least 1"),
        ({"decay": 2.0}, {}, r"amortize: decay=2.0 must be in \[0, 1\]"),
        ({"closures": 4}, {}, "closures=4 needs a teacher of more steps"),
        ({"fit": "codebook"}, {}, "fit must be a Candidate"),
        ({"fit": "moments, row mass"}, {}, "row_mass=True .* ending='row'"),
        ({}, {"attention": "softmax"}, "amortize is for sinkhorn attention, got .*'softmax'"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(recipe, settings, changes, message):
    amortize = Amortization(**{"every": EVERY, **settings})
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recipe, amortize=amortize, **changes)


def test_the_settings_survive_a_round_trip_through_json(recipe):
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert isinstance(again.amortize, Amortization)
