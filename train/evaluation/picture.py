"""Draws one head's attention: the teacher, a cheaper Sinkhorn and ASAP, with their sums."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np

from train.data.examples import Examples
from train.evaluation import fidelity, operators
from train.recipes.schema import Recipe
from train.reporting.figure import INK, SOFT, blank, save

IMAGES = 50
GOOD, BAD = "#4f7cac", "#d1495b"
TOLERANCE = 0.1  # a sum further than this from 1 is drawn in red


@dataclasses.dataclass(frozen=True)
class Panel:
    """One operator's attention weights at the chosen head.

    Attributes:
      title: name of the operator.
      weights: ``(N, M)``, attention scale.
      rel_l2: relative distance of the weights from the teacher's.
    """

    title: str
    weights: np.ndarray
    rel_l2: float


def panels(recipe: Recipe, compiled: dict, test: Examples) -> tuple[list[Panel], int, str]:
    """The panels of a typical head.

    It is chosen among all layers and heads on the first test images. It has the median ratio of the
    cheaper Sinkhorn's error to ASAP's error.

    Returns:
      ``(panels, index of the image, text that says which layer and head it is)``.
    """
    teacher = operators.teacher(recipe, compiled)
    budget = 4 if recipe.spec.last_step == "column" else 3
    (cheap,) = operators.swaps(recipe, compiled, (budget,))[1:]
    asap = operators.compiled(recipe, compiled)[-1]
    titles = {
        teacher: f"teacher: Sinkhorn S={recipe.spec.num_steps}",
        cheap: f"Sinkhorn S={budget}",
        asap: "ASAP, no loop",
    }
    images = recipe.inputs.normalise(test.values[:IMAGES])
    plans = {row: [] for row in titles}
    paths = []
    for path, record in fidelity.capture(teacher, images).items():
        paths.append(path)
        for row, by_layer in plans.items():
            by_layer.append(row.at(path, record)[1])
    plans = {row: np.asarray(jnp.stack(by_layer)) for row, by_layer in plans.items()}
    errors = {row: _rel_l2(plan, plans[teacher]) for row, plan in plans.items()}
    ratio = errors[cheap] / errors[asap]
    order = np.argsort(ratio, axis=None)
    at = np.unravel_index(order[order.size // 2], ratio.shape)
    layer, image, head = (int(index) for index in at)
    where = f"layer {layer + 1} of {len(paths)}, head {head + 1}"
    chosen = [Panel(titles[row], plans[row][at], float(errors[row][at])) for row in titles]
    return chosen, image, where


def draw(recipe: Recipe, compiled: dict, test: Examples, path: pathlib.Path) -> pathlib.Path:
    """Draws the picture as PNG.

    Args:
      recipe: recipe of the teacher.
      compiled: variables from ``aj.linen.compile``, which include the teacher's parameters.
      test: test examples; only the first ones are used.
      path: file to write.

    Returns:
      ``path``.
    """
    chosen, image, where = panels(recipe, compiled, test)
    teacher = chosen[0].weights
    figure = blank(12, 7.6)
    margins = dict(left=0.02, right=0.98, top=0.9, bottom=0.02, wspace=0.1, hspace=0.12)
    grid = figure.add_gridspec(2, 3, height_ratios=(6, 5), **margins)
    darkest = np.sqrt(max(panel.weights.max() for panel in chosen))
    longest = max(panel.weights.sum(axis).max() for panel in chosen for axis in (0, 1))
    largest = np.quantile(np.abs([panel.weights - teacher for panel in chosen[1:]]), 0.998)
    for column, panel in enumerate(chosen):
        _draw_plan(figure, grid[0, column], panel, darkest, longest)
        if column:
            _draw_difference(figure, grid[1, column], panel.weights - teacher, largest)
    _draw_image(figure, grid[1, 0], recipe, test, image, where)
    title = "One attention head and what its rows and columns sum to"
    figure.text(0.02, 0.95, title, fontsize=15, color=INK, weight="bold")
    legend = f"bars: sums, line: 1, red: more than {TOLERANCE} off"
    figure.text(0.98, 0.95, legend, fontsize=10, color=SOFT, ha="right")
    return save(figure, path)


def _rel_l2(plan: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Relative Frobenius distance over the last two axes."""
    norm = lambda x: np.sqrt(np.sum(np.square(x), axis=(-2, -1)))
    return norm(plan - reference) / norm(reference)


