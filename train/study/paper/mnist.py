"""The shallow MNIST layer: replacement for each patch size, and the supervised refresh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import asap_jax as aj
from train.reporting.table import Table
from train.study import cache
from train.study.paper import plots, published, replacement, rows
from train.study.paper.columns import spread
from train.study.paper.frozen import Frozen
from train.study.paper.presets import Preset
from train.study.paper.result import Result, beside
from train.study.paper.rows import Row
from train.study.paper.runs import FOLDER, Models, Run
from train.study.paper.summary import MISSING, Line, Spread, line
from train.training import refresh

NAME, LABEL, RECIPE = "mnist_replacement", "tab:mnist_replacement", "mnist"
TEXT = "app:mnist_replacement"  # the section around the table
SLICES = 256
FROZEN = False  # the paper passes gradients through the sorts in the features
TITLE = "Shallow MNIST layer: accuracy / agreement in percent, for each patch size"


def chosen_rows(spec: aj.SinkhornSpec, preset: Preset) -> list[Row]:
    """The paper's rows, the controls of the residual fit, this library's rows, and budgets."""
    count = preset.token_bias_fit
    residual = rows.residual(spec, count, SLICES, token_bias=True)
    named = {"one_sided": "ASAP-0", "two_sided": "ASAP"}
    residual = [
        row if row.zero else dataclasses.replace(row, published=named[row.closures])
        for row in residual
    ]
    return [
        rows.teacher(spec),
        rows.Swap("Softmax replacement", None),
        *rows.budgets(spec, (2, 3, 4)),
        *residual,
        *rows.recommended(spec, preset, count),
    ]


def run(models: Models, report: Callable[[str], None]) -> Result:
    """Trains the missing teachers, measures the missing rows, and makes the table."""
    preset = models.preset
    lines: dict[int, list[Line]] = {}
    facts: dict[str, str] = {}
    refreshed: dict[str, Spread] = {}
    for patch in preset.patches:
        recipe = models.recipe(RECIPE)
        recipe = dataclasses.replace(
            recipe, model=dataclasses.replace(recipe.model, patch_size=patch)
        )
        chosen, teachers = chosen_rows(recipe.spec, preset), []
        for one in models.runs(recipe, f"-patch{patch}"):
            report(f"patch {patch}: {one.path.name}")
            teachers.append(Frozen(one, None))
            replacement.measure(teachers[-1], chosen, True, report)
        lines[patch] = [line(row, teachers, recipe.spec, score=True) for row in chosen]
        facts |= replacement.facts_of(lines[patch], teachers)
        if patch == preset.refreshed[0]:
            report(f"patch {patch}: refresh")
            refreshed = _refreshed(teachers[: preset.refreshed[1]], chosen)
    facts["fit of ASAP"] = (
        f"residual to the first row step, bias per token, L={SLICES}, M={preset.token_bias_fit}: "
        "one pass more than the closures"
    )
    tables = [_table(lines), _errors(lines)]
    missing = [
        f"patch {patch}: only in the paper preset"
        for patch in (2, 4, 7, 14)
        if patch not in preset.patches
    ]
    if refreshed:
        tables.append(_refresh_table(refreshed, preset))
    values = {"patches": {str(patch): x for patch, x in lines.items()}, "refresh": refreshed}
    draw = functools.partial(_picture, lines)
    return Result(NAME, LABEL, TITLE, tables, facts, values, missing, draw)


def _picture(lines: dict[int, list[Line]]) -> Any:
    """Agreement with the teacher of every row and patch size."""
    agreements = {
        f"{one.name}, patch {patch}": one.agreement
        for patch, rows_ in lines.items()
        for one in rows_
        if one.agreement is not None
    }
    return plots.bars(agreements, "agreement with the teacher (%)")


def _table(lines: dict[int, list[Line]]) -> Table:
    columns = [f"patch {patch}" for patch in lines]
    headings = ["row", "calls", "passes", *columns, *(f"paper: {name}" for name in columns)]
    body = []
    for same in zip(*lines.values(), strict=True):
        first = same[0]
        ours = [
            f"{spread(one.accuracy, '{:.2f}', 100)} / {spread(one.agreement, '{:.2f}', 100)}"
            for one in same
        ]
        theirs = beside(LABEL, first.published, columns)
        body.append([first.name, str(first.calls), str(first.passes), *ours, *theirs])
    return Table(headings, body)


def _errors(lines: dict[int, list[Line]]) -> Table:
    headings = ["row", "M", *(f"patch {patch}" for patch in lines)]
    body = []
    for same in zip(*lines.values(), strict=True):
        count = MISSING if same[0].num_fit is None else str(same[0].num_fit)
        body.append([same[0].name, count, *(one.metrics["rel_l2"].text() for one in same)])
    return Table(headings, body, "Attention rel-l2")


def _refreshed(teachers: list[Frozen], chosen: list[Row]) -> dict[str, Spread]:
    """Accuracies before and after the refresh and its control, over the seeds."""
    row = next(row for row in chosen if row.published == "ASAP")
    found = [_refresh_one(teacher.run, teacher, row) for teacher in teachers]
    names = [field.name for field in dataclasses.fields(refresh.Accuracies)]
    return {name: Spread.of([getattr(one, name) for one in found]) for name in names}


def _refresh_one(run: Run, teacher: Frozen, row: rows.Compiled) -> refresh.Accuracies:
    def measure():
        compiled = teacher.operator(row).variables
        train, test = run.split.train, run.split.test
        return refresh.run(run.teacher, compiled, train, test, frozen=FROZEN)

    settings = cache.settings_of(run.about, row=rows.key(row), epochs=refresh.EPOCHS, frozen=FROZEN)
    path = run.path / FOLDER / "refresh.json"
    read = lambda stored: refresh.Accuracies(**stored)
    return cache.cached(path, settings, measure, read, again=False)


def _refresh_table(refreshed: dict[str, Spread], preset: Preset) -> Table:
    names = {
        "replaced": "ASAP, replaced",
        "refreshed": f"ASAP, {refresh.EPOCHS} epochs of refresh",
        "teacher": "Sinkhorn teacher",
        "continued": f"Sinkhorn teacher, {refresh.EPOCHS} more epochs",
    }
    body = [
        [names[name], str(value.count), value.text("{:.2f}", 100)]
        for name, value in refreshed.items()
    ]
    headings = ["row", "seeds", "accuracy (%)"]
    row, patch = "ASAP, refreshed", "patch 2"
    about = {"paper": f"{published.cell(TEXT, row, patch)} after the refresh, {patch}"}
    title = f"Supervised refresh, patch {preset.refreshed[0]}"
    return Table(headings, body, title, about)
