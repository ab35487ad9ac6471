"""Turns images into inputs of the model."""

import dataclasses
import os

import numpy as np

from train.data import resizing
from train.data.examples import Examples


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Turns images into inputs of the model: normalises them, and augments them in training.

    Attributes:
      shape: height, width and channels; images of another size are resized.
      mean, std: per channel, of pixels scaled to 0..1.
      shift: training images are moved by up to this many pixels each way; edges are repeated.
      flip: training images are mirrored left to right with probability 1/2.
      crop: training images are a random part of the image, resized (paper, Cats and Dogs).
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
        """As ``prepare``, but after random augmentation."""
        return self.normalise(self.augment(examples.values, rng))

    def normalise(self, images: np.ndarray) -> np.ndarray:
        """Float32 images with mean about 0 and standard deviation about 1, from uint8 images."""
        mean = np.asarray(self.mean, np.float32)
        std = np.asarray(self.std, np.float32)
        return (images.astype(np.float32) / np.float32(255) - mean) / std

    def augment(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Crops, mirrors and moves uint8 images ``(batch, height, width, channels)`` at random."""
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
        """The resized images of each split, for ``Examples.values``; ``run`` is for texts only."""
        del run
        resize = lambda example: resizing.resize(example["image"], self.shape[:2])
        return {
            name: np.stack([resize(example) for example in examples])
            for name, examples in splits.items()
        }
