"""The columns of a replacement table: from a heading to the cell of a line."""

from collections.abc import Callable

from train.study.paper.summary import MISSING, Line, Spread, number

Cell = Callable[[Line], str]


def spread(value: Spread | None, form: str = "", scale: float = 1.0) -> str:
    """A spread as text, ``-`` where there is none."""
    return MISSING if value is None else value.text(form, scale)


def metric(name: str, part: str = "") -> Cell:
    """The cell of a metric: its mean and deviation, or one part of its spread."""

    def cell(one: Line) -> str:
        value = one.metrics[name]
        return value.text() if not part else number(getattr(value, part))

    return cell


COLUMNS: dict[str, Cell] = {
    "calls": lambda one: str(one.calls),
    "passes": lambda one: str(one.passes),
    "M": lambda one: MISSING if one.num_fit is None else str(one.num_fit),
    "final update": lambda one: one.final_update,
    "time (ms)": lambda one: spread(one.layer, "{:.2f}"),
    "model (ms)": lambda one: spread(one.model, "{:.1f}"),
    "speed-up to S=3": lambda one: MISSING if one.speedup is None else f"{one.speedup:.2f}",
    "output RMSE": metric("output_rmse"),
    "output rel-l2": metric("output_rel_l2"),
    "attention rel-l2": metric("rel_l2"),
    "rel-l2 median": metric("rel_l2", "median"),
    "rel-l2 worst layer": metric("rel_l2", "worst_layer"),
    "row error": metric("row_error"),
    "column error": metric("column_error"),
    "accuracy (%)": lambda one: spread(one.accuracy, "{:.2f}", 100),
    "agreement (%)": lambda one: spread(one.agreement, "{:.2f}", 100),
    "fit time (s)": lambda one: spread(one.fit_warm, "{:.2f}"),
    "first fit (s)": lambda one: spread(one.fit_first, "{:.2f}"),
    "cases": lambda one: str(one.metrics["rel_l2"].count),
}
"""From the heading of a column to its cell; the paper's columns have the same headings."""
