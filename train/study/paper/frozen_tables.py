"""What the four tables of the frozen IMDb replacement show: their rows and columns."""

import dataclasses
from collections.abc import Callable

import asap_jax as aj
from train.study.paper import rows
from train.study.paper.presets import Preset
from train.study.paper.rows import Row

RECIPE = "imdb"
ERRORS = ("output RMSE", "attention rel-l2", "rel-l2 median", "rel-l2 worst layer")
COUNTS = ("calls", "passes", "M")
TIMES = (*COUNTS, "time (ms)", "model (ms)", "speed-up to S=3")
FIT = ("fit time (s)", "first fit (s)")


@dataclasses.dataclass(frozen=True)
class FrozenTable:
    """What one table of the frozen replacement shows.

    Attributes:
      name, label, title: see ``Result``.
      choose: from the teachers' spec and the preset to the rows.
      columns: headings of ``COLUMNS``.
      compared: headings of the paper's columns to print beside them.
      score: whether accuracy and agreement are measured.
    """

    name: str
    label: str
    title: str
    choose: Callable[[aj.SinkhornSpec, Preset], list[Row]]
    columns: tuple[str, ...]
    compared: tuple[str, ...]
    score: bool = False


def _main(spec: aj.SinkhornSpec, preset: Preset) -> list[Row]:
    count = preset.num_fit
    return [
        *rows.budgets(spec),
        *rows.least_squares(count),
        rows.least_squares(count, 64)[0],
        *rows.divergence(count),
        *rows.recommended(spec, preset),
        rows.teacher(spec),
    ]


def _ablation(spec: aj.SinkhornSpec, preset: Preset) -> list[Row]:
    pairs = [rows.least_squares(preset.num_fit, slices) for slices in rows.SLICES]
    return [
        *(pair[kind] for kind in range(2) for pair in pairs),
        *rows.recommended(spec, preset),
        *rows.budgets(spec),
        rows.teacher(spec),
    ]


def _design(spec: aj.SinkhornSpec, preset: Preset) -> list[Row]:
    count = preset.num_fit
    fit = aj.PaperFit()
    changed = {
        "ASAP shared coefficients": dict(coefficients="shared"),
        "Raw projections + ASAP transform": dict(features="raw_projections"),
        "Rank displacement + ASAP transform": dict(features="rank_displacement"),
    }
    return [
        *(
            rows.Compiled(f"ASAP{suffix}, M={size}", fit, closures, size)
            for suffix, closures in rows.KINDS
            for size in sorted({*preset.sizes, count})
        ),
        *(
            rows.Compiled(name, dataclasses.replace(fit, **change), "two_sided", count)
            for name, change in changed.items()
        ),
        rows.Compiled("Predict both duals, no c-transform", fit, "none", count),
        *rows.residual(spec, count, rows.DEFAULT_SLICES, token_bias=False),
        *rows.recommended(spec, preset),
        *rows.budgets(spec),
        rows.teacher(spec),
    ]


TABLES = {
    table.name: table
    for table in (
        FrozenTable(
            "operator_main",
            "tab:operator_main",
            "Frozen IMDb layers: time, error and accuracy of what takes the teacher's place",
            _main,
            (*TIMES, *ERRORS, "accuracy (%)", "agreement (%)", *FIT),
            ("time (ms)", "output RMSE", "attention rel-l2", "accuracy (%)"),
            score=True,
        ),
        FrozenTable(
            "operator_marginal",
            "tab:operator_marginal_appendix",
            "Frozen IMDb layers: row and column errors",
            _main,
            ("calls", "passes", "final update", "row error", "column error"),
            ("row error", "column error"),
        ),
        FrozenTable(
            "operator_ablation",
            "tab:operator_ablation_appendix",
            "Frozen IMDb layers: number of slices",
            _ablation,
            (*COUNTS, "time (ms)", "model (ms)", *ERRORS, *FIT, "cases"),
            ("time (ms)", "output RMSE", "attention rel-l2", "fit time (s)"),
        ),
        FrozenTable(
            "amortization_design",
            "tab:amortization_design_appendix",
            "Frozen IMDb layers: calibration size, features, sharing, direct duals",
            _design,
            (*TIMES, *ERRORS, "row error", "column error"),
            (
                "time (ms)",
                "output RMSE",
                "attention rel-l2",
                "row error",
                "column error",
                "speed-up to S=3",
            ),
        ),
    )
}
