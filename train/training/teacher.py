"""A trained teacher: the data of its recipe, its parameters, its answers."""

import dataclasses
import os
import pathlib

import jax
import numpy as np

from train import models
from train.data import images as data
from train.data import text
from train.data.images import Examples
from train.recipes.schema import Recipe
from train.reporting import progress
from train.runtime import devices
from train.training import step as steps
from train.training.checkpoints import About, Checkpoints


@dataclasses.dataclass(frozen=True)
class Split:
    """The two splits of a recipe's data set and where they were read.

    Attributes:
      train, test: the examples.
      data_dir: TFDS folder.
    """

    train: Examples | text.Texts
    test: Examples | text.Texts
    data_dir: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A trained model.

    Attributes:
      recipe: what it was trained by.
      seed: seed of the run.
      step: steps taken.
      variables: the linen variables, ``{"params": ...}``.
    """

    recipe: Recipe
    seed: int
    step: int
    variables: dict


def load_data(
    recipe: Recipe,
    data_dir: str | os.PathLike | None = None,
    run: str | os.PathLike | None = None,
) -> Split:
    """Reads both splits of the recipe's data set.

    Args:
      recipe: says which set.
      data_dir: TFDS folder.
      run: run folder, which keeps the tokenizer of a text recipe; None keeps it nowhere.

    Raises:
      UserError: the set is not there; the stored tokenizer does not fit.
    """
    found = data.resolve(data_dir, packaged=recipe.packaged)
    names = dict(zip(("train", "test"), recipe.splits, strict=True))
    if recipe.tokens is None:
        size = recipe.pixels.size
        splits = {key: data.load(recipe.dataset, name, found, size) for key, name in names.items()}
    else:
        sources = {key: data.read(recipe.dataset, name, found) for key, name in names.items()}
        splits = text.load(recipe.tokens, sources, run)
    return Split(**splits, data_dir=found)


def announce(split: Split) -> None:
    """Prints what was read and from where, so that nobody takes a small copy for the whole."""
    if not devices.is_first():
        return
    progress.console().print(
        f"read {len(split.train):,} training and {len(split.test):,} test "
        f"{split.test.unit} from {split.data_dir}",
        markup=False,
    )


def load(run: str | os.PathLike) -> Teacher:
    """The newest good checkpoint of a run folder.

    Raises:
      UserError: there is none.
    """

    def like(about: About) -> steps.TrainState:
        tx = steps.optimizer(about.recipe, 1)
        model, inputs = models.build(about.recipe), about.recipe.example_inputs()
        return jax.eval_shape(lambda: steps.create(model, tx, inputs, jax.random.key(0)))

    with Checkpoints(run) as checkpoints:
        state, about = checkpoints.restore(like)
    return Teacher(about.recipe, about.seed, about.step, {"params": state.params})


def predict(apply, variables: dict, images: np.ndarray, *, batch_size: int = 100) -> np.ndarray:
    """Logits of a model's inputs, batch by batch.

    Args:
      apply: ``apply(variables, images)``, the jitted ``apply`` of a linen module.
      variables: the module's; with the ``"asap"`` collection the compiled operator runs.
      images: inputs of the model, ``(examples, ...)``.
      batch_size: images a call.

    Returns:
      ``(examples, classes)``.
    """
    parts = [
        np.asarray(apply(variables, images[start : start + batch_size]))
        for start in range(0, len(images), batch_size)
    ]
    return np.concatenate(parts)


def test_accuracy(teacher: Teacher, examples: Examples) -> float:
    """Share of the examples that the teacher classifies rightly."""
    images = teacher.recipe.inputs.prepare(examples)
    apply = jax.jit(models.build(teacher.recipe).apply)
    return accuracy(predict(apply, teacher.variables, images), examples.labels)


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows of ``(examples, classes)`` logits whose largest entry is at the label."""
    return float(np.mean(logits.argmax(-1) == labels))
