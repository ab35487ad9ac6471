"""Fits and measures every operator of a study on one teacher."""

import functools
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

import asap_jax as aj
from train.data.images import Examples
from train.evaluation import compile_teacher, fidelity, operators
from train.evaluation.operators import Operator
from train.recipes.schema import Recipe
from train.reporting import progress
from train.study.entries import closure_counts, entries
from train.study.extra_cost import score_products
from train.study.results import Measured, TeacherFigures
from train.training import teacher as teachers
from train.training.teacher import Split, Teacher

TEST_EXAMPLES = 500


def sample(examples: Examples, count: int) -> Examples:
    """Up to ``count`` examples, the same ones each time, in their order."""
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
      folder: the teacher's, a name only.
      trained: the teacher.
      split: its data.
      test_examples: at most so many are measured on; accuracy of the teacher is on all.
      num_images: calibration examples.
      candidates: of the automatic recipe; the library's own when None.
    """
    began = time.perf_counter()
    recipe = trained.recipe
    fits = 2 + len(closure_counts(recipe.spec))
    with progress.bar(f"fit {folder}", fits) as report:
        found = entries(trained, split.train, num_images, candidates or aj.CANDIDATES, report)
    rows = [entry.operator for entry in found]
    reference = operators.teacher(recipe, trained.variables)
    test = sample(split.test, test_examples)
    inputs = recipe.inputs.prepare(test)
    score_std, shapes = _describe(reference, recipe, inputs)
    batches = -(-len(inputs) // fidelity.BATCH_SIZE)
    with progress.bar(f"measure {folder}", (batches + 1) * len(rows)) as report:
        cases = fidelity.case_values(rows, reference, recipe, inputs, report, plan_kl=True)
        true_logits = _logits(reference, inputs)
        measured = []
        for done, entry in enumerate(found, batches * len(rows) + 1):
            row = entry.operator
            values = _values(cases[row.name], _logits(row, inputs), true_logits, test.labels)
            values["extra_cost"] = _extra_cost(row, shapes)
            same = entry.ends == recipe.spec.last_step
            measured.append(
                Measured(row.name, entry.family, entry.closures, same, values, entry.chosen)
            )
            report(done, f"answers under {row.name}")
    return TeacherFigures(
        run=str(folder),
        seed=trained.seed,
        accuracy=teachers.test_accuracy(trained, split.test),
        score_std=score_std,
        cases=len(cases[rows[0].name]["rel_l2"]),
        seconds=time.perf_counter() - began,
        rows=tuple(measured),
    )


@functools.partial(jax.jit, static_argnames="model")
def _apply(model, variables, inputs):
    """Jitted once for equal models, so that the seeds of a recipe share programs."""
    return model.apply(variables, inputs)


def _logits(row: Operator, inputs: np.ndarray) -> np.ndarray:
    apply = functools.partial(_apply, row.model)
    return teachers.predict(apply, row.variables, inputs, batch_size=fidelity.BATCH_SIZE)


def _values(cases, logits, true_logits, labels) -> dict[str, float]:
    """All columns but the extra cost."""
    return {
        "rel_l2": float(np.mean(cases["rel_l2"])),
        "rel_l2_median": float(np.median(cases["rel_l2"])),
        "output_rmse": float(np.mean(cases["output_rmse"])),
        "plan_kl": float(np.mean(cases["plan_kl"])),
        "agreement": float(aj.metrics.agreement(logits, true_logits)),
        "accuracy": teachers.accuracy(logits, labels),
        "logit_kl": fidelity.logit_kl(logits, true_logits),
    }


def _describe(
    reference: Operator, recipe: Recipe, inputs: np.ndarray
) -> tuple[float, dict[tuple[str, ...], tuple[int, int, int]]]:
    """Spread of the teacher's scores, mean over cases; and N, M and d of each layer by its path."""
    spreads, shapes = [], {}
    for start in range(0, len(inputs), fidelity.BATCH_SIZE):
        records = fidelity.capture(reference, inputs[start : start + fidelity.BATCH_SIZE])
        for path, record in records.items():
            spreads.append(float(fidelity.score_spread(record, spec=recipe.spec)))
            (n, _, d), m = record.query.shape[-3:], record.key.shape[-3]
            shapes[path] = n, m, d
    return float(np.mean(spreads)), shapes


def _extra_cost(row: Operator, shapes: dict) -> float:
    """Score products of the predictions, mean over layers; 0 for operators that predict nothing."""
    costs = [score_products(row.states[p].predictor, *shapes[p]) for p in row.states]
    return float(np.mean(costs)) if costs else 0.0
