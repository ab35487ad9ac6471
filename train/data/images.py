"""Data sets in TFDS form, read without TensorFlow and held in memory; image sets as batches.

A batch is a pure function of the seed and the step, so a resumed run sees what an uninterrupted
one would have seen.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib

import numpy as np

from train.data import resizing
from train.runtime.errors import UserError, need

PACKAGED = pathlib.Path(__file__).parent / "packaged"
VARIABLE = "TFDS_DATA_DIR"


@dataclasses.dataclass(frozen=True)
class Examples:
    """One split in memory.

    Attributes:
      images: ``(examples, height, width, channels)`` uint8, 0 to 255.
      labels: ``(examples,)`` int32.
      class_names: one name per label.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    unit = "images"

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices) -> "Examples":
        """The examples at ``indices`` (an array of integers, or a slice)."""
        return dataclasses.replace(self, images=self.images[indices], labels=self.labels[indices])


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pixels become the model's input: normalised, and changed a little while training.

    Attributes:
      mean, std: per channel, of pixels scaled to 0..1.
      shift: training images are moved by up to this many pixels each way, edges repeated.
      flip: training images are mirrored left to right half of the time.
      crop: training images are a random part of the image, resized (the papers' Cats and Dogs).
      size: height and width that images of other sizes are resized to; None for sets whose images
        share one size.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: int = 0
    flip: bool = False
    crop: bool = False
    size: tuple[int, int] | None = None

    @property
    def dtype(self) -> type:
        """Dtype of the model's input."""
        return np.float32

    def prepare(self, examples: Examples) -> np.ndarray:
        """The model's inputs: all images of ``examples``, normalised."""
        return self.normalise(examples.images)

    def training(self, examples: Examples, rng: np.random.Generator) -> np.ndarray:
        """As ``prepare``, changed at random as training images are."""
        return self.normalise(self.augment(examples.images, rng))

    def normalise(self, images: np.ndarray) -> np.ndarray:
        """Float32 images of mean about 0 and spread about 1, from uint8 of the same shape."""
        mean = np.asarray(self.mean, np.float32)
        std = np.asarray(self.std, np.float32)
        return (images.astype(np.float32) / np.float32(255) - mean) / std

    def augment(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Moves and mirrors uint8 images ``(batch, height, width, channels)`` at random."""
        count, height, width, _ = images.shape
        if self.crop:
            images = np.stack([resizing.random_crop(image, rng) for image in images])
        if self.flip:
            mirrored = rng.random((count, 1, 1, 1)) < 0.5
            images = np.where(mirrored, images[:, :, ::-1], images)
        if self.shift:
            s = self.shift
            padded = np.pad(images, ((0, 0), (s, s), (s, s), (0, 0)), mode="edge")
            corners = rng.integers(0, 2 * s + 1, (count, 2))
            images = np.stack(
                [
                    image[top : top + height, left : left + width]
                    for image, (top, left) in zip(padded, corners, strict=True)
                ]
            )
        return images


class Batches:
    """Shuffled training batches, a pure function of the seed and the step.

    An epoch is a fresh permutation; what is left over after whole batches is dropped.
    """

    def __init__(self, examples, inputs, batch_size: int, seed: int):
        """Batches of one split.

        Args:
          examples: ``Examples`` or ``train.text.Texts``.
          inputs: ``Pixels`` or ``train.text.Tokens``, how an example becomes an input.
          batch_size: examples a batch.
          seed: fixes order and augmentation.

        Raises:
          UserError: the batch size is not in 1..examples.
        """
        if not 1 <= batch_size <= len(examples):
            raise UserError(
                f"batch_size {batch_size} must be in 1..{len(examples)}, the training "
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
        """Batch of a step, counted from 0 over all epochs.

        Args:
          step: which.
          share: ``(index, count)``: give only that one of ``count`` equal parts of the batch; the
            parts together are the batch that one process would have drawn.

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


def resolve(data_dir: str | os.PathLike | None, *, packaged: bool = False) -> pathlib.Path:
    """The TFDS folder to read: the argument, else the environment, else the packaged folder.

    Args:
      data_dir: what the user gave with ``--data-dir``.
      packaged: skip the environment variable ``TFDS_DATA_DIR`` (recipes made for the packaged
        images).
    """
    if data_dir is not None:
        return pathlib.Path(data_dir).expanduser()
    if not packaged and os.environ.get(VARIABLE):
        return pathlib.Path(os.environ[VARIABLE]).expanduser()
    return PACKAGED


def builder(name: str, data_dir: str | os.PathLike):
    """The TFDS builder of a prepared data set.

    Args:
      name: name in the TFDS catalogue, or of a folder in ``data_dir``.
      data_dir: TFDS folder.

    Raises:
      UserError: TFDS is not installed, or the set is not there in array_record form; the message
        says what to run.
    """
    tfds = need("tensorflow_datasets")
    need("array_record.python.array_record_module")
    need("PIL.Image")
    try:
        with _quiet():
            found = tfds.builder(name, data_dir=os.fspath(data_dir), file_format="array_record")
            ready = found.is_prepared()
    except tfds.core.registered.DatasetNotFoundError:
        ready = False
    if not ready:
        raise UserError(
            f"no data set {name!r} in array_record form in {data_dir}: name a TFDS folder that has "
            f"it (--data-dir DIR or {VARIABLE}=DIR), or make one with `pip install tensorflow "
            f'importlib_resources && python -c "import tensorflow_datasets as t; '
            f"t.builder('{name}', data_dir='DIR', file_format='array_record')"
            f'.download_and_prepare()"`'
        )
    return found


def read(name: str, split: str, data_dir: str | os.PathLike) -> tuple[list[dict], tuple[str, ...]]:
    """All examples of one split as TFDS gives them, and the names of the classes.

    Args:
      name: name in the TFDS catalogue.
      split: a TFDS split, such as ``"train"`` or ``"test[:100]"``.
      data_dir: TFDS folder.

    Raises:
      UserError: the set or the split is not there.
    """
    found = builder(name, data_dir)
    whole = split.split("[")[0]
    if whole not in found.info.splits:
        raise UserError(
            f"data set {name!r} in {data_dir} has no split {whole!r}, "
            f"only {', '.join(found.info.splits)}: prepare it again, whole"
        )
    with _quiet():
        source = found.as_data_source(split)
        examples = [source[index] for index in range(len(source))]
    return examples, tuple(found.info.features["label"].names)


def load(
    name: str, split: str, data_dir: str | os.PathLike, size: tuple[int, int] | None = None
) -> Examples:
    """Reads one split of an image set into memory.

    Args:
      name: name in the TFDS catalogue.
      split: a TFDS split, such as ``"train"`` or ``"test[:100]"``.
      data_dir: TFDS folder.
      size: height and width to resize to; None where all images share one size.

    Raises:
      UserError: the set or the split is not there.
    """
    examples, names = read(name, split, data_dir)
    images = [example["image"] for example in examples]
    return Examples(
        images=np.stack(images if size is None else [resizing.resize(x, size) for x in images]),
        labels=np.array([example["label"] for example in examples], np.int32),
        class_names=names,
    )


@contextlib.contextmanager
def _quiet():
    """Holds back TFDS's remarks about optional packages and folders it tried."""
    logging = need("absl.logging")
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
