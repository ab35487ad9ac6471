"""Runs that are killed, checkpoints that are damaged, disks that are full."""

import contextlib
import dataclasses
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

from train.data import tfds
from train.runtime.errors import UserError
from train.training import checkpoints, factory, loop, run_folder, step
from train.training.teacher import load_teacher

STEPS = 20

# The readers of a damaged file leave unfinished work behind, which Python remarks upon when it is
# collected; it must not be in a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


# The imports take longer than the training: one process makes them, and its forks train.
CHILDREN = """
import json, os, pathlib, signal, sys, threading
from train.data.examples import Batches
from train.training.splits import load_data
from train.recipes.schema import Recipe
from train.training import loop

folder = pathlib.Path(sys.argv[1])
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def watch():
    while not list((folder / "run/checkpoints").glob("20*tmp*")):
        pass
    die()

def train(when):
    if when == "save":
        threading.Thread(target=watch, daemon=True).start()
    elif when != "never":
        at = Batches.at
        deadly = lambda self, step, share: die() if step == int(when) else at(self, step, share)
        Batches.at = deadly
    recipe = Recipe.from_json(json.loads((folder / "recipe.json").read_text()))
    examples = load_data(recipe).train.take(slice(200))
    loop.train(recipe, examples, folder / "run", seed=5, resume=True, save_every=1)

for when in sys.argv[2:]:
    process = os.fork()
    if not process:
        train(when)
        sys.exit()
    print("status", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def children(folder, *when):
    """Runs the training in processes of their own, which kill themselves where ``when`` says.

    Returns:
      The exit codes.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, str(folder), *map(str, when)],
        cwd=tfds.PACKAGED.parent.parent.parent,
        env={
            **os.environ,
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_COMPILATION_CACHE_DIR": str(folder),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as here, or bits differ
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line[:7] == "status "]


def test_a_killed_run_resumes_to_the_same_bits(minute, examples, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(minute.to_json()))
    # Before the first checkpoint, after it, while saving, and to the end.
    codes = children(tmp_path, 7, 13, "save", "never")
    assert codes == [-signal.SIGKILL] * 3 + [0]
    whole = loop.train(minute, examples, tmp_path / "whole", seed=5)
    killed = load_teacher(tmp_path / "run")
    assert killed.step == whole.step == STEPS
    chex.assert_trees_all_equal(killed.variables, whole.variables)
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / run_folder.METRICS).read_text().splitlines()
    ]
    assert steps == sorted(set(steps))


