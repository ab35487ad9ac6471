"""A trained teacher: its parameters and its predictions."""

import dataclasses
import os
from collections.abc import Callable

import jax
import numpy as np

from train.data.examples import Examples
from train.recipes.schema import Recipe
from train.training import amortized, factory, held_out, step
from train.training.checkpoints import About, Checkpoints


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A trained model.

    Attributes:
      recipe: the recipe it was trained with.
      seed: seed of the run.
      step: number of steps after which the model had these parameters.
      variables: the linen variables, ``{"params": ...}``.
      compiled: variables with the compiled layers that it trained through, or None.
    """

    recipe: Recipe
    seed: int
    step: int
    variables: dict
    compiled: dict | None = None


def load_teacher(run: str | os.PathLike) -> Teacher:
    """Loads the newest good checkpoint of a run folder.

    Raises:
      UserError: there is no good checkpoint.
    """
    with Checkpoints(run) as checkpoints:
        state, about = checkpoints.restore(_shapes)
    return of_state(about.recipe, about.seed, state)


def load_states(run: str | os.PathLike, count: int) -> list[dict]:
    """The linen variables of the newest ``count`` checkpoints of a run, the oldest of them first.

    They are those with which the training went on, not the best ones.

    Raises:
      UserError: there are fewer, or one of them is damaged.
    """
    with Checkpoints(run) as checkpoints:
        restored = checkpoints.restore_newest(_shapes, count)
    return [{"params": state.params} for state, _ in restored]


def _shapes(about: About) -> step.TrainState:
    """The shapes of a state of this recipe."""
    tx = step.optimizer(about.recipe, 1)
    model, inputs = factory.build(about.recipe), about.recipe.example_inputs()
    layers = amortized.training(about.recipe)
    best, key = about.recipe.keeps_best, jax.random.key(0, impl=about.generator)
    return jax.eval_shape(lambda: step.create(model, tx, inputs, key, layers, keep_best=best))


def of_state(recipe: Recipe, seed: int, state: step.TrainState) -> Teacher:
    """The teacher of a training state of host arrays: its best parameters, or its last ones."""
    state = held_out.chosen(recipe, state)
    compiled = amortized.compiled_variables(recipe, state)
    return Teacher(recipe, seed, int(state.step), {"params": state.params}, compiled)


def predict(
    apply: Callable, variables: dict, inputs: np.ndarray, *, batch_size: int = 100
) -> np.ndarray:
    """Logits of a model's inputs, batch by batch.

    Args:
      apply: ``apply(variables, inputs)``, the jitted ``apply`` of a linen module.
      variables: variables of the module; with the collection ``"asap"`` the compiled layers run.
      inputs: inputs of the model, ``(examples, ...)``.
      batch_size: examples per call.

    Returns:
      ``(examples, classes)``.
    """
    parts = [
        np.asarray(apply(variables, inputs[start : start + batch_size]))
        for start in range(0, len(inputs), batch_size)
    ]
    return np.concatenate(parts)


def accuracy_on(teacher: Teacher, examples: Examples) -> float:
    """Share of the examples that the teacher classifies correctly."""
    inputs = teacher.recipe.inputs.prepare(examples)
    apply = jax.jit(factory.build(teacher.recipe).apply)
    return accuracy(predict(apply, teacher.variables, inputs), examples.labels)


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of the rows of ``(examples, classes)`` logits whose largest entry is at the label."""
    return float(np.mean(logits.argmax(-1) == labels))
