"""Rows past the paper for a fidelity table: moment features, for each number of closures."""

from collections.abc import Sequence

import asap_jax as aj
from train.data.examples import Examples
from train.evaluation import compile_teacher, operators
from train.evaluation.operators import Operator
from train.training.teacher import Teacher


def moment_rows(
    trained: Teacher,
    examples: Examples,
    counts: Sequence[int] = (1, 2, 3),
    num_images: int = compile_teacher.NUM_IMAGES,
) -> list[Operator]:
    """The library's moments fit, once for each number of closures.

    Args:
      trained: a Sinkhorn teacher of more steps than any of ``counts``.
      examples: the training split.
      counts: numbers of closures.
      num_images: calibration examples.
    """
    rows = []
    for count in counts:
        options = aj.Options(fit="moments", closures=count, seed=trained.seed)
        result = compile_teacher.compile_teacher(trained, examples, options, num_images=num_images)
        name = counted("Moments", count)
        rows.append(operators.compiled_row(name, trained.recipe, result.variables, count))
    return rows


def counted(family: str, count: int) -> str:
    """The label of a row: ``"Moments, 2 closures"``."""
    return f"{family}, {count} closure{'s' if count > 1 else ''}"
