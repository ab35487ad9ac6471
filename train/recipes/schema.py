"""The ``Recipe`` dataclass: all settings of a training run but the seed.

Every checkpoint stores its recipe as JSON.  When a run is resumed, the stored recipe must equal the
requested one.  The recipes themselves are listed in ``train.recipes.catalogue``.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

import asap_jax as aj
from train.data.images import Pixels
from train.data.text import Tokens
from train.models.text_encoder import EncoderSizes
from train.models.vit import ViTSizes
from train.recipes.amortization import Amortization
from train.recipes.esp import AS_RELEASED, Esp
from train.recipes.evaluation import Evaluation

FAMILIES = ("sinkhorn", "softmax", "diff", "esp", "esp_annealed")
ESP_FAMILIES = ("esp", "esp_annealed")
SOFTMAX_FAMILIES = ("softmax", "diff")
"""Families of softmax maps, which may train with another learning rate."""
PRESETS = ("paper", "small")
OLD_PRESETS = {"full": "paper"}
"""Earlier names of presets, still read in checkpoints and on the command line."""
UNCOMPARED = ("summary", "cost", "expected", "softmax_learning_rate")
"""Fields that do not change a run: ``learning_rate`` already is the one of its family."""
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training run.

    Attributes:
      name: name on the command line.
      summary: one line on what it is and where it comes from.
      cost: how long it takes, and on what.
      expected: test accuracy to expect, and on how much data.
      dataset: name in the TFDS catalogue.
      inputs: turns images or texts into inputs of the model.
      num_classes: number of labels.
      model: sizes of the model.
      spec: settings of Sinkhorn attention; of the other families, only ESP uses its ``padding``.
      esp: settings of ESP attention; the other families do not use them.
      detach_key_dual: train Sinkhorn attention without a gradient through its key dual, see
        ``aj.sinkhorn_attention``.
      epochs: passes over the training split.
      batch_size: examples per step.
      learning_rate: initial learning rate of Adam.
      softmax_learning_rate: replaces ``learning_rate`` when ``with_attention`` asks for a family of
        softmax maps; None for the same rate.
      splits: TFDS splits to train and to test on.
      train_share: share of the training split to train on, in (0, 1]: the first examples of every
        class.
      drops: epochs after which the learning rate is divided by ten.
      attention: family of the attention weights, see ``train.training.factory.attention``.
      compute_dtype: ``"float32"`` or ``"bfloat16"`` (mixed precision: parameters, optimiser,
        attention scores and loss stay float32).
      accumulate: number of parts of a batch that are computed one after the other, to save memory.
      packaged: made for the packaged images, which are read unless ``--data-dir`` is given.
      preset: ``"paper"`` (the paper's sizes) or ``"small"`` (minutes on two CPU cores).
      amortize: None, or how the model trains through compiled layers.
      evaluate: None, or how the model is evaluated while it trains.
    """

    name: str
    summary: str
    cost: str
    expected: str
    dataset: str
    inputs: Pixels | Tokens
    num_classes: int
    model: ViTSizes | EncoderSizes
    spec: aj.SinkhornSpec
    epochs: int
    batch_size: int
    learning_rate: float
    softmax_learning_rate: float | None = None
    splits: tuple[str, str] = ("train", "test")
    train_share: float = 1.0
    drops: tuple[int, ...] = ()
    attention: str = "sinkhorn"
    compute_dtype: str = "float32"
    accumulate: int = 1
    packaged: bool = False
    preset: str = "paper"
    amortize: Amortization | None = None
    evaluate: Evaluation | None = None
    esp: Esp = AS_RELEASED
    detach_key_dual: bool = False

    def __post_init__(self):
        for name, known in (
            ("attention", FAMILIES),
            ("compute_dtype", DTYPES),
            ("preset", PRESETS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} must be one of {known}")
        kind = EncoderSizes if self.is_text else ViTSizes
        if not isinstance(self.model, kind):
            raise ValueError(
                f"a recipe with {type(self.inputs).__name__} inputs needs a model of type "
                f"{kind.__name__}"
            )
        for name in ("epochs", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("learning_rate", "softmax_learning_rate"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} {rate} must be above 0")
        if not 0 < self.train_share <= 1:
            raise ValueError(f"train_share {self.train_share} must be in (0, 1]")
        if self.attention == "diff" and self.model.num_heads % 2:
            raise ValueError(
                f"attention 'diff' takes the difference of two heads: num_heads "
                f"{self.model.num_heads} must be even"
            )
        if not self.is_text:
            patch, sides = self.model.patch_size, self.inputs.shape[:2]
            if patch < 1 or any(side % patch for side in sides):
                raise ValueError(
                    f"patch_size {patch} must divide the {sides[0]}x{sides[1]} pixels of an image"
                )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate {self.accumulate} must divide batch_size {self.batch_size}"
            )
        if self.detach_key_dual:
            self._check_detached()
        if self.amortize is not None:
            self.amortize.check(self.attention, self.spec)

    def _check_detached(self) -> None:
        if self.attention != "sinkhorn":
            raise ValueError(f"detach_key_dual is for sinkhorn attention, got {self.attention!r}")
        if self.spec.num_steps == 1:
            raise ValueError("detach_key_dual needs num_steps >= 2: row softmax has no key dual")
        if self.amortize is not None:
            raise ValueError("detach_key_dual is for training with the loop, got amortize")

    @property
    def is_text(self) -> bool:
        """Whether the inputs are texts; otherwise they are images."""
        return isinstance(self.inputs, Tokens)

    @property
    def keeps_best(self) -> bool:
        """Whether the result of a run has the parameters of the best evaluation."""
        return self.evaluate is not None and self.evaluate.keep == "best"

    def with_attention(self, family: str) -> "Recipe":
        """The recipe with another family of attention, and the learning rate of that family."""
        rate = self.softmax_learning_rate if family in SOFTMAX_FAMILIES else None
        return dataclasses.replace(
            self, attention=family, learning_rate=self.learning_rate if rate is None else rate
        )

    def with_epochs(self, epochs: int) -> "Recipe":
        """The recipe with ``epochs`` epochs, at least one; the rate drops at the same share."""
        epochs = max(1, epochs)
        drops = tuple(max(1, round(drop * epochs / self.epochs)) for drop in self.drops)
        return dataclasses.replace(self, epochs=epochs, drops=drops)

    def example_inputs(self, count: int = 1) -> np.ndarray:
        """Zeros with the shape and dtype of ``count`` inputs."""
        return np.zeros((count, *self.inputs.shape), self.inputs.dtype)

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Recipe":
        """Rebuilds a recipe from ``to_json``, also after a round trip through JSON text."""
        preset = stored.get("preset", "paper")
        return _rebuild(cls, {**stored, "preset": OLD_PRESETS.get(preset, preset)})


def _rebuild(kind, stored):
    """A dataclass of type ``kind`` from plain dicts; JSON's lists become tuples again."""
    values = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in stored:
            continue
        value = stored[field.name]
        if isinstance(value, Mapping):
            value = _rebuild(_dataclass_for(hints[field.name], value), value)
        elif isinstance(value, list):
            value = tuple(value)
        values[field.name] = value
    return kind(**values)


def _dataclass_for(hint, stored: Mapping):
    """``hint`` itself, or the member of a union that has all stored fields."""
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if dataclasses.is_dataclass(kind)]
    names = lambda kind: {field.name for field in dataclasses.fields(kind)}
    return next(kind for kind in kinds if set(stored) <= names(kind))


def differences(stored: Recipe, requested: Recipe) -> list[str]:
    """One line for each setting that differs, with both values.

    Fields that do not change a run are not compared, see ``UNCOMPARED``.
    """
    lines = []
    for field in dataclasses.fields(Recipe):
        if field.name in UNCOMPARED:
            continue
        if field.name == "esp" and not {stored.attention, requested.attention} & {*ESP_FAMILIES}:
            continue
        old, new = getattr(stored, field.name), getattr(requested, field.name)
        if old != new:
            lines.append(f"{field.name} was {old!r} and is now {new!r}")
    return lines
