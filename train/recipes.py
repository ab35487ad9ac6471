"""Recipes: everything that decides a training run, as frozen values.

``python -m train recipes`` lists them with cost and expected accuracy.  A recipe is stored in every
checkpoint as JSON and compared when a run is resumed.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import asap_jax as aj
from train.data import Pixels
from train.extras import UserError

FAMILIES = ("sinkhorn", "softmax")


@dataclasses.dataclass(frozen=True)
class ViT:
    """Sizes of a ``train.models.vit.VisionTransformer``; see there for each."""

    patch_size: int
    width: int
    depth: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    position_stddev: float = 0.02


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training run.

    Attributes:
      name: what the command line calls it.
      summary: one line on what it is and where it comes from.
      cost: how long it takes, and on what.
      expected: test accuracy to expect, and on how much data.
      dataset: name in the TFDS catalogue; splits ``train`` and ``test`` are read.
      image_shape: height, width, channels.
      num_classes: labels.
      pixels: normalisation and augmentation.
      model: sizes of the model.
      attention: ``"sinkhorn"`` or ``"softmax"`` (the twin without column balance).
      spec: the Sinkhorn teacher's convention; unused by ``"softmax"``.
      epochs: passes over the training split.
      batch_size: images a step.
      learning_rate: Adam's, at the start.
      drops: epochs after which the learning rate is divided by ten.
      packaged: made for the packaged images: read them unless ``--data-dir`` says otherwise.
    """

    name: str
    summary: str
    cost: str
    expected: str
    dataset: str
    image_shape: tuple[int, int, int]
    num_classes: int
    pixels: Pixels
    model: ViT
    spec: aj.SinkhornSpec
    epochs: int
    batch_size: int
    learning_rate: float
    drops: tuple[int, ...] = ()
    attention: str = "sinkhorn"
    packaged: bool = False

    def __post_init__(self):
        if self.attention not in FAMILIES:
            raise ValueError(f"attention {self.attention!r} must be one of {FAMILIES}")

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Recipe":
        """The recipe that ``to_json`` gave, also after a round trip through JSON text."""
        return _rebuild(cls, stored)


def _rebuild(kind, stored):
    """A dataclass of type ``kind`` from plain dicts; JSON's lists become tuples again."""
    values = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in stored:
            continue
        value = stored[field.name]
        if dataclasses.is_dataclass(hints[field.name]):
            value = _rebuild(hints[field.name], value)
        elif isinstance(value, list):
            value = tuple(value)
        values[field.name] = value
    return kind(**values)


def differences(stored: Recipe, asked: Recipe) -> list[str]:
    """Names of the settings in which two recipes differ, with both values; texts do not count."""
    lines = []
    for field in dataclasses.fields(Recipe):
        if field.name in ("summary", "cost", "expected"):
            continue
        old, new = getattr(stored, field.name), getattr(asked, field.name)
        if old != new:
            lines.append(f"{field.name} was {old!r} and is now {new!r}")
    return lines


def find(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
      UserError: no such recipe; the message lists them.
    """
    if name not in RECIPES:
        raise UserError(f"no recipe {name!r}: choose one of {', '.join(sorted(RECIPES))}")
    return RECIPES[name]


_FASHION = Pixels(mean=(0.2860,), std=(0.3530,), shift=1, flip=True)

DEMO = Recipe(
    name="demo",
    summary="2-layer ViT with S=10 on the packaged 2,000 Fashion-MNIST images",
    cost="2 to 3 minutes on 2 CPU cores, table and picture included",
    expected="0.79 on the packaged 500 test images (0.792, 0.806, 0.776 for seeds 0, 1, 2)",
    dataset="fashion_mnist",
    image_shape=(28, 28, 1),
    num_classes=10,
    pixels=_FASHION,
    model=ViT(
        patch_size=4,
        width=64,
        depth=2,
        num_heads=4,
        head_dim=8,
        mlp_dim=256,
        position_stddev=0.5,
    ),
    spec=aj.SinkhornSpec(num_steps=10),
    epochs=50,
    batch_size=50,
    learning_rate=7e-4,
    drops=(38,),
    packaged=True,
)

FASHION_MNIST = Recipe(
    name="fashion_mnist",
    summary="4-layer ViT with S=10 on Fashion-MNIST",
    cost="not measured yet (12,000 images: 3,600 steps)",
    expected="not measured yet",
    dataset="fashion_mnist",
    image_shape=(28, 28, 1),
    num_classes=10,
    pixels=_FASHION,
    model=ViT(
        patch_size=4,
        width=64,
        depth=4,
        num_heads=4,
        head_dim=16,
        mlp_dim=128,
        position_stddev=0.5,
    ),
    spec=aj.SinkhornSpec(num_steps=10),
    epochs=15,
    batch_size=50,
    learning_rate=1e-3,
    drops=(11,),
)

MNIST = Recipe(
    name="mnist",
    summary="one layer, one head, attention and residual only, S=5 (paper, shallow MNIST layer)",
    cost="not measured yet (20,000 images: 9,000 steps)",
    expected="not measured yet; the paper has 0.96 from 60,000 images",
    dataset="mnist",
    image_shape=(28, 28, 1),
    num_classes=10,
    pixels=Pixels(mean=(0.1307,), std=(0.3081,)),
    model=ViT(
        patch_size=7,
        width=128,
        depth=1,
        num_heads=1,
        head_dim=64,
        mlp_dim=0,
        position_stddev=1.0,
    ),
    spec=aj.SinkhornSpec(num_steps=5),
    epochs=45,
    batch_size=100,
    learning_rate=2e-3,
    drops=(35, 41),
)

RECIPES = {recipe.name: recipe for recipe in (DEMO, FASHION_MNIST, MNIST)}
