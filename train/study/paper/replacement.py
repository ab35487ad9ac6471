"""Frozen IMDb replacement: four tables over the same cases of one set of teachers."""

import functools
from collections.abc import Callable, Sequence

from train.evaluation.breakeven import BreakEven, break_even
from train.reporting.table import Table
from train.study.paper import plots, rows
from train.study.paper.columns import COLUMNS
from train.study.paper.frozen import Frozen
from train.study.paper.frozen_tables import RECIPE, FrozenTable
from train.study.paper.presets import CASE_EXAMPLES, ROUNDS, WARMUPS
from train.study.paper.result import Result, beside
from train.study.paper.rows import Row
from train.study.paper.runs import Models
from train.study.paper.summary import Line, line

PICTURES = {
    "operator_main": plots.error_by_time,
    "operator_ablation": plots.error_by_slices,
    "amortization_design": plots.error_by_time,
}


def run(table: FrozenTable, models: Models, report: Callable[[str], None]) -> Result:
    """Trains the missing teachers, measures the missing rows, and makes the table.

    Args:
      table: which one.
      models: the trained models.
      report: called with what is being done.
    """
    recipe = models.recipe(RECIPE)
    spec, preset = recipe.spec, models.preset
    chosen = table.choose(spec, preset)
    teachers = []
    for run in models.runs(recipe):
        report(f"teacher {run.path.name}")
        teachers.append(Frozen(run, preset.test_examples))
        measure(teachers[-1], chosen, table.score, report)
    times = []
    if "time (ms)" in table.columns:
        for teacher in teachers:
            report(f"times on {teacher.run.path.name}")
            times.append(teacher.times(chosen))
    lines = [line(row, teachers, spec, score=table.score, times=times) for row in chosen]
    points = _break_even(lines) if table.score else []
    facts = facts_of(lines, teachers)
    if points:
        facts["break-even"] = "; ".join(map(str, points))
    facts |= _controls(lines)
    values = {"rows": lines, "break_even": points, "teacher_steps": spec.num_steps}
    missing = []
    if table.name == "operator_main":
        missing.append("the left panel (resources of the whole encoder) is table imdb_resources")
    draw = functools.partial(PICTURES[table.name], lines) if table.name in PICTURES else None
    printed = Table(*cells(table, lines))
    return Result(table.name, table.label, table.title, [printed], facts, values, missing, draw)


def measure(
    teacher: Frozen, chosen: Sequence[Row], score: bool, report: Callable[[str], None]
) -> None:
    """Measures all rows on one teacher, so that its data are read once."""
    for row in chosen:
        report(f"{teacher.run.path.name}: {row.name}")
        teacher.cases(row)
        if score:
            teacher.score(row)
        if isinstance(row, rows.Compiled):
            teacher.fit_time(row)


def cells(table: FrozenTable, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, the paper's columns last."""
    headings = ["row", *table.columns, *(f"paper: {name}" for name in table.compared)]
    body = [
        [
            one.name,
            *(COLUMNS[name](one) for name in table.columns),
            *beside(table.label, one.published, table.compared),
        ]
        for one in lines
    ]
    return headings, body


def facts_of(lines: Sequence[Line], teachers: Sequence[Frozen]) -> dict[str, str]:
    """What the figures of a table were measured on."""
    about, recipe = teachers[0].run.about, teachers[0].run.recipe
    count = lines[0].metrics["rel_l2"].count
    batches = count // (recipe.model.depth * len(teachers))  # fewer for a small test split
    facts = {
        "teachers": f"recipe {recipe.name} ({recipe.preset}), S={recipe.spec.num_steps}, "
        f"{recipe.model.depth} layer(s), {about.train} training {about.unit}",
        "cases": f"{count}: {batches} test batches of {CASE_EXAMPLES} {about.unit} at every "
        f"layer of {len(teachers)} teacher(s); errors are mean ± sample deviation over the cases",
        "M": f"the first M of {about.train} training {about.unit}, all of them in the fit",
        "fit time": "teacher's forward passes, sums and solution, second fit without compilation; "
        "the first fit compiles",
        "calls": "softmax attention calls of a layer that stores no N x M array",
        "passes": "half-steps over the scores; the residual fit has one more, its first row step",
    }
    if lines[0].layer is not None:
        facts["time"] = (
            f"attention of one layer on one case batch, {WARMUPS} warm-ups and {ROUNDS} timed "
            f"calls, rows in turn, mean ± deviation; model: the whole model on that batch"
        )
    if lines[0].examples is not None:
        facts["accuracy"] = f"{lines[0].examples} of {about.test} test {about.unit}"
    return facts


def _break_even(lines: Sequence[Line]) -> list[BreakEven]:
    """Layer-batches after which the fits of ASAP-LS and of the moments have paid."""
    by_name = {one.published: one for one in lines}
    operators = ("ASAP-LS-0 (L=32)", "ASAP-LS (L=32)", "Moments, 2 closures")
    baselines = (rows.TEACHER, "Sinkhorn normalizer (S=3)")
    return [
        break_even(
            operator,
            baseline,
            by_name[operator].passes,
            by_name[operator].fit_warm.mean,
            by_name[baseline].layer.mean - by_name[operator].layer.mean,
        )
        for operator in operators
        for baseline in baselines
        if operator in by_name and baseline in by_name
    ]


def _controls(lines: Sequence[Line]) -> dict[str, str]:
    """The rows with residual 0 beside the Sinkhorn rows that they must equal."""
    by_steps = {one.passes: one for one in lines if one.name.startswith("Sinkhorn normalizer")}
    found = {}
    for one in lines:
        if "residual 0" in one.name and one.passes in by_steps:
            ours, same = one.metrics["rel_l2"].mean, by_steps[one.passes].metrics["rel_l2"].mean
            found[f"control S={one.passes}"] = f"{one.name}: rel-l2 {ours:.6g}, Sinkhorn {same:.6g}"
    return found
