"""One ESP checkpoint under its three operators (paper, "ESPFormer Soft-to-Hard Switch")."""

import dataclasses
from collections.abc import Callable

from train.evaluation import esp_modes
from train.evaluation.esp_modes import ModeFigures
from train.reporting.table import Table
from train.study import cache
from train.study.paper import accuracy, families
from train.study.paper.result import Result, beside
from train.study.paper.runs import FOLDER, Models, Run
from train.study.paper.summary import number
from train.study.teacher_figures import sample

NAME, LABEL = "esp_soft_hard_switch", "tab:esp_soft_hard_switch"
PUBLISHED = {
    "soft": "ESPFormer (Soft)",
    "hard_released": "ESPFormer (Released Hard)",
    "hard": "ESPFormer (Exact Hard)",
}
HEADINGS = ("accuracy (%)", "prediction change (%)", "row error", "column error", "entropy")
HEADINGS += ("examples/s",)


def run(models: Models, report: Callable[[str], None]) -> Result:
    """Trains the ESP model of the CIFAR table if it is missing, and measures it."""
    table = accuracy.cifar(models.preset)
    recipe, variant = accuracy.recipe_of(table, models)
    changed = families.of_preset(families.ESP, recipe, models.preset)
    trained = models.runs(changed, variant)[0]
    report(trained.path.name)
    count = models.preset.test_examples or trained.about.test
    figures = _measured(trained, min(count, trained.about.test))
    body = [
        [PUBLISHED[one.mode], *_cells(one), *beside(LABEL, PUBLISHED[one.mode], HEADINGS)]
        for one in figures
    ]
    headings = ["row", *HEADINGS, *(f"paper: {name}" for name in HEADINGS)]
    facts = {
        "checkpoint": f"{trained.path.name}: {recipe.epochs} epochs of {trained.about.train} "
        f"training images",
        "accuracy": f"{min(count, trained.about.test)} of {trained.about.test} test images",
        "errors and entropy": "means over active tokens, layers and batches",
    }
    operators = {
        one.mode: {**dataclasses.asdict(one), "prediction_change": one.changed} for one in figures
    }
    title = "One ESP checkpoint, evaluated softly and with hard sorting"
    tables = [Table(headings, body)]
    return Result(NAME, LABEL, title, tables, facts, {"operators": operators}, table.missing)


def _measured(trained: Run, count: int) -> list[ModeFigures]:
    """The figures of all operators, measured or read."""

    def measure() -> list[ModeFigures]:
        test = sample(trained.split.test, count)
        return esp_modes.measure(trained.teacher, test, trained.about.step)

    settings = cache.settings_of(trained.about, examples=count)
    path = trained.path / FOLDER / "esp-modes.json"
    decode = lambda stored: [ModeFigures(**one) for one in stored]
    return cache.cached(path, settings, measure, decode, again=False)


def _cells(one: ModeFigures) -> list[str]:
    return [
        f"{100 * one.accuracy:.2f}",
        f"{100 * one.changed:.2f}",
        number(one.row_error),
        number(one.column_error),
        f"{one.entropy:.3f}",
        f"{one.examples_per_second:.0f}",
    ]