def _draw_plan(figure, place, panel, darkest, longest) -> None:
    """Draws the weights with column sums above and row sums to the right.

    It draws square roots of the weights, so that small weights can be seen.
    """
    inner = place.subgridspec(
        2, 2, width_ratios=(5, 1), height_ratios=(1, 5), wspace=0.03, hspace=0.03
    )
    plan = figure.add_subplot(inner[1, 0])
    plan.imshow(np.sqrt(panel.weights), cmap="magma_r", vmin=0, vmax=darkest, aspect="auto")
    rows, columns = panel.weights.sum(1), panel.weights.sum(0)
    above = figure.add_subplot(inner[0, 0], sharex=plan)
    above.bar(range(len(columns)), columns, width=0.8, color=_colours(columns))
    above.axhline(1, color=INK, linewidth=0.8)
    above.set_ylim(0, 1.05 * longest)
    distance = f"  rel-l2 {panel.rel_l2:.2f}" if panel.rel_l2 else ""
    above.set_title(panel.title + distance, fontsize=12, color=INK, loc="left")
    right = figure.add_subplot(inner[1, 1], sharey=plan)
    right.barh(range(len(rows)), rows, height=0.8, color=_colours(rows))
    right.axvline(1, color=INK, linewidth=0.8)
    right.set_xlim(0, 1.05 * longest)
    corner = figure.add_subplot(inner[0, 1])
    errors = f"mean error\nrows {_error(rows):.3f}\ncols {_error(columns):.3f}"
    corner.text(0.02, 0.5, errors, fontsize=8, color=INK, va="center")
    for axes in (plan, above, right, corner):
        _bare(axes)


def _draw_difference(figure, place, difference, largest) -> None:
    """Draws the difference from the teacher, below the plan."""
    inner = place.subgridspec(1, 2, width_ratios=(5, 1), wspace=0.03)
    axes = figure.add_subplot(inner[0])
    image = axes.imshow(difference, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
    axes.set_title("difference from the teacher", fontsize=10, color=SOFT, loc="left")
    _bare(axes)
    beside = figure.add_subplot(inner[1])
    _bare(beside)
    scale = figure.colorbar(image, cax=beside.inset_axes([0, 0, 0.18, 1]), extend="both")
    scale.outline.set_visible(False)
    scale.ax.tick_params(labelsize=8, colors=SOFT, length=0)


def _draw_image(figure, place, recipe, test, index, where) -> None:
    """Draws the image of the head, cut into the patches that are its tokens."""
    inner = place.subgridspec(1, 2, width_ratios=(5, 1), wspace=0.03)
    axes = figure.add_subplot(inner[0])
    pixels = test.values[index]
    axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap="gray_r")
    height, width, _ = pixels.shape
    side = recipe.model.patch_size
    for edge in range(0, height + 1, side):
        axes.axhline(edge - 0.5, color=SOFT, linewidth=0.5)
    for edge in range(0, width + 1, side):
        axes.axvline(edge - 0.5, color=SOFT, linewidth=0.5)
    tokens = (height // side) * (width // side) + 1
    name = test.class_names[test.labels[index]]
    text = f"{name}, {tokens} tokens, {where}"
    axes.set_title(text, fontsize=10, color=SOFT, loc="left")
    _bare(axes)


def _colours(sums: np.ndarray) -> list[str]:
    return [BAD if abs(value - 1) > TOLERANCE else GOOD for value in sums]


def _error(sums: np.ndarray) -> float:
    return float(np.abs(sums - 1).mean())


def _bare(axes) -> None:
    """Removes ticks and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
