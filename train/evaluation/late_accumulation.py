"""A fit to the sums of several states of a teacher, from the end of its training.

The normal equations of a fit may be added up while the teacher still trains. The fit then belongs
to all the states that were observed, not only to the last (paper, "Teacher Attention and Offline
Fit"). Here the states are the newest checkpoints of a run, and every state sees its part of the
calibration batches, so the work is that of a fit to the frozen teacher.
"""

from collections.abc import Sequence

import numpy as np

import asap_jax as aj
from asap_jax.compiler.fit import is_reported
from train.data.examples import Examples
from train.evaluation.compile_teacher import NUM_IMAGES, calibration_batches, check_sinkhorn
from train.reporting.table import Table
from train.runtime import devices
from train.runtime.errors import UserError
from train.training import factory
from train.training.teacher import Teacher

COLUMNS = {
    "rel_l2": "attention rel-l2",
    "output_rel_l2": "output rel-l2",
    "row_error": "row error",
    "column_error": "column error",
}


def compile_late(
    states: Sequence[dict],
    teacher: Teacher,
    examples: Examples,
    options: aj.Options,
    *,
    num_images: int = NUM_IMAGES,
) -> aj.CompileResult:
    """Compiles a teacher with sums over several of its states.

    The calibration batches are those of ``compile_teacher``. Those that are not held out for the
    report are divided among the states in order, so the earliest state sees the first ones.

    Args:
      states: linen variables of the teacher at several steps, the earliest first.
      teacher: the teacher to compile and to report on.
      examples: the training split; labels are not used.
      options: how to fit, for how many closures, with which seed.
      num_images: number of calibration examples.

    Raises:
      UserError: the attention is not Sinkhorn, or there are fewer batches than states.
    """
    check_sinkhorn(teacher)
    calibration = aj.linen.Calibration(factory.build(teacher.recipe), options)
    index, count = devices.share()
    batches = list(calibration_batches(teacher, examples, num_images))[index::count]
    fit = [b for i, b in enumerate(batches) if not is_reported(i, options.holdout)]
    report = [b for i, b in enumerate(batches) if is_reported(i, options.holdout)]
    if len(fit) < len(states):
        raise UserError(
            f"{len(fit)} calibration batches cannot be divided among {len(states)} states: use "
            f"more --images or a smaller --accumulate-last"
        )
    for number, batch in enumerate(fit):
        calibration.add(states[number * len(states) // len(fit)], batch, number)
    if count > 1:
        calibration.reduce(devices.total)
    return calibration.finish(teacher.variables, report or fit[-1:], held_out=bool(report))


def comparison(reports: dict[str, aj.CompileReport]) -> Table:
    """Fits side by side: for every compiled operator the means over the layers.

    Args:
      reports: from the name of a fit to its report.
    """
    cells = []
    for fit, report in reports.items():
        layers = list(report.layers.values())
        names = [name for name in layers[0].rows if not name.startswith(("Sinkhorn", "teacher"))]
        r_squared = np.mean([layer.fit["r_squared"] for layer in layers])
        for name in names:
            values = [np.mean([layer.rows[name][column] for layer in layers]) for column in COLUMNS]
            numbers = [f"{r_squared:.4f}", *(f"{value:.3g}" for value in values)]
            cells.append([fit, name, *numbers])
    headings = ["fit", "operator", "dual R2", *COLUMNS.values()]
    return Table(headings, cells, title="Sums over the states, and the frozen teacher", num_names=2)
