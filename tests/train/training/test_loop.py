"""Training: it learns, it resumes to the same bits, it refuses to mix runs."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal

import chex
import jax
import numpy as np
import pytest

from train.data.examples import Batches
from train.runtime.errors import UserError
from train.training import checkpoints, factory, loop, run_folder, step
from train.training.teacher import load_teacher


def lines(run):
    return [json.loads(line) for line in (run / run_folder.METRICS).read_text().splitlines()]


def test_a_few_training_steps_lower_the_loss(tiny, examples):
    model, tx = factory.build(tiny), step.optimizer(tiny, 1000)
    images, labels = Batches(examples, tiny.inputs, 20, seed=0).at(0)
    state = step.create(model, tx, images, jax.random.key(0))
    take_step = jax.jit(
        functools.partial(step.train_step, model_at=lambda index: model, tx=tx), donate_argnums=0
    )
    losses = []
    for _ in range(8):
        state, metrics = take_step(state, images, labels)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.95 * losses[0]
    assert int(state.step) == 8


def test_the_learning_rate_drops_tenfold_after_each_named_epoch(minute):
    recipe = dataclasses.replace(minute, learning_rate=1.0, drops=(1, 2))
    tx = step.optimizer(recipe, steps_per_epoch=3)
    state, sizes = tx.init({"w": np.zeros(())}), []
    for _ in range(9):
        updates, state = tx.update({"w": np.ones(())}, state)
        sizes.append(-float(updates["w"]))
    np.testing.assert_allclose(sizes, [1] * 3 + [0.1] * 3 + [0.01] * 3, rtol=1e-4)


def test_a_resumed_run_ends_in_the_same_bits(minute, examples, tmp_path):
    whole = loop.train(minute, examples, tmp_path / "whole", seed=5)
    loop.train(minute, examples, tmp_path / "parts", seed=5, stop_after=7)
    parts = loop.train(minute, examples, tmp_path / "parts", seed=5, resume=True)
    assert whole.step == parts.step == 20
    chex.assert_trees_all_equal(whole.variables, parts.variables)
    logged = [
        [(line["step"], line["loss"]) for line in lines(tmp_path / name) if line["step"] != 7]
        for name in ("whole", "parts")
    ]
    assert logged[0] == logged[1]


def test_a_checkpoint_restores_recipe_seed_step_and_parameters(minute, examples, tmp_path):
    trained = loop.train(minute, examples, tmp_path, seed=2, stop_after=3)
    loaded = load_teacher(tmp_path)
    assert (loaded.recipe, loaded.seed, loaded.step) == (minute, 2, 3)
    chex.assert_trees_all_equal(loaded.variables, trained.variables)


def test_only_the_newest_checkpoints_are_kept(minute, examples, tmp_path):
    recipe = dataclasses.replace(minute, epochs=4, batch_size=100)
    loop.train(recipe, examples, tmp_path, save_every=1)
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["6", "8"]
    assert checkpoints.NUM_KEPT == 2


@pytest.mark.parametrize(("epochs", "every"), [(4, 1), (20, 1), (50, 2), (300, 15)])
def test_at_most_a_twentieth_of_a_run_lies_between_checkpoints(
    minute, examples, tmp_path, monkeypatch, epochs, every
):
    saved = []
    save = lambda self, state, *rest: saved.append(int(state.step))
    monkeypatch.setattr(checkpoints.Checkpoints, "save", save)
    recipe = dataclasses.replace(minute, epochs=epochs, batch_size=100)
    steps = len(examples) // 100
    loop.train(recipe, examples, tmp_path, stop_after=2 * every * steps)
    assert saved == [every * steps, 2 * every * steps]


def test_a_folder_that_holds_a_run_is_not_overwritten(minute, examples, tmp_path):
    loop.train(minute, examples, tmp_path, stop_after=2)
    with pytest.raises(UserError, match=r"holds a run that is at step 2: continue with --resume"):
        loop.train(minute, examples, tmp_path)


def test_resuming_with_another_recipe_or_seed_is_an_error_that_names_it(minute, examples, tmp_path):
    loop.train(minute, examples, tmp_path, stop_after=2)
    other = dataclasses.replace(minute, learning_rate=0.5)
    with pytest.raises(UserError, match=r"learning_rate was 0.001 and is now 0.5; seed was 0"):
        loop.train(other, examples, tmp_path, seed=1, resume=True)


def test_resuming_an_empty_folder_starts_a_new_run(minute, examples, tmp_path):
    assert loop.train(minute, examples, tmp_path, resume=True, stop_after=1).step == 1


def test_a_folder_without_checkpoint_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint in .*: train one with `python -m train"):
        load_teacher(tmp_path)


@pytest.mark.parametrize("number", loop.SIGNALS, ids=lambda number: number.name)
def test_ctrl_c_saves_and_says_what_is_saved(minute, examples, tmp_path, monkeypatch, number):
    def interrupt_once(done, note):
        if done == 10:
            os.kill(os.getpid(), number)

    @contextlib.contextmanager
    def interrupting_bar(*_, **settings):
        yield interrupt_once

    monkeypatch.setattr(loop.progress, "bar", interrupting_bar)
    before = signal.getsignal(number)
    with pytest.raises(UserError, match=rf"stopped and saved at step 11 of 20 in {tmp_path}"):
        loop.train(minute, examples, tmp_path)
    assert signal.getsignal(number) is before
    assert load_teacher(tmp_path).step == 11


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_good_checkpoint(
    minute, examples, tmp_path
):
    loop.train(minute, examples, tmp_path, stop_after=4)
    wild = dataclasses.replace(examples, values=np.full(examples.values.shape, np.nan, np.float32))
    with pytest.raises(
        UserError, match=r"loss is nan at step 10; the last good checkpoint in .* is of step 4"
    ):
        loop.train(minute, wild, tmp_path, resume=True)
    assert load_teacher(tmp_path).step == 4


def test_metrics_are_json_lines_with_loss_accuracy_and_time(minute, examples, tmp_path):
    loop.train(minute, examples, tmp_path)
    logged = lines(tmp_path)
    assert [line["step"] for line in logged] == [10, 20]
    assert all(math.isfinite(line["loss"]) for line in logged)
    assert set(logged[0]) == {"step", "loss", "accuracy", "seconds", "input_share"}
    assert all(0 <= line["input_share"] <= 1 for line in logged)


def test_a_log_line_that_a_kill_cut_short_is_dropped(tmp_path):
    (tmp_path / run_folder.METRICS).write_text('{"step": 1}\n{"step": 9}\n{"ste')
    with run_folder.MetricsLog(tmp_path, resumed_at=5) as log:
        log.write(6, loss=1.0)
    assert lines(tmp_path) == [{"step": 1}, {"step": 6, "loss": 1.0}]
    assert [file.name for file in tmp_path.iterdir()] == [run_folder.METRICS]
