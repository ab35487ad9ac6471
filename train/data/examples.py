"""One split in memory, and its shuffled training batches.

A batch depends only on the seed and the step, so a resumed run sees the same batches as an
uninterrupted one.
"""

import dataclasses
import functools

import numpy as np

from train.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Examples:
    """One split in memory.

    Attributes:
      values: images ``(examples, height, width, channels)`` uint8, 0 to 255; or texts
        ``(examples, length)`` int32 tokens, filled up with ``PAD``. Every text has a token that is
        not ``PAD``.
      labels: ``(examples,)`` int32.
      class_names: one name per label.
      unit: ``"images"`` or ``"texts"``, for messages.
    """

    values: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    unit: str = "images"

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray | slice) -> "Examples":
        """The examples at ``indices`` (an array of integers, or a slice)."""
        return dataclasses.replace(self, values=self.values[indices], labels=self.labels[indices])


def first_share(labels: np.ndarray, share: float) -> np.ndarray:
    """Positions of the first examples of every class, in ascending order.

    Args:
      labels: ``(examples,)`` integers.
      share: in (0, 1]; of a class with n examples, ``round(share * n)`` are taken, at least one.

    Returns:
      Indices into ``labels``.
    """
    places = (np.flatnonzero(labels == label) for label in np.unique(labels))
    chosen = [place[: max(1, round(share * len(place)))] for place in places]
    return np.sort(np.concatenate(chosen))


class Batches:
    """Shuffled training batches.

    Every epoch has a new order. Examples that do not fill a last batch are dropped.
    """

    def __init__(self, examples: Examples, inputs, batch_size: int, seed: int):
        """Batches of one split.

        Args:
          examples: the split.
          inputs: ``Pixels`` or ``Tokens``, which turn examples into inputs of the model.
          batch_size: examples per batch.
          seed: fixes order and augmentation.

        Raises:
          UserError: the batch size is not in 1..examples.
        """
        if not 1 <= batch_size <= len(examples):
            raise UserError(
                f"batch_size {batch_size} must be in 1..{len(examples)}, the number of training "
                f"{examples.unit}"
            )
        self.examples = examples
        self.inputs = inputs
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = len(examples) // batch_size
        self._order = functools.lru_cache(maxsize=1)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))

    def at(self, step: int, share: tuple[int, int] = (0, 1)) -> tuple[np.ndarray, np.ndarray]:
        """The batch of a step.

        Args:
          step: counted from 0 over all epochs.
          share: ``(index, count)`` of this process. The batch is cut into ``count`` equal parts and
            part ``index`` is returned. Together the parts are the batch of a single process.

        Returns:
          ``(inputs, labels)``: normalised float32 images ``(batch, height, width, channels)`` or
          int32 tokens ``(batch, length)``, and int32 ``(batch,)``.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        chosen = self._order(epoch)[start : start + self.batch_size]
        rng = np.random.default_rng([self.seed, epoch, index])
        examples = self.examples.take(chosen)
        process, count = share
        rows = self.batch_size // count
        part = slice(process * rows, (process + 1) * rows)
        return self.inputs.training(examples, rng)[part], examples.labels[part]
