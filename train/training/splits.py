"""Reads the training and the test split of a recipe."""

import dataclasses
import os
import pathlib

import numpy as np

from train.data import tfds
from train.data.examples import Examples, first_share
from train.recipes.schema import Recipe
from train.reporting import progress
from train.runtime import devices


@dataclasses.dataclass(frozen=True)
class Split:
    """The two splits of a recipe's data set, and the folder they were read from.

    Attributes:
      train, test: the examples.
      data_dir: TFDS folder.
    """

    train: Examples
    test: Examples
    data_dir: pathlib.Path


def load_data(
    recipe: Recipe, data_dir: str | os.PathLike | None = None, run: str | os.PathLike | None = None
) -> Split:
    """Reads both splits of the recipe's data set; of the training split, ``train_share`` alone.

    Args:
      recipe: names the data set and its splits.
      data_dir: TFDS folder, see ``tfds.resolve``.
      run: run folder in which a text recipe stores its tokenizer, or None to store nothing.

    Raises:
      UserError: the data set does not exist, or the stored tokenizer cannot be used.
    """
    folder = tfds.resolve(data_dir, packaged=recipe.packaged)
    splits = dict(zip(("train", "test"), recipe.splits, strict=True))
    sources = {key: tfds.read(recipe.dataset, name, folder) for key, name in splits.items()}
    if recipe.train_share < 1:
        sources["train"] = _subset(*sources["train"], recipe.train_share)
    values = recipe.inputs.load({key: records for key, (records, _) in sources.items()}, run)
    examples = {
        key: Examples(
            values=values[key],
            labels=_labels(records),
            class_names=names,
            unit=recipe.inputs.unit,
        )
        for key, (records, names) in sources.items()
    }
    return Split(**examples, data_dir=folder)


def _labels(records: list[dict]) -> np.ndarray:
    return np.array([example["label"] for example in records], np.int32)


def _subset(records: list[dict], names: tuple[str, ...], share: float):
    """The first records of every class, and the names of the classes."""
    return [records[index] for index in first_share(_labels(records), share)], names


def announce(split: Split) -> None:
    """Prints how much was read, so that a subset is not mistaken for the full data set."""
    if not devices.is_first():
        return
    progress.console().print(
        f"read {len(split.train):,} training and {len(split.test):,} test "
        f"{split.test.unit} from {split.data_dir}",
        markup=False,
    )
