"""Devices and hosts: the same training, whoever takes which part of a batch."""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

import asap_jax as aj
from train.bench import device_losses
from train.data import tfds
from train.data.examples import Batches
from train.evaluation import compile_teacher
from train.runtime import devices
from train.runtime.errors import UserError
from train.training import factory, loop
from train.training.teacher import load_teacher


@pytest.fixture(scope="module")
def recipe(minute):
    return dataclasses.replace(minute, epochs=1, batch_size=40)


def first_moments(way, recipe, examples):
    """The losses of three steps and Adam's first moments, which are mean gradients."""
    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed=0)
    layout, create, step = loop.programs(recipe, batches.steps_per_epoch, way)
    state = layout.place(jax.tree.map(np.asarray, create(jax.random.key(0))))
    losses = []
    for index in range(3):
        state, metrics = step(state, *map(layout.feed, batches.at(index)))
        losses.append(float(layout.read(jax.block_until_ready(metrics))["loss"]))
    return losses, layout.read(state).opt_state[0].mu


def assert_close(found, expected):
    """Losses within 1e-5, gradients within 2e-5 of the largest."""
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[1]))
    chex.assert_trees_all_close(found[1], expected[1], atol=2e-5 * largest)


@pytest.mark.parametrize(("way", "accumulate"), [("jit", 1), ("jit", 4), ("pmap", 4)])
def test_two_devices_take_the_same_steps_as_one(recipe, examples, way, accumulate):
    assert jax.device_count() == 2
    parts = dataclasses.replace(recipe, accumulate=accumulate)
    assert_close(first_moments(way, parts, examples), first_moments("alone", recipe, examples))


def test_annealing_follows_the_step_on_two_devices(recipe, examples):
    other = dataclasses.replace(recipe, attention="esp_annealed")
    assert_close(first_moments("jit", other, examples), first_moments("alone", other, examples))


def test_mixed_precision_keeps_parameters_and_moments_in_float32(recipe, examples):
    mixed = dataclasses.replace(recipe, compute_dtype="bfloat16")
    losses, moments = first_moments("jit", mixed, examples)
    expected, _ = first_moments("jit", recipe, examples)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(moments))
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert losses != expected


def test_dropout_under_jit_is_that_of_one_device(recipe, examples):
    wet = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dropout=0.3))
    losses, _ = first_moments("jit", wet, examples)
    np.testing.assert_allclose(losses, first_moments("alone", wet, examples)[0], atol=1e-5)
    assert not np.allclose(losses, first_moments("jit", recipe, examples)[0], atol=1e-3)


@pytest.mark.parametrize("way", [devices.Sharded, devices.Mapped])
def test_a_batch_that_cannot_be_divided_evenly_is_refused(way):
    with pytest.raises(UserError, match=r"batch_size 7 cannot be divided evenly among 2 devices"):
        way(7)


def test_pmap_refuses_parts_that_do_not_divide_the_rows_of_a_device(recipe):
    few = dataclasses.replace(recipe, batch_size=4, accumulate=4)
    message = r"gives 2 of 4 examples to each of 2 devices, .* --accumulate 4 .* multiple of 8"
    with pytest.raises(UserError, match=message):
        loop.programs(few, 5, "pmap")
    devices.Mapped(8, 4)


def test_a_run_can_resume_with_the_other_parallel_way(recipe, examples, tmp_path):
    whole = loop.train(recipe, examples, tmp_path / "whole")
    loop.train(recipe, examples, tmp_path / "parts", stop_after=2)
    parts = loop.train(recipe, examples, tmp_path / "parts", resume=True, way="pmap")
    assert whole.step == parts.step == 5
    losses = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
        for name in ("whole", "parts")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_shares_of_all_processes_make_the_whole_batch(minute, examples):
    pixels = dataclasses.replace(minute.inputs, shift=2, flip=True)
    batches = Batches(examples, pixels, 20, seed=3)
    whole = batches.at(5)
    parts = [batches.at(5, (index, 4)) for index in range(4)]
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[i])


def test_losses_are_printed_side_by_side(recipe, capsys):
    found = device_losses.run(2, recipe)
    text = capsys.readouterr().out
    assert "alone" in text.splitlines()[0]
    assert text.count("of one device") == 2
    for losses in found.values():
        np.testing.assert_allclose(losses, found["alone"], atol=1e-5)


def test_the_parallel_benchmark_needs_two_devices(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(UserError, match="JAX_NUM_CPU_DEVICES=2"):
        device_losses.run(2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 2, None), "need --coordinator"),
        (("localhost:1", 2, None), "needs --num-processes and --process-id"),
    ],
)
def test_incomplete_settings_of_hosts_are_named(given, message):
    with pytest.raises(UserError, match=message):
        devices.connect(*given)


HOST = """
import json, pathlib, sys
import jax
import asap_jax as aj
from train.training.splits import load_data
from train.evaluation import compile_teacher
from train.recipes.schema import Recipe
from train.runtime import devices
from train.training import loop

jax.config.update("jax_num_cpu_devices", 1)
folder, port, index = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
devices.connect(f"localhost:{port}", 2, index)
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 2, 1)
recipe = Recipe.from_json(json.loads((folder / "recipe.json").read_text()))
examples = load_data(recipe).train.take(slice(200))
loop.train(recipe, examples, folder / "pmap", way="pmap")
loop.train(recipe, examples, folder / "jit", stop_after=3)
trained = loop.train(recipe, examples, folder / "jit", resume=True)
options = aj.Options(fit="paper", seed=trained.seed)
result = compile_teacher.compile_teacher(trained, examples, options, num_images=160)
(state, *_) = result.states.values()
numbers = state.predictor.head.coefficients.tolist()
(folder / f"coefficients-{index}.json").write_text(json.dumps(numbers))
"""


def test_two_processes_train_and_calibrate_like_one(recipe, examples, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_json()))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    root = tfds.PACKAGED.parent.parent.parent
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, str(tmp_path), port, str(index)],
            cwd=root,
            env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # as here
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    printed = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], printed
    assert "train demo: 5/5" in printed[0]
    assert "train demo" not in printed[1]
    loop.train(recipe, examples, tmp_path / "alone")
    expected = [json.loads(x) for x in (tmp_path / "alone/metrics.jsonl").read_text().splitlines()]
    for way in ("jit", "pmap"):
        lines = [json.loads(x) for x in (tmp_path / way / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == 5
        assert lines[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=1e-5)
    coefficients = [
        np.array(json.loads((tmp_path / f"coefficients-{index}.json").read_text()))
        for index in range(2)
    ]
    np.testing.assert_array_equal(*coefficients)
    trained = load_teacher(tmp_path / "jit")
    batches = list(compile_teacher.calibration_batches(trained, examples, 160))
    calibration = aj.linen.Calibration(
        factory.build(recipe), aj.Options(fit="paper", seed=trained.seed)
    )
    for share in (batches[0::2], batches[1::2]):  # each process holds its own second batch out
        for batch in [x for i, x in enumerate(share) if i != 1]:
            calibration.add(trained.variables, batch)
    result = calibration.finish(trained.variables, batches[:1])
    (state, *_) = result.states.values()
    np.testing.assert_allclose(coefficients[0], state.predictor.head.coefficients, atol=1e-5)
