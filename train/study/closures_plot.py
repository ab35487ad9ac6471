"""The plot of a study: attention rel-l2 by number of closures, with one panel per group."""

import pathlib
from typing import Any

from train.reporting.figure import INK, SOFT, blank, save
from train.study.results import Group, Measured, Study

COLUMNS = 3  # panels side by side
STYLES = {
    "softmax": ("#6b7280", "X"),
    "Sinkhorn": ("#0072b2", "o"),
    "Sinkhorn, other ending": ("#7cc4ee", "v"),
    "ASAP (paper)": ("#d55e00", "s"),
    "Moments": ("#009e73", "^"),
    "Auto": ("#aa3377", "D"),
    "Moments (row)": ("#66c2a5", "<"),
    "Codebook (row)": ("#cc9900", "p"),
    "Large codebook (row)": ("#806000", "h"),
    "Auto (row)": ("#dd99bb", ">"),
}
"""From a family to its colour and marker; people with colour blindness can tell them apart."""


def figure(study: Study) -> Any:
    """A matplotlib figure with a panel for each group of the study."""
    columns = min(COLUMNS, len(study.groups))
    rows = -(-len(study.groups) // columns)
    drawn = blank(5 * columns, 4.2 * rows + 0.6, layout="constrained")
    panels = drawn.subplots(rows, columns, squeeze=False).flatten()
    for panel, group in zip(panels, study.groups, strict=False):
        _draw_group(panel, group)
    for panel in panels[len(study.groups) :]:
        panel.set_axis_off()
    entries = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    drawn.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    return drawn


def draw(study: Study, path: pathlib.Path) -> pathlib.Path:
    """Writes the figure as PNG and returns ``path``."""
    return save(figure(study), path)


def families(group: Group) -> dict[str, list[Measured]]:
    """The operators of a group, by family and ordered by closures; each family is one curve."""
    by_family: dict[str, list[Measured]] = {name: [] for name in STYLES}
    for line in group.lines:
        other_ending = line.family == "Sinkhorn" and not line.same_ending
        family = f"{line.family}, other ending" if other_ending else line.family
        by_family[family].append(line)
    return {
        name: sorted(lines, key=lambda line: line.closures)
        for name, lines in by_family.items()
        if lines
    }


def _draw_group(panel, group: Group) -> None:
    for index, (name, lines) in enumerate(families(group).items()):
        colour, marker = STYLES[name]
        spreads = [line.values["rel_l2"] for line in lines]
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.low for spread in spreads]
        above = [spread.high - spread.median for spread in spreads]
        panel.errorbar(
            [line.closures + 0.05 * (index - 2) for line in lines],
            medians,
            yerr=[below, above],
            color=colour,
            marker=marker,
            markersize=6,
            linewidth=1.4,
            capsize=3,
            label=name,
        )
    panel.set_yscale("log")
    panel.set_title(group.label, fontsize=10, color=INK, loc="left", wrap=True)
    panel.set_xlabel("closures (passes over the scores)", color=INK)
    panel.set_ylabel("attention rel-l2", color=INK)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(visible=True, which="both", axis="y", color=SOFT, alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
