"""Losses of one teacher trained on one device, sharded, and under pmap, side by side."""

import dataclasses

import jax
import numpy as np

from train.data import images
from train.data.images import Batches
from train.recipes import catalogue
from train.runtime import devices as parallel
from train.runtime import machine
from train.runtime.errors import UserError
from train.training import loop

STEPS = 20


def losses(
    way: str, recipe: catalogue.Recipe, examples: images.Examples, count: int
) -> list[float]:
    """Training losses of the first ``count`` steps."""
    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed=0)
    devices, create, step = loop.programs(recipe, batches.steps_per_epoch, way)
    state = devices.place(jax.tree.map(np.asarray, create(jax.random.key(0))))
    found = []
    for index in range(count):
        state, metrics = step(state, *map(devices.feed, batches.at(index)))
        found.append(float(devices.read(jax.block_until_ready(metrics))["loss"]))
    return found


def run(count: int = STEPS, recipe: catalogue.Recipe = catalogue.DEMO) -> dict[str, list[float]]:
    """Prints a line a step and the largest differences; gives the losses of every way.

    Raises:
      UserError: there is one device only.
    """
    if jax.device_count() == 1:
        raise UserError(
            "there is one device: on a CPU set JAX_NUM_CPU_DEVICES=2 to share it out among two"
        )
    recipe = dataclasses.replace(recipe, batch_size=8 * jax.device_count())
    examples = images.load(recipe.dataset, "train[:500]", images.PACKAGED)
    found = {way: losses(way, recipe, examples, count) for way in parallel.WAYS}
    print("step  " + "  ".join(f"{way:>12}" for way in parallel.WAYS))
    for index, row in enumerate(zip(*found.values(), strict=True), 1):
        print(f"{index:>4}  " + "  ".join(f"{loss:>12.7f}" for loss in row))
    reference = np.array(found["alone"])
    for way in (parallel.Sharded.name, parallel.Mapped.name):
        worst = np.abs(np.array(found[way]) - reference).max()
        print(f"{way} on {jax.device_count()} devices: within {worst:.1e} of one device")
    print("; ".join(f"{name}: {value}" for name, value in machine.facts().items()))
    return found
