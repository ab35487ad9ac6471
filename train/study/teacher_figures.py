"""Fits and measures every operator of a study on one teacher."""

import pathlib
import time
from collections.abc import Sequence

import numpy as np

import asap_jax as aj
from asap_jax.spec import ENDINGS
from train.data.examples import Examples
from train.evaluation import compile_teacher, fidelity, operators
from train.evaluation.operators import Operator
from train.recipes.schema import Recipe
from train.reporting import progress
from train.study.entries import CODEBOOKS, closure_counts, entries
from train.study.extra_cost import score_products
from train.study.results import Measured, TeacherFigures
from train.training.splits import Split
from train.training.teacher import Teacher, accuracy_on

TEST_EXAMPLES = 500


def sample(examples: Examples, count: int) -> Examples:
    """Up to ``count`` examples, always the same ones, in their original order."""
    chosen = np.random.default_rng(0).permutation(len(examples))[:count]
    return examples.take(np.sort(chosen))


def measure(
    folder: pathlib.Path,
    trained: Teacher,
    split: Split,
    *,
    test_examples: int = TEST_EXAMPLES,
    num_images: int = compile_teacher.NUM_IMAGES,
    candidates: Sequence[aj.Candidate] | None = None,
) -> TeacherFigures:
    """Fits and measures every operator on one teacher.

    Args:
      folder: the teacher's run folder, used only as a name.
      trained: the teacher.
      split: its data.
      test_examples: largest number of test examples to measure on. The teacher's own accuracy is
        measured on all of them.
      num_images: number of calibration examples.
      candidates: candidates of the automatic fit, or None for ``aj.CANDIDATES``; empty for no
        automatic fit.
    """
    began = time.perf_counter()
    recipe = trained.recipe
    candidates = aj.CANDIDATES if candidates is None else candidates
    automatic = len(closure_counts(recipe.spec)) if candidates else 0
    fits = 1 + len(ENDINGS) * (1 + automatic) + len(CODEBOOKS)
    with progress.bar(f"fit {folder}", fits) as report:
        fitted = entries(trained, split.train, num_images, candidates, report)
    rows = [entry.operator for entry in fitted]
    reference = operators.teacher(recipe, trained.variables)
    test = sample(split.test, test_examples)
    score_std, shapes = _describe(reference, recipe, recipe.inputs.prepare(test))
    with progress.bar(f"measure {folder}", fidelity.num_steps(len(test), len(rows))) as report:
        figures = fidelity.figures(rows, reference, recipe, test, report, plan_kl=True)
    measured = []
    for entry in fitted:
        row = entry.operator
        values = _values(figures[row.name]) | {"extra_cost": _extra_cost(row, shapes)}
        values["calls"] = float(row.calls)
        same = entry.ends == recipe.spec.last_step
        measured.append(
            Measured(row.name, entry.family, entry.closures, same, values, entry.chosen)
        )
    return TeacherFigures(
        run=str(folder),
        seed=trained.seed,
        accuracy=accuracy_on(trained, split.test),
        score_std=score_std,
        cases=len(figures[rows[0].name].cases["rel_l2"]),
        seconds=time.perf_counter() - began,
        rows=tuple(measured),
    )


def _values(figures: fidelity.Figures) -> dict[str, float]:
    """All columns except the extra cost."""
    return {
        **{name: figures.mean(name) for name in ("rel_l2", "plan_kl")},
        "rel_l2_median": float(np.median(figures.cases["rel_l2"])),
        "output_median": float(np.median(figures.cases["output_rel_l2"])),
        **{name: getattr(figures, name) for name in ("agreement", "accuracy", "logit_kl")},
    }


def _describe(
    reference: Operator, recipe: Recipe, inputs: np.ndarray
) -> tuple[float, dict[tuple[str, ...], tuple[int, int, int]]]:
    """Standard deviation of the teacher's scores (mean over cases), and N, M, d of each layer."""
    spreads, shapes = [], {}
    for batch in fidelity.batches_of(inputs):
        for path, record in fidelity.capture(reference, batch).items():
            spreads.append(float(fidelity.score_spread(record, spec=recipe.spec)))
            (n, _, d), m = record.query.shape[-3:], record.key.shape[-3]
            shapes[path] = n, m, d
    return float(np.mean(spreads)), shapes


def _extra_cost(row: Operator, shapes: dict) -> float:
    """Score products of the predictions, mean over layers; 0 for operators without predictions."""
    costs = [score_products(row.states[p].predictor, *shapes[p]) for p in row.states]
    return float(np.mean(costs)) if costs else 0.0
