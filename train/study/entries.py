"""Fits the operators that a study compares on one teacher."""

import dataclasses
from collections.abc import Callable, Sequence

import asap_jax as aj
from asap_jax.spec import ENDINGS
from train.data.examples import Examples
from train.evaluation import compile_teacher, operators
from train.evaluation.operators import Operator
from train.training.teacher import Teacher

BUDGETS = (2, 3, 4, 5, 6)
CLOSURES = (1, 2, 3)
CODEBOOKS = ("codebook", "large codebook")
"""Fits of one closure that ends on rows; with a row mass where the teacher ends on columns."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One operator to measure.

    ``ends`` is the side of its last step; the other fields are those of ``Measured``.
    """

    operator: Operator
    family: str
    closures: int
    ends: str
    chosen: dict[str, str] = dataclasses.field(default_factory=dict)


def entries(
    trained: Teacher,
    examples: Examples,
    num_images: int,
    candidates: Sequence[aj.Candidate],
    report: Callable[[int, str], None] = lambda done, note: None,
) -> list[Entry]:
    """Fits all operators of one teacher.

    Args:
      trained: a teacher with two or more Sinkhorn steps.
      examples: the training split; labels are not used.
      num_images: number of calibration examples.
      candidates: candidates of the automatic fit, which has no time limit here; empty for no
        automatic fit.
      report: called with the number of fits done.
    """
    recipe, spec = trained.recipe, trained.recipe.spec
    budgets = tuple(steps for steps in BUDGETS if steps < spec.num_steps)
    counts = closure_counts(spec)
    softmax, *sinkhorn = operators.swaps(recipe, trained.variables, budgets)
    result = [Entry(softmax, "softmax", 1, "row")]
    for steps, row in zip(budgets, sinkhorn, strict=True):
        ends = dataclasses.replace(spec, num_steps=steps).last_step
        result.append(Entry(row, "Sinkhorn", steps, ends))
    fit = lambda options: compile_teacher.compile_teacher(
        trained, examples, options, num_images=num_images
    )
    paper = fit(aj.Options(fit="paper", seed=trained.seed))
    rows = operators.compiled(recipe, paper.variables)
    result += [compiled_entry(row, "ASAP (paper)", spec) for row in rows]
    report(1, "ASAP")
    done = 1
    for ending in ENDINGS:
        suffix = " (row)" if ending == "row" else ""
        limits = dict(num_images=num_images, ending=ending)
        rows = compile_teacher.moment_rows(trained, examples, counts, **limits)
        result += [compiled_entry(row, f"Moments{suffix}", spec) for row in rows]
        done += 1
        report(done, f"moments{suffix}")
        for name in codebooks(spec) if ending == "row" else ():
            options = aj.Options(fit=name, closures=1, ending=ending, seed=trained.seed)
            row_name = compile_teacher.counted(name.capitalize(), 1, ending)
            row = operators.compiled_row(row_name, recipe, fit(options).variables)
            result.append(compiled_entry(row, f"{name.split(',')[0].capitalize()} (row)", spec))
            done += 1
            report(done, name)
        for count in counts if candidates else ():
            automatic = aj.AutoFit(candidates=tuple(candidates), ladder=(count,), time_limit=None)
            options = dict(fit=automatic, closures=count, ending=ending, seed=trained.seed)
            compiled = fit(aj.Options(**options))
            name = compile_teacher.counted("Auto", count, ending)
            row = operators.compiled_row(name, recipe, compiled.variables)
            layers = compiled.report.layers.items()
            chosen = {path: str(layer.fit["candidate"]) for path, layer in layers}
            result.append(compiled_entry(row, f"Auto{suffix}", spec, chosen))
            done += 1
            report(done, name)
    return result


def closure_counts(spec: aj.SinkhornSpec) -> list[int]:
    """The numbers in ``CLOSURES`` that are below the teacher's number of steps."""
    return [count for count in CLOSURES if count < spec.num_steps]


def codebooks(spec: aj.SinkhornSpec) -> tuple[str, ...]:
    """Names of the fits in ``CODEBOOKS`` for a teacher."""
    return tuple(name if spec.last_step == "row" else f"{name}, row mass" for name in CODEBOOKS)


def compiled_entry(
    row: Operator, family: str, spec: aj.SinkhornSpec, chosen: dict[str, str] | None = None
) -> Entry:
    """The entry of a compiled row whose layers all have the same closures."""
    state = next(iter(row.states.values()))
    count = aj.attention.num_closures(state.closures, state.predictor.side, spec, state.ending)
    ends = "column" if state.closures == "one_sided" else spec.ended(state.ending).last_step
    return Entry(row, family, count, ends, chosen or {})
