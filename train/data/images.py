"""How images become the model's input."""

import dataclasses
import os

import numpy as np

from train.data import resizing
from train.data.examples import Examples


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pixels become the model's input: normalised, and changed a little while training.

    Attributes:
      shape: height, width and channels; images of another size are resized.
      mean, std: per channel, of pixels scaled to 0..1.
      shift: training images are moved by up to this many pixels each way, edges repeated.
      flip: training images are mirrored left to right half of the time.
      crop: training images are a random part of the image, resized (the papers' Cats and Dogs).
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: int = 0
    flip: bool = False
    crop: bool = False
    unit = "images"

    @property
    def dtype(self) -> type:
        """Dtype of the model's input."""
        return np.float32

    def prepare(self, examples: Examples) -> np.ndarray:
        """The model's inputs: all images of ``examples``, normalised."""
        return self.normalise(examples.values)

    def training(self, examples: Examples, rng: np.random.Generator) -> np.ndarray:
        """As ``prepare``, changed at random as training images are."""
        return self.normalise(self.augment(examples.values, rng))

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

    def load(
        self, splits: dict[str, list[dict]], run: str | os.PathLike | None
    ) -> dict[str, np.ndarray]:
        """The images of each split, as ``Examples`` holds them; ``run`` is for texts."""
        del run
        resize = lambda one: resizing.resize(one["image"], self.shape[:2])
        return {name: np.stack([resize(one) for one in read]) for name, read in splits.items()}
