"""Compiles a trained teacher on unlabeled training examples."""

from collections.abc import Iterator, Sequence

import numpy as np

import asap_jax as aj
from train.data.examples import Examples
from train.evaluation import operators
from train.evaluation.operators import Operator
from train.runtime import devices
from train.runtime.errors import UserError
from train.training import factory
from train.training.teacher import Teacher

NUM_IMAGES = 512
BATCH_SIZE = 64


def calibration_batches(
    teacher: Teacher, examples: Examples, num_images: int = NUM_IMAGES
) -> Iterator[np.ndarray]:
    """Draws batches of model inputs ``(batch, ...)``, without their labels.

    Args:
      teacher: its recipe prepares the inputs and its seed fixes the draw.
      examples: the training split.
      num_images: number of examples to draw, at most all of them. A last batch that is not full is
        dropped.
    """
    count = min(num_images, len(examples))
    size = min(BATCH_SIZE, max(count // 5, 1))
    chosen = np.random.default_rng(teacher.seed).permutation(len(examples))[:count]
    for start in range(0, count - size + 1, size):
        yield teacher.recipe.inputs.prepare(examples.take(chosen[start : start + size]))


def compile_teacher(
    teacher: Teacher, examples: Examples, options: aj.Options, *, num_images: int = NUM_IMAGES
) -> aj.CompileResult:
    """Fits the compiled layers of a Sinkhorn teacher.

    With several processes, each takes its share of the batches, and the sums are added up.

    Args:
      teacher: a trained teacher.
      examples: the training split; labels are not used.
      options: how to fit, for how many closures, with which seed.
      num_images: number of calibration examples; some batches are held out for the report.

    Returns:
      The result of ``aj.linen.compile``, with ``.variables`` and ``.report``.

    Raises:
      UserError: the teacher's attention is not Sinkhorn.
      ValueError: settings are out of range, or the teacher has only one Sinkhorn step.
    """
    check_sinkhorn(teacher)
    calibration = aj.linen.Calibration(factory.build(teacher.recipe), options)
    index, count = devices.share()
    batches = list(calibration_batches(teacher, examples, num_images))[index::count]
    total = devices.total if count > 1 else None
    return calibration.run(teacher.variables, batches, total=total)


def check_sinkhorn(teacher: Teacher) -> None:
    """Raises UserError unless the teacher has Sinkhorn attention."""
    if teacher.recipe.attention != "sinkhorn":
        raise UserError(
            f"the checkpoint was trained with {teacher.recipe.attention} attention: only "
            f"Sinkhorn attention can be compiled"
        )


def moment_rows(
    trained: Teacher,
    examples: Examples,
    counts: Sequence[int] = (1, 2, 3),
    num_images: int = NUM_IMAGES,
    *,
    ending: str = "teacher",
) -> list[Operator]:
    """Table rows of the library's moments fit, one for each number of closures.

    Args:
      trained: a Sinkhorn teacher with more steps than any of ``counts``.
      examples: the training split.
      counts: numbers of closures.
      num_images: number of calibration examples.
      ending: see ``aj.Options``.
    """
    rows = []
    for count in counts:
        options = aj.Options(fit="moments", closures=count, ending=ending, seed=trained.seed)
        result = compile_teacher(trained, examples, options, num_images=num_images)
        name = counted("Moments", count, ending)
        rows.append(operators.compiled_row(name, trained.recipe, result.variables))
    return rows


def counted(family: str, count: int, ending: str = "teacher") -> str:
    """The label of a row, for example ``"Moments, 2 closures"``."""
    suffix = ", row ending" if ending == "row" else ""
    return f"{family}, {count} closure{'s' if count > 1 else ''}{suffix}"
