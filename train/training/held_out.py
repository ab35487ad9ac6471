"""Evaluation while a model trains: the held-out part, its loss and accuracy, the best parameters.

The model is evaluated as it trains: ESP attention sorts softly at the temperature of the step, and
a run that trains through compiled layers runs these. Dropout is off.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.data.examples import Examples, first_share
from train.recipes.schema import Recipe
from train.runtime import devices
from train.runtime.errors import UserError
from train.training import amortized, factory
from train.training.step import TrainState

BATCH_SIZE = 100


def divide(recipe: Recipe, examples: Examples) -> tuple[Examples, Examples | None]:
    """The examples to train on, and the held-out part: the last of every class.

    The second is None if the recipe does not evaluate.

    Raises:
      UserError: the part would have no example.
    """
    if recipe.evaluate is None:
        return examples, None
    share = recipe.evaluate.held_out
    kept = first_share(examples.labels, 1 - share)
    rest = np.setdiff1d(np.arange(len(examples)), kept)
    if not len(rest):
        raise UserError(
            f"--held-out {share:g} of {len(examples)} training {examples.unit} holds no example: "
            f"choose a larger share"
        )
    return examples.take(kept), examples.take(rest)


class Evaluator:
    """Evaluates a run on its held-out part, and remembers the best parameters.

    Attributes:
      best: see ``step.first_best``; None if the recipe keeps the last parameters.
      note: the latest figures, for the progress line.
    """

    def __init__(
        self, recipe: Recipe, examples: Examples, epoch_steps: int, best: dict[str, Any] | None
    ):
        """Prepares the inputs.

        Args:
          recipe: what is trained; it must have ``evaluate``.
          examples: the held-out part; each process evaluates its share.
          epoch_steps: steps per epoch of the training.
          best: the best parameters so far, as host arrays, or None.
        """
        index, count = devices.share()
        own = examples.take(np.arange(len(examples))[index::count])
        self._inputs, self._labels = recipe.inputs.prepare(own), own.labels
        self._size = len(examples)
        self._every = recipe.evaluate.every * epoch_steps
        self._total = recipe.epochs * epoch_steps
        self._sums = program(recipe, self._total)
        self.best = best
        self.note = ""

    def due(self, step: int) -> bool:
        """Whether the parameters after ``step`` steps are evaluated."""
        return step % self._every == 0 or step == self._total

    def run(self, step: int, params: dict, layers: Any) -> dict[str, float]:
        """Evaluates host parameters and compiled layers after ``step`` steps.

        Returns:
          ``held_out_loss``, mean cross entropy in nats, and ``held_out_accuracy``.
        """
        loss, correct = np.zeros((), np.float64), np.zeros((), np.int64)
        for start in range(0, len(self._labels), BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            sums = self._sums(params, layers, step, self._inputs[part], self._labels[part])
            loss, correct = loss + np.float64(sums[0]), correct + np.int64(sums[1])
        loss, correct = (np.asarray(x) for x in devices.total((loss, correct)))
        if self.best is not None and correct > self.best["correct"]:
            self.best = {"step": np.int32(step), "correct": np.int32(correct), "params": params}
            if layers is not None:
                self.best["amortized"] = layers
        mean, accuracy = float(loss) / self._size, int(correct) / self._size
        self.note = f", held out: loss {mean:.3f}, accuracy {accuracy:.3f}"
        return {"held_out_loss": mean, "held_out_accuracy": accuracy}


@functools.lru_cache(maxsize=4)
def program(recipe: Recipe, num_steps: int) -> Callable:
    """The jitted ``(params, layers, step, inputs, labels) -> (sum of losses, number correct)``.

    Args:
      recipe: what is trained.
      num_steps: steps of the whole run, see ``factory.training``.
    """
    model_at, training = factory.training(recipe, num_steps), amortized.training(recipe)

    @jax.jit
    def sums(params, layers, step, inputs, labels):
        variables = {"params": params}
        if training is not None:
            variables = training.variables(layers, variables)
        logits = model_at(step).apply(variables, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.sum(), jnp.sum(logits.argmax(-1) == labels)

    return sums


def chosen(recipe: Recipe, state: TrainState) -> TrainState:
    """The state whose parameters are the result of a run: the best ones, if the recipe keeps them.

    Before the first evaluation they are those of ``state``.
    """
    best = state.best
    if not recipe.keeps_best or best is None or int(best["correct"]) < 0:
        return state
    return state.replace(
        step=best["step"], params=best["params"], amortized=best.get("amortized", state.amortized)
    )
