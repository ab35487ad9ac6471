"""Compares the training loop with the bare jitted step, and measures its wait for input."""

import dataclasses
import json
import pathlib
import tempfile
import time

import jax
import numpy as np

from train.data import tfds
from train.data.examples import Batches, Examples
from train.recipes import catalogue
from train.runtime import devices, machine
from train.training import loop, run_folder
from train.training.splits import load_data

STEPS = 200
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Speed:
    """Steps per second.

    Attributes:
      bare: the jitted step alone, again and again on one batch, with one wait at the end.
      loop: ``train.training.loop`` with its batches, metrics and progress, without compilation.
      input_share: share of the loop's time that it waits for a batch.
    """

    bare: float
    loop: float
    input_share: float


def bare(recipe: catalogue.Recipe, examples: Examples, count: int) -> float:
    """Steps per second of the jitted step alone."""
    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed=0)
    layout, create, step = loop.programs(recipe, batches.steps_per_epoch, devices.Sharded.name)
    state = layout.place(jax.tree.map(np.asarray, create(jax.random.key(0))))
    batch = tuple(map(layout.feed, batches.at(0)))
    state, _ = jax.block_until_ready(step(state, *batch))
    began = time.perf_counter()
    for _ in range(count):
        state, _ = step(state, *batch)
    jax.block_until_ready(state)
    return count / (time.perf_counter() - began)


def looped(recipe: catalogue.Recipe, examples: Examples, count: int) -> tuple[float, float]:
    """Steps per second of the loop after its first metrics line, and its wait for input."""
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder)
        loop.train(recipe, examples, run, stop_after=count + loop.LOG_EVERY)
        lines = [json.loads(line) for line in (run / run_folder.METRICS).read_text().splitlines()]
    first, last = lines[0], lines[-1]
    seconds = last["seconds"] - first["seconds"]
    waited = (
        last["input_share"] * last["seconds"] - first["input_share"] * first["seconds"]
    ) / seconds
    return (last["step"] - first["step"]) / seconds, waited


def run(count: int = STEPS) -> Speed:
    """Prints medians of interleaved runs with the demo recipe."""
    recipe = catalogue.DEMO
    examples = load_data(recipe, tfds.PACKAGED).train
    pairs = [
        (bare(recipe, examples, count), looped(recipe, examples, count)) for _ in range(ROUNDS)
    ]
    speed = Speed(
        bare=float(np.median([rate for rate, _ in pairs])),
        loop=float(np.median([rate for _, (rate, _) in pairs])),
        input_share=float(np.median([share for _, (_, share) in pairs])),
    )
    print(
        f"{recipe.name}: bare step {speed.bare:.1f} steps/s, training loop {speed.loop:.1f} "
        f"({speed.bare / speed.loop:.2f} times the bare step's time), {speed.input_share:.1%} "
        f"of it waiting for input; medians of {ROUNDS} runs of {count} steps"
    )
    print(machine.line())
    return speed
