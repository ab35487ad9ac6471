"""Losses of one teacher trained on one device, sharded, and under pmap, side by side."""

import dataclasses
import functools

import jax
import numpy as np

from train import data, machine, models, parallel, recipes
from train import step as steps
from train.data import Batches
from train.extras import UserError

STEPS = 20


class One:
    """One device and plain ``jax.jit``: what the others are compared with."""

    def __init__(self, batch_size: int):
        self.read = functools.partial(jax.tree.map, np.asarray)
        self.compile = functools.partial(jax.jit, donate_argnums=0)
        self.place = functools.partial(jax.device_put, device=jax.local_devices()[0])
        self.feed = self.place


WAYS = {"one device": One, **parallel.WAYS}


def losses(way: str, recipe: recipes.Recipe, examples: data.Examples, count: int) -> list[float]:
    """Training losses of the first ``count`` steps."""
    devices = WAYS[way](recipe.batch_size)
    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed=0)
    tx = steps.optimizer(recipe, batches.steps_per_epoch)
    state = steps.create(models.build(recipe), tx, recipe.example_inputs(), seed=0)
    state = devices.place(jax.tree.map(np.asarray, state))
    step = functools.partial(steps.train_step, model_at=models.training(recipe, count), tx=tx)
    take_step = devices.compile(step)
    found = []
    for index in range(count):
        state, metrics = take_step(state, *map(devices.feed, batches.at(index)))
        found.append(float(devices.read(jax.block_until_ready(metrics))["loss"]))
    return found


def run(count: int = STEPS) -> dict[str, list[float]]:
    """Prints a line a step and the largest differences; gives the losses of every way.

    Raises:
      UserError: there is one device only.
    """
    if jax.device_count() == 1:
        raise UserError(
            "there is one device: on a CPU set JAX_NUM_CPU_DEVICES=2 to share it out among two"
        )
    recipe = dataclasses.replace(recipes.DEMO, batch_size=8 * jax.device_count())
    examples = data.load(recipe.dataset, "train[:500]", data.PACKAGED)
    found = {way: losses(way, recipe, examples, count) for way in WAYS}
    print("step  " + "  ".join(f"{way:>12}" for way in WAYS))
    for index, row in enumerate(zip(*found.values(), strict=True), 1):
        print(f"{index:>4}  " + "  ".join(f"{loss:>12.7f}" for loss in row))
    reference = np.array(found["one device"])
    for way in parallel.WAYS:
        worst = np.abs(np.array(found[way]) - reference).max()
        print(f"{way} on {jax.device_count()} devices: within {worst:.1e} of one device")
    print("; ".join(f"{name}: {value}" for name, value in machine.facts().items()))
    return found
