"""The pictures of the tables."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from train.reporting.figure import INK, SOFT, blank
from train.study.paper.families import FamilyLine
from train.study.paper.profile import Profile
from train.study.paper.summary import Line, Spread

COLOURS = {
    "ASAP": "#d55e00",
    "Sink": "#0072b2",
    "Moments": "#009e73",
    "Codebook": "#cc9900",
    "ESP": "#aa3377",
}
OTHER = "#6b7280"
MARKERS = "osv^D<>phX*P"


def error_by_time(lines: Sequence[Line]) -> Any:
    """Attention rel-l2 of every row over the time of a layer, on logarithmic axes."""
    figure = blank(9, 6, layout="constrained")
    axes = figure.subplots()
    for one in lines:
        error = one.metrics["rel_l2"].mean
        if one.layer is None or error <= 0:  # the teacher itself
            continue
        axes.plot(one.layer.mean, error, "o", color=_colour(one.name))
        axes.annotate(f"  {one.name}", (one.layer.mean, error), fontsize=7, color=INK, va="center")
    teacher = next((one for one in lines if one.metrics["rel_l2"].mean == 0 and one.layer), None)
    if teacher is not None:
        axes.axvline(teacher.layer.mean, color=SOFT, linewidth=0.8)
        axes.annotate(
            f" {teacher.name}",
            (teacher.layer.mean, 1),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            color=SOFT,
            va="top",
        )
    _dress(axes, "milliseconds of one layer on one batch", "attention rel-l2")
    return figure


def error_by_slices(lines: Sequence[Line]) -> Any:
    """Attention rel-l2 over the number of slices, with the budgets of Sinkhorn as levels."""
    figure = blank(8, 5, layout="constrained")
    axes = figure.subplots()
    for kind, marker in (("ASAP-LS-0", "s"), ("ASAP-LS", "o")):
        rows = [one for one in lines if one.name.startswith(f"{kind} (L=")]
        slices = [int(one.name.split("L=")[1].rstrip(")")) for one in rows]
        errors = [one.metrics["rel_l2"].mean for one in rows]
        axes.plot(slices, errors, marker=marker, color=COLOURS["ASAP"], label=kind)
    for one in lines:
        if one.name.startswith(("Sinkhorn normalizer", "Moments", "Codebook")):
            level = one.metrics["rel_l2"].mean
            axes.axhline(level, color=_colour(one.name), linewidth=0.8, linestyle="--")
            axes.annotate(
                one.name,
                (1, level),
                xycoords=("axes fraction", "data"),
                fontsize=7,
                ha="right",
                va="bottom",
                color=_colour(one.name),
            )
    axes.legend(frameon=False, loc="lower left")
    _dress(axes, "slices L", "attention rel-l2")
    return figure


Curves = Mapping[str, Sequence[tuple[int, float]]]


def accuracies(trained: Sequence[FamilyLine], lines: Sequence[Line], curves: Curves) -> Any:
    """Accuracy of every row, with the deviation over the seeds; beside it the held-out losses."""
    pairs = [(one.name, one.accuracy) for one in (*trained, *lines) if one.accuracy is not None]
    if not curves:
        return bars(dict(pairs), "accuracy (%)")
    figure = blank(15, 1 + 0.28 * len(pairs), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_bars(left, dict(pairs), "accuracy (%)")
    for name, curve in curves.items():
        right.plot(*zip(*curve, strict=True), label=name, linewidth=1.4)
    right.set_xlabel("step", color=INK)
    right.set_ylabel("held-out loss (nats)", color=INK)
    right.legend(frameon=False)
    _frame(right)
    return figure


def bars(values: Mapping[str, Spread], label: str) -> Any:
    """A horizontal bar in percent for every row; the axis begins a little below the lowest."""
    figure = blank(9, 1 + 0.28 * len(values), layout="constrained")
    _draw_bars(figure.subplots(), values, label)
    return figure


def _draw_bars(axes, values: Mapping[str, Spread], label: str) -> None:
    means = [100 * value.mean for value in values.values()]
    errors = [100 * value.std for value in values.values()]
    colours = [_colour(name) for name in values]
    axes.barh(list(values), means, xerr=errors, color=colours, height=0.7, capsize=2)
    axes.invert_yaxis()
    low, high = min(means), max(means)
    margin = max(1.0, 0.3 * (high - low), max(errors))
    axes.set_xlim(max(0, low - margin), high + margin)
    axes.tick_params(labelsize=8)
    axes.set_xlabel(label, color=INK)
    _frame(axes)


def growth(found: Mapping[int, Mapping[str, Profile]], label: str) -> Any:
    """Time and memory of every row over a growing size; a cross is a row that did not run."""
    figure = blank(13, 5.4, layout="constrained")
    panels = figure.subplots(1, 2)
    names = list(next(iter(found.values())))
    for name, marker in zip(names, itertools.cycle(MARKERS), strict=False):
        timed = [(n, p[name].milliseconds) for n, p in found.items() if p[name].milliseconds]
        known = [(n, p[name].gib) for n, p in found.items() if p[name].gib]
        refused = [(n, p[name].gib) for n, p in found.items() if p[name].gib and p[name].reason]
        style = dict(marker=marker, markersize=5, linewidth=1.2)
        panels[0].plot(*zip(*timed, strict=True), label=name, **style) if timed else None
        if known:
            (curve,) = panels[1].plot(*zip(*known, strict=True), label=name, **style)
            for n, gib in refused:
                panels[1].plot(n, gib, "x", color=curve.get_color(), markersize=11)
    for panel, unit in zip(panels, ("milliseconds", "GiB"), strict=True):
        panel.set_xscale("log")
        panel.set_xticks(list(found), labels=list(map(str, found)))
        panel.set_xticks([], minor=True)
        _dress(panel, label, unit)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def resources(trained: Mapping[str, Profile], forward: Mapping[str, Profile]) -> Any:
    """Time and memory of train step and forward pass, one panel each."""
    figure = blank(13, 6.5, layout="constrained")
    panels = figure.subplots(2, 2).flatten()
    for index, (title, found) in enumerate((("train step", trained), ("forward", forward))):
        for panel, unit in zip(panels[2 * index :], ("milliseconds", "GiB"), strict=False):
            values = [
                (one.milliseconds if unit == "milliseconds" else one.gib) or 0
                for one in found.values()
            ]
            panel.barh(list(found), values, color=[_colour(name) for name in found])
            panel.invert_yaxis()
            panel.set_title(title, fontsize=10, loc="left", color=INK)
            panel.set_xlabel(unit, color=INK)
            panel.tick_params(labelsize=8)
            _frame(panel)
    return figure


def _colour(name: str) -> str:
    return next((colour for start, colour in COLOURS.items() if name.startswith(start)), OTHER)


def _dress(axes, x: str, y: str) -> None:
    """Logarithmic errors, labels and a light grid."""
    if axes.get_xscale() != "log":
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(visible=True, which="both", color=SOFT, alpha=0.2, linewidth=0.6)
    _frame(axes)


def _frame(axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
