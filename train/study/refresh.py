"""The supervised refresh over several seeds (``python -m train refresh``), with its control."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

import asap_jax as aj
from train.evaluation import compile_teacher
from train.reporting.table import Report, Table
from train.runtime import machine
from train.runtime.errors import UserError
from train.training import held_out, refresh
from train.training.refresh import Accuracies
from train.training.splits import announce, load_data
from train.training.teacher import load_teacher

ROWS = {
    "replaced": "compiled, right after replacement",
    "refreshed": "compiled, refreshed",
    "teacher": "teacher",
    "continued": "teacher, trained on for as long",
}
"""From a field of ``Accuracies`` to the label of its row."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the refresh.

    Attributes:
      frozen: pass no gradient through the sorts in the features.
      epochs, learning_rate: of both trainings.
      num_images: number of calibration examples.
      num_slices: number of slices of the fit.
    """

    frozen: bool = False
    epochs: int = refresh.EPOCHS
    learning_rate: float = refresh.LEARNING_RATE
    num_images: int = 8192
    num_slices: int = 256


def run(folders: Sequence[pathlib.Path], data_dir: str | None, settings: Settings) -> Report:
    """Compiles and refreshes the teacher of every run folder.

    Args:
      folders: run folders of one recipe with different seeds.
      data_dir: TFDS folder, see ``load_data``.
      settings: of the refresh.

    Raises:
      UserError: the runs differ in more than the seed, or two have the same seed.
    """
    teachers = [load_teacher(folder) for folder in folders]
    recipe = teachers[0].recipe
    if any(teacher.recipe != recipe for teacher in teachers):
        raise UserError("the runs must be of one recipe with the same settings")
    seeds = [teacher.seed for teacher in teachers]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"every run needs its own seed, got {seeds}")
    fit = aj.PaperFit(num_slices=settings.num_slices, baseline="first_step", token_bias=True)
    measured = {}
    for folder, teacher in zip(folders, teachers, strict=True):
        split = load_data(recipe, data_dir, folder)
        announce(split)
        options = aj.Options(fit=fit, seed=teacher.seed)
        compiled = compile_teacher.compile_teacher(
            teacher, split.train, options, num_images=settings.num_images
        )
        train, _ = held_out.divide(recipe, split.train)
        measured[teacher.seed] = refresh.run(
            teacher,
            compiled.variables,
            train,
            split.test,
            frozen=settings.frozen,
            epochs=settings.epochs,
            learning_rate=settings.learning_rate,
        )
    sorts = "no gradient passes" if settings.frozen else "gradients pass"
    facts = {
        "model": f"{recipe.name} ({recipe.preset}), S={recipe.spec.num_steps}",
        "data": f"{recipe.dataset}, {len(train)} training and {len(split.test)} test "
        f"{split.test.unit}",
        "fit": f"residual log-sum-exp fit with token bias, {settings.num_slices} slices, "
        f"M={settings.num_images}",
        "refresh": f"{settings.epochs} epochs at {settings.learning_rate:g}; {sorts} through the "
        f"sorts in the features",
        **machine.facts(),
    }
    if not recipe.is_text:
        facts["model"] += f", patch {recipe.model.patch_size}"
    values = {"settings": settings, "seeds": measured}
    return Report("Supervised refresh after replacement", [table(measured)], facts, values)


def table(measured: dict[int, Accuracies]) -> Table:
    """Test accuracies by seed, with mean and sample standard deviation."""
    cells = []
    for name, label in ROWS.items():
        values = [getattr(scores, name) for scores in measured.values()]
        spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
        cells.append([label, *(f"{v:.4f}" for v in values), f"{np.mean(values):.4f}{spread}"])
    headings = ["test accuracy", *(f"seed {seed}" for seed in measured), "mean ± std"]
    return Table(headings, cells)
