"""Fits compiled layers to exactly the first M training examples, and times the fit."""

import dataclasses
import pathlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

import asap_jax as aj
from asap_jax.compiler.clock import Clock
from asap_jax.compiler.report import CompileReport
from train.data.examples import Examples
from train.recipes.schema import Recipe
from train.runtime.errors import UserError
from train.study.paper.rows import Compiled
from train.training import factory
from train.training.teacher import Teacher

BATCH_SIZE = 64


@dataclasses.dataclass(frozen=True)
class FitTime:
    """Seconds of one fit of all layers: the teacher's forward passes, the sums and the solution.

    Attributes:
      first: of the first fit, with the compilation of what no fit before it has compiled.
      warm: of the same fit once more, without compilation.
    """

    first: float
    warm: float


def first_batches(recipe: Recipe, examples: Examples, count: int) -> Iterator[np.ndarray]:
    """The first ``count`` examples in their order, as inputs ``(batch, ...)``; none is left out.

    Raises:
      UserError: there are fewer examples.
    """
    if count > len(examples):
        raise UserError(
            f"a fit to the first {count} examples needs more than the {len(examples)} training "
            f"{examples.unit} of {recipe.dataset}"
        )
    for start in range(0, count, BATCH_SIZE):
        yield recipe.inputs.prepare(examples.take(slice(start, min(start + BATCH_SIZE, count))))


def fit(trained: Teacher, examples: Examples, row: Compiled) -> tuple[aj.CompileResult, FitTime]:
    """Fits the layers of a row twice, and gives the compiled model and the times.

    Args:
      trained: a Sinkhorn teacher.
      examples: the training split; labels are not used.
      row: what to fit.
    """
    options = aj.Options(
        fit=row.fit,
        closures=row.fitted_closures,
        ending=row.ending,
        holdout=0.0,
        seed=trained.seed,
    )
    calibration = aj.linen.Calibration(factory.build(trained.recipe), options)
    seconds = []
    for _ in range(2):
        batches = first_batches(trained.recipe, examples, row.num_fit)
        states, took = solve(calibration, trained.variables, batches)
        seconds.append(took)
    report = CompileReport({}, False, calibration.num_batches // 2, 0, seconds[0])
    compiled = calibration.compiled(trained.variables, states)
    return aj.CompileResult(states, report, **compiled), FitTime(*seconds)


def solve(
    calibration: aj.linen.Calibration, variables: dict, batches: Iterable[Any]
) -> tuple[dict[str, aj.CompiledState], float]:
    """The compiled state of every layer, fitted to all batches, and the seconds that it took.

    The seconds do not hold the time to read the batches. No report is measured.
    """
    calibration.fits, calibration.clock = {}, Clock()
    for batch in batches:
        calibration.add(variables, batch)
    began = time.perf_counter()
    solved = calibration.fit.solve(calibration.fits, lambda path: iter(()))
    states = jax.block_until_ready({path: state for path, (state, _) in solved.items()})
    return states, calibration.clock.seconds + time.perf_counter() - began


def fit_and_save(
    trained: Teacher, examples: Examples, row: Compiled, path: pathlib.Path
) -> FitTime:
    """Fits a row and saves its compiled layers."""
    result, seconds = fit(trained, examples, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    aj.save(path, result)
    return seconds


def with_zero_coefficients(variables: dict) -> dict:
    """Compiled variables whose predictions are 0 beside their baseline."""
    is_state = lambda x: isinstance(x, aj.CompiledState)
    zeros = lambda tree: jax.tree.map(np.zeros_like, tree)

    def zeroed(state):
        predictor = state.predictor
        changed = dataclasses.replace(
            predictor, head=zeros(predictor.head), token_bias=zeros(predictor.token_bias)
        )
        return state.replace(predictor=changed)

    return {**variables, "asap": jax.tree.map(zeroed, variables["asap"], is_leaf=is_state)}