HOLD = """
import pathlib, sys, time
from train.training import run_folder
with run_folder.locked(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_second_process_in_the_folder_of_a_run_is_refused_until_the_first_ends(
    minute, examples, finished, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    root = tfds.PACKAGED.parent.parent.parent
    command = [sys.executable, "-c", HOLD, str(run)]
    first = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"another process is training in {run}: wait"):
            loop.train(minute, examples, run, resume=True)
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    assert loop.train(minute, examples, run, resume=True).step == STEPS
    assert load_teacher(run).step == STEPS


def test_a_lock_ends_with_its_block(tmp_path):
    for _ in range(2):
        with run_folder.locked(tmp_path), pytest.raises(UserError, match=f" in {tmp_path}: wait"):
            run_folder.locked(tmp_path).__enter__()


def test_only_the_first_process_of_a_run_locks_its_folder(tmp_path, monkeypatch):
    with run_folder.locked(tmp_path):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with run_folder.locked(tmp_path):
            pass


def test_resuming_with_another_random_generator_is_refused_by_name(
    minute, examples, finished, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    message = "jax_default_prng_impl was 'threefry2x32' and is now 'rbg'"
    with jax.default_prng_impl("rbg"):
        with pytest.raises(UserError, match=f"cannot resume .*{message}"):
            loop.train(minute, examples, run, resume=True)
        chex.assert_trees_all_equal(load_teacher(run).variables, finished[1].variables)
    assert sorted(place.name for place in (run / "checkpoints").iterdir()) == ["10", "20"]
    # A checkpoint of an older version, which does not name its generator, is of the default one.
    for about in run.glob("checkpoints/*/about/*"):
        if "generator" in about.read_text(errors="replace"):
            stored = json.loads(about.read_text())
            del stored["generator"]
            about.write_text(json.dumps(stored))
    assert loop.train(minute, examples, run, resume=True).step == STEPS
    with jax.default_prng_impl("rbg"), pytest.raises(UserError, match=message):
        loop.train(minute, examples, run, resume=True)


@pytest.fixture(scope="module")
def finished(minute, examples, tmp_path_factory):
    """A run with checkpoints at steps 10 and 20."""
    run = tmp_path_factory.mktemp("finished")
    return run, loop.train(minute, examples, run, save_every=1)


def cut(folder):
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(folder):
    for file in folder.glob("state/**/d/*"):
        content = bytearray(file.read_bytes())
        for place in range(0, len(content), 97):
            content[place] ^= 0xFF
        file.write_bytes(content)


def forge(folder):
    """Other arrays than those whose digest is stored, as a bit flip before compression gives."""
    (about,) = (f for f in folder.glob("about/*") if "digest" in f.read_text(errors="replace"))
    about.write_text(about.read_text().replace('"digest": "', '"digest": "0'))


def lose(folder):
    shutil.rmtree(folder / "about")


@pytest.mark.parametrize("damage", [cut, flip, forge, lose])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    finished, damage, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    damage(run / "checkpoints" / str(STEPS))
    assert load_teacher(run).step == STEPS // 2
    text = " ".join(capsys.readouterr().out.split())
    assert f"the checkpoint of step {STEPS} in {run}/checkpoints is damaged" in text


def test_a_run_resumes_from_the_last_good_checkpoint(minute, examples, finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    cut(run / "checkpoints" / str(STEPS))
    again = loop.train(minute, examples, run, resume=True)
    assert "is damaged" in capsys.readouterr().out
    chex.assert_trees_all_equal(again.variables, finished[1].variables)
    assert load_teacher(run).step == STEPS
    assert [place.name.split("-")[0] for place in (run / "damaged").iterdir()] == [str(STEPS)]


def test_a_folder_with_only_damaged_checkpoints_is_an_error(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    cut(run / "checkpoints")
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged: put one back"):
        load_teacher(run)


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError("RESOURCE_EXHAUSTED: Failed to write 177 bytes: No space left on device"),
    ],
    ids=["OSError", "ValueError"],
)
def test_a_full_disk_is_reported_with_the_last_good_checkpoint(
    minute, examples, tmp_path, monkeypatch, fault
):
    manager = checkpoints.need("orbax.checkpoint").CheckpointManager
    save = manager.save

    def full(self, step, **rest):
        if step == STEPS:
            raise fault
        return save(self, step, **rest)

    monkeypatch.setattr(manager, "save", full)
    with pytest.raises(UserError, match=rf"disk is full: step {STEPS} .* is of step {STEPS // 2}"):
        loop.train(minute, examples, tmp_path, save_every=1)
    monkeypatch.undo()
    assert loop.train(minute, examples, tmp_path, resume=True).step == STEPS


def test_a_log_that_cannot_be_written_is_reported(tmp_path):
    log = run_folder.MetricsLog(tmp_path)
    log._file.close()
    log._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(UserError, match=r"cannot write /dev/full \(No space left on device\)"):
        log.write(1, loss=1.0)
    with contextlib.suppress(OSError):
        log._file.close()


def test_parameters_that_are_not_finite_are_not_saved(minute, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    with checkpoints.Checkpoints(tmp_path / "run") as stored:
        state, about = stored.restore(lambda about: finished_state(minute))
        bad = dataclasses.replace(
            state, step=np.int32(21), params={**state.params, "x": np.array([np.nan])}
        )
        with pytest.raises(UserError, match=r"not finite after step 21: .* is of step 20"):
            stored.save(bad, about.recipe, about.seed)
        assert stored.latest() == STEPS


def finished_state(recipe):
    """A state of the recipe's shapes."""
    tx = step.optimizer(recipe, 1)
    return step.create(factory.build(recipe), tx, recipe.example_inputs(), jax.random.key(0))
