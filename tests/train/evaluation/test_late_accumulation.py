"""Sums over the last states of a run: which state sees which batch, and what is printed."""

import dataclasses
import itertools

import chex
import jax
import numpy as np
import pytest

import asap_jax as aj
from train.cli import parser
from train.data import tfds
from train.evaluation import compile_teacher, late_accumulation
from train.runtime.errors import UserError
from train.training import factory, loop
from train.training.teacher import load_states, load_teacher

OPTIONS = aj.Options(fit=aj.PaperFit(num_slices=4), holdout=0.4)
IMAGES = 50


@pytest.fixture(scope="module")
def run(minute, examples, tmp_path_factory):
    """A run folder with checkpoints of the last three of four epochs."""
    recipe = dataclasses.replace(
        minute, epochs=4, batch_size=100, learning_rate=0.01, spec=aj.SinkhornSpec(num_steps=4)
    )
    folder = tmp_path_factory.mktemp("run")
    loop.train(recipe, examples, folder, save_every=1, keep_checkpoints=3)
    return folder


def test_the_states_are_the_newest_checkpoints_in_order(run):
    states = load_states(run, 3)
    chex.assert_trees_all_equal(states[-1], load_teacher(run).variables)
    chex.assert_trees_all_equal(load_states(run, 1), states[-1:])
    kernels = [np.asarray(jax.tree.leaves(state)[-1]) for state in states]
    assert all(np.abs(a - b).max() > 1e-4 for a, b in itertools.pairwise(kernels))
    with pytest.raises(UserError, match=r"has 3 checkpoints, 4 are needed: train with --keep"):
        load_states(run, 4)


def test_every_state_sees_its_part_of_the_batches_that_are_not_held_out(run, examples):
    states, teacher = load_states(run, 3), load_teacher(run)
    result = late_accumulation.compile_late(states, teacher, examples, OPTIONS, num_images=IMAGES)
    batches = list(compile_teacher.calibration_batches(teacher, examples, IMAGES))
    frozen = compile_teacher.compile_teacher(teacher, examples, OPTIONS, num_images=IMAGES)
    assert (result.report.num_fit_batches, result.report.num_report_batches) == (3, 2)
    assert frozen.report.num_fit_batches == 3
    by_hand = aj.linen.Calibration(factory.build(teacher.recipe), OPTIONS)
    for state, batch in zip(states, (batches[0], batches[2], batches[4]), strict=True):
        by_hand.add(state, batch)
    expected = by_hand.finish(teacher.variables, [batches[1], batches[3]])
    chex.assert_trees_all_equal(result.states, expected.states)
    for path, layer in expected.report.layers.items():
        chex.assert_trees_all_close(result.report.layers[path].rows, layer.rows)
    moved = [
        np.abs(state.predictor.coefficients - frozen.states[path].predictor.coefficients).max()
        for path, state in result.states.items()
    ]
    assert min(moved) > 1e-6


def test_more_states_than_batches_are_refused(run, examples):
    states, teacher = load_states(run, 3), load_teacher(run)
    with pytest.raises(UserError, match=r"1 calibration batches .* among 3 states: use more"):
        late_accumulation.compile_late(states, teacher, examples, OPTIONS, num_images=2)


def test_the_command_prints_both_fits_and_saves_the_sums_over_the_states(
    run, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv(tfds.VARIABLE, str(tfds.PACKAGED))
    path = tmp_path / "late.npz"
    given = ["compile", str(run), "--accumulate-last", "2", "--images", "60"]
    assert parser.main([*given, "--artefact", str(path)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    for name in (["last", "2", "checkpoints"], ["frozen", "teacher"]):
        assert any(line[: len(name)] == name and "compiled," in line for line in lines)
    loaded = aj.load(path, like=load_teacher(run).variables)
    assert "asap" in loaded
