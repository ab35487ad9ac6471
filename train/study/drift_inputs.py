"""Inputs on which a compiled layer may drift: other data sets, random inputs, other lengths."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from train.data import tfds
from train.data.text import PAD, SPECIAL, Tokens, encode, tokenizer_for
from train.recipes import catalogue
from train.recipes.schema import Recipe
from train.runtime.errors import UserError
from train.training.splits import Split
from train.training.teacher import Teacher

OWN = "own test set"


def inputs_of(
    folder: pathlib.Path, trained: Teacher, split: Split, count: int
) -> dict[str, np.ndarray]:
    """Inputs of the model by name, the teacher's own test set first.

    Args:
      folder: the run folder.
      trained: the teacher.
      split: its data.
      count: largest number of examples of each kind.
    """
    recipe, test = trained.recipe, sampled(len(split.test), count)
    own = recipe.inputs.prepare(split.test.take(test))
    found = {OWN: own}
    if not isinstance(recipe.inputs, Tokens):
        noise = np.random.default_rng(0).integers(0, 256, split.test.values[test].shape, np.uint8)
        examples = dataclasses.replace(split.test.take(test), values=noise)
        return found | {"random pixels": recipe.inputs.prepare(examples)}
    found |= _other_texts(folder, recipe, split.data_dir, count)
    found["random tokens"] = random_tokens(own, recipe.inputs.vocab_size)
    found["half the length"] = own[:, : recipe.inputs.length // 2]
    texts = _texts(recipe, recipe.inputs, split.data_dir, count)
    tokenizer = tokenizer_for((), recipe.inputs, folder)
    found["twice the length"] = encode(tokenizer, texts, 2 * recipe.inputs.length)
    return found


def random_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Tokens drawn uniformly, padded as ``tokens (examples, length)``."""
    drawn = np.random.default_rng(0).integers(len(SPECIAL), vocab_size, tokens.shape, np.int32)
    return np.where(tokens == PAD, np.int32(PAD), drawn)


def sampled(size: int, count: int) -> np.ndarray:
    """Up to ``count`` positions below ``size``, always the same ones, in ascending order."""
    return np.sort(np.random.default_rng(0).permutation(size)[:count])


def _other_texts(
    folder: pathlib.Path, recipe: Recipe, data_dir: pathlib.Path, count: int
) -> dict[str, np.ndarray]:
    """Texts of the other text recipes whose data set is in ``data_dir``."""
    tokenizer, found = tokenizer_for((), recipe.inputs, folder), {}
    for other in catalogue.listed():
        if not other.is_text or other.name == recipe.name or other.name in found:
            continue
        assert isinstance(other.inputs, Tokens)
        try:
            texts = _texts(other, other.inputs, data_dir, count)
        except UserError:  # the folder does not have this data set
            continue
        found[other.name] = encode(tokenizer, texts, recipe.inputs.length)
    return found


def _texts(recipe: Recipe, tokens: Tokens, data_dir: pathlib.Path, count: int) -> Sequence[str]:
    """Texts of the test split of a recipe."""
    records, _ = tfds.read(recipe.dataset, recipe.splits[1], data_dir)
    return [tokens.join(records[i]) for i in sampled(len(records), count)]
