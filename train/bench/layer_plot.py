"""The plot of the layer benchmark: time relative to softmax attention, by length."""

import pathlib
from collections.abc import Iterable

from train.bench.measure import Row
from train.reporting.figure import blank, save

LINES = {
    "softmax, softmax_attention": ("#6b7280", "X"),
    "Sinkhorn S=10": ("#7cc4ee", "v"),
    "Sinkhorn S=20": ("#0072b2", "o"),
    "Sinkhorn S=20, log domain": ("#a0522d", "P"),
    "ASAP n=1, moments": ("#e69f00", "^"),
    "ASAP n=2, moments": ("#009e73", "D"),
    "ASAP n=2, 32 slices": ("#d55e00", "s"),
}
"""From a row to its colour and marker."""


def draw(rows: Iterable[Row], lengths: Iterable[int], path: pathlib.Path) -> pathlib.Path:
    """Writes the plot of the sweep as PNG and returns ``path``; rows that did not run are left out.

    Args:
      rows: rows of all shapes.
      lengths: token counts of the sweep.
      path: file of the picture.
    """
    ratios = {(row.shape, row.name): row.ratio for row in rows}
    drawn = blank(7, 4.5, layout="constrained")
    axes = drawn.subplots()
    for name, (colour, marker) in LINES.items():
        points = [(n, ratios.get((f"N={n}", name))) for n in sorted(lengths)]
        points = [(n, ratio) for n, ratio in points if ratio is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=name)
    axes.axhline(1, color="#6b7280", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="time / fastest dense softmax attention"
    )
    ticks = sorted(lengths)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_yticks([0.5, 1, 2, 4])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return save(drawn, path)
