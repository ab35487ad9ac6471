"""The trained models of the tables: a run is trained, resumed or only read, as its folder needs."""

import dataclasses
import functools
import json
import pathlib
import shutil
from typing import Any

from train.data import text
from train.recipes import catalogue
from train.recipes.schema import Recipe
from train.study import cache
from train.study.paper.presets import Preset
from train.training import loop
from train.training.splits import Split, announce, load_data
from train.training.teacher import Teacher

FOLDER = "paper"  # in a run folder: what the tables measured on this run
ABOUT = "about.json"


@dataclasses.dataclass(frozen=True)
class About:
    """What a table needs to know of a run without reading its checkpoint or data.

    Attributes:
      seed, step: seed of the run, and its number of steps.
      train, test: numbers of training and test examples.
      unit: ``"images"`` or ``"texts"``.
    """

    seed: int
    step: int
    train: int
    test: int
    unit: str


class Run:
    """One trained model. Checkpoint and data are read when they are first needed.

    Attributes:
      recipe, seed, path: the recipe, the seed and the run folder.
    """

    def __init__(self, recipe: Recipe, seed: int, path: pathlib.Path, data: "Data"):
        self.recipe, self.seed, self.path = recipe, seed, path
        self._data = data

    @functools.cached_property
    def about(self) -> About:
        """The facts of the finished run; trains it, or resumes, if it is not finished."""
        path = self.path / FOLDER / ABOUT
        settings = {"recipe": compared(self.recipe), "seed": self.seed}
        read = lambda stored: About(**stored)
        return cache.cached(path, settings, self._about, read, again=False)

    def _about(self) -> About:
        trained, split = self.teacher, self.split
        sizes = len(split.train), len(split.test)
        (self.path / FOLDER).mkdir(parents=True, exist_ok=True)
        return About(self.seed, trained.step, *sizes, split.test.unit)

    @functools.cached_property
    def teacher(self) -> Teacher:
        """The trained model."""
        return loop.train(self.recipe, self.split.train, self.path, seed=self.seed, resume=True)

    @property
    def split(self) -> Split:
        """Its data."""
        return self._data.split(self.recipe, self.path)


def compared(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe that change a run, as JSON gives them back."""
    plain = json.loads(json.dumps(recipe.to_json()))
    return {name: x for name, x in plain.items() if name not in ("summary", "cost", "expected")}


class Data:
    """Reads the data sets of the runs; the seeds of a recipe share them."""

    def __init__(self, data_dir: str | None):
        self.data_dir = data_dir
        self._last: tuple[Any, Split] | None = None  # one at a time: a data set may be large

    def split(self, recipe: Recipe, path: pathlib.Path) -> Split:
        """Both splits of the recipe, encoded by the tokenizer of the run at ``path`` if it has one.

        A run without a tokenizer gets that of the runs before it, which is the same: a tokenizer
        depends on the training texts and the recipe only.
        """
        settings = recipe.dataset, recipe.splits, recipe.inputs
        own = path / text.FILE
        if self._last is not None:
            (kept, tokenizer, source), split = self._last
            if kept == settings and recipe.is_text and not own.exists() and source.exists():
                path.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, own)
            if kept == settings and (not recipe.is_text or _read(own) == tokenizer):
                return split
        split = load_data(recipe, self.data_dir, path)
        announce(split)
        self._last = (settings, _read(own), own), split
        return split


def _read(path: pathlib.Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


@dataclasses.dataclass(frozen=True)
class Models:
    """Gives tables their runs.

    Attributes:
      preset: the sizes.
      folder: folder of the run folders, which are named ``RECIPE-ATTENTION-SEED``.
      seeds: seeds of the runs.
      data: the data sets.
    """

    preset: Preset
    folder: pathlib.Path
    seeds: tuple[int, ...]
    data: Data

    def recipe(self, name: str, attention: str = "sinkhorn") -> Recipe:
        """The recipe of a name, in this preset, with another family of attention.

        Raises:
          UserError: there is no such recipe in this preset.
        """
        return catalogue.find(name, self.preset.name).with_attention(attention)

    def run(self, recipe: Recipe, seed: int, variant: str = "") -> Run:
        """The run of a recipe and a seed; ``variant`` names changed settings in its folder."""
        path = self.folder / f"{recipe.name}-{recipe.attention}{variant}-{seed}"
        return Run(recipe, seed, path, self.data)

    def runs(self, recipe: Recipe, variant: str = "") -> list[Run]:
        """The runs of all seeds; of the differential and the ESP baseline the preset's number."""
        few = recipe.attention not in ("sinkhorn", "softmax")
        seeds = self.seeds[: self.preset.baseline_seeds] if few else self.seeds
        return [self.run(recipe, seed, variant) for seed in seeds]
