"""Compares the losses of one teacher trained on one device, sharded, and under pmap."""

import dataclasses

import jax
import numpy as np

from train.data import tfds
from train.data.examples import Batches, Examples
from train.recipes import catalogue
from train.runtime import devices, machine
from train.runtime.errors import UserError
from train.training import loop
from train.training.splits import load_data

STEPS = 20


def first_losses(way: str, recipe: catalogue.Recipe, examples: Examples, count: int) -> list[float]:
    """Training losses of the first ``count`` steps."""
    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed=0)
    layout, create, step = loop.programs(recipe, batches.steps_per_epoch, way)
    state = layout.place(jax.tree.map(np.asarray, create(jax.random.key(0))))
    losses = []
    for index in range(count):
        state, metrics = step(state, *map(layout.feed, batches.at(index)))
        losses.append(float(layout.read(jax.block_until_ready(metrics))["loss"]))
    return losses


def run(count: int = STEPS, recipe: catalogue.Recipe = catalogue.DEMO) -> dict[str, list[float]]:
    """Prints the losses of every step and the largest differences; returns the losses.

    Raises:
      UserError: there is only one device.
    """
    if jax.device_count() == 1:
        raise UserError(
            "there is only one device: on a CPU set JAX_NUM_CPU_DEVICES=2 to use it as two devices"
        )
    recipe = dataclasses.replace(recipe, batch_size=8 * jax.device_count())
    examples = load_data(recipe, tfds.PACKAGED).train.take(slice(500))
    losses = {way: first_losses(way, recipe, examples, count) for way in devices.WAYS}
    print("step  " + "  ".join(f"{way:>12}" for way in losses))
    for index, row in enumerate(zip(*losses.values(), strict=True), 1):
        print(f"{index:>4}  " + "  ".join(f"{loss:>12.7f}" for loss in row))
    reference = np.array(losses["alone"])
    for way in (devices.Sharded.name, devices.Mapped.name):
        worst = np.abs(np.array(losses[way]) - reference).max()
        print(f"{way} on {jax.device_count()} devices: within {worst:.1e} of one device")
    print(machine.line())
    return losses
