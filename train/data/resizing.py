"""Resizes images and crops them at random (paper, Cats and Dogs: the Sinkformer protocol)."""

import math

import numpy as np

from train.runtime.errors import need

AREA = (0.08, 1.0)  # share of the image that a random crop covers
ASPECT = (3 / 4, 4 / 3)  # width over height of a crop
TRIES = 10  # crops drawn before the whole image is used


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes an image, bilinear with antialiasing.

    Args:
      image: ``(height, width, channels)`` uint8, one or three channels.
      size: new height and width.

    Returns:
      ``(*size, channels)`` uint8. An image that already has this size is returned unchanged.
    """
    if image.shape[:2] == tuple(size):
        return image
    pillow = need("PIL.Image")
    drawn = pillow.fromarray(image if image.shape[-1] == 3 else image[..., 0])
    drawn = drawn.resize((size[1], size[0]), pillow.Resampling.BILINEAR)
    return np.asarray(drawn).reshape(*size, image.shape[-1])


def crop_window(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part of an image.

    Its share of the area is uniform in ``AREA`` and its aspect ratio is log-uniform in ``ASPECT``.
    The result is the whole image if ``TRIES`` draws did not fit into it.
    """
    for _ in range(TRIES):
        area = height * width * rng.uniform(*AREA)
        ratio = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < tall <= height and 0 < wide <= width:
            top = int(rng.integers(0, height - tall + 1))
            return top, int(rng.integers(0, width - wide + 1)), tall, wide
    return 0, 0, height, width


def random_crop(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random part of a uint8 image, resized to the image's own size."""
    top, left, tall, wide = crop_window(*image.shape[:2], rng)
    return resize(image[top : top + tall, left : left + wide], image.shape[:2])
