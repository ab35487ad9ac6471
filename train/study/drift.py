"""How compiled layers hold up on inputs unlike those of their calibration.

Every layer of a teacher is compiled on its own training examples. Then it is measured where the
teacher's own queries are multiplied by a number, and on other inputs, beside Sinkhorn with fewer
steps and what ``diagnose`` says.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

import asap_jax as aj
from asap_jax.compiler import diagnosis
from asap_jax.fitting import fidelity
from asap_jax.predictor.statistics import with_limits
from asap_jax.records import Record
from train.evaluation import compile_teacher
from train.reporting import progress
from train.reporting.table import Report, Table
from train.runtime import machine
from train.study import drift_inputs
from train.study.paper.fits import solve
from train.training import factory
from train.training.splits import Split, announce, load_data
from train.training.teacher import Teacher, load_teacher

SCALES = (1.0, 1.5, 2.0, 3.0)
FITTED_SCALES = (1.0, 1.5)
CLOSURES = (1, 2)
BUDGETS = (2, 4)
TEST_EXAMPLES = 200
WATCHED = "moments, n=2"
States = dict[str, aj.CompiledState]
Records = Mapping[str, Record]


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of input.

    Attributes:
      inputs: its name.
      rel_l2: operator to attention rel-l2, mean over layers.
      worst: operator to the largest rel-l2 of a layer.
      drift: the largest distance of a statistic from its calibration over all layers, by
        ``diagnose``.
      score_ratio: scores over those of the calibration, of the layer farthest from 1.
      recalibrate: what ``diagnose`` says.
    """

    inputs: str
    rel_l2: dict[str, float]
    worst: dict[str, float]
    drift: float
    score_ratio: float
    recalibrate: bool


def run(
    folder: pathlib.Path,
    data_dir: str | None,
    out: pathlib.Path,
    *,
    test_examples: int = TEST_EXAMPLES,
    num_images: int = compile_teacher.NUM_IMAGES,
) -> tuple[Report, list[pathlib.Path]]:
    """Measures drift on one teacher and writes ``drift.md`` and ``drift.json``.

    Args:
      folder: run folder of a Sinkhorn teacher.
      data_dir: TFDS folder.
      out: folder to write to.
      test_examples: largest number of test examples of every kind.
      num_images: number of calibration examples.

    Raises:
      UserError: there is no teacher or data set, or the teacher's attention is not Sinkhorn.
    """
    trained = load_teacher(folder)
    compile_teacher.check_sinkhorn(trained)
    split = load_data(trained.recipe, data_dir, folder)
    announce(split)
    rows = measure(folder, trained, split, test_examples=test_examples, num_images=num_images)
    recipe = trained.recipe
    facts = {
        "teacher": f"{recipe.name} ({recipe.preset}), S={recipe.spec.num_steps}, seed "
        f"{trained.seed}",
        "figure": "attention rel-l2 to the teacher on the same inputs, mean over layers",
        "guard": "the same fit with guard=True",
        "scales": f"a fit to the calibration queries times {FITTED_SCALES[0]:g} and "
        f"{FITTED_SCALES[1]:g}",
        "diagnose": f"of {WATCHED}: largest drift of a statistic over the layers (limit "
        f"{diagnosis.LIMIT:g}), scores over those of the calibration, verdict",
        "examples": f"{num_images} training examples to fit, at most {test_examples} of each kind "
        "of input",
        **machine.facts(),
    }
    report = Report("Drift of compiled layers", [table(rows)], facts, {"rows": rows})
    return report, list(report.write(out, "drift"))


def measure(
    folder: pathlib.Path,
    trained: Teacher,
    split: Split,
    *,
    test_examples: int = TEST_EXAMPLES,
    num_images: int = compile_teacher.NUM_IMAGES,
) -> list[Row]:
    """The rows of the table: the own test set at all scales, then the other inputs."""
    batches = list(compile_teacher.calibration_batches(trained, split.train, num_images))
    fitted = fits(trained, batches)
    model = aj.linen.Calibration(factory.build(trained.recipe))
    inputs = drift_inputs.inputs_of(folder, trained, split, test_examples)
    rows = []
    with progress.bar(f"drift of {folder}", len(inputs) + len(SCALES) - 1) as report:
        for name, values in inputs.items():
            records = model.records(trained.variables, values)
            for scale in SCALES if name == drift_inputs.OWN else (1.0,):
                label = name if scale == 1 else f"{name}, queries x {scale:g}"
                scaled = {path: record.with_queries(scale) for path, record in records.items()}
                rows.append(row(label, scaled, fitted))
                report(len(rows), label)
    return rows


def fits(trained: Teacher, batches: list[Any]) -> dict[str, States]:
    """Compiled states by operator, each operator under its name in the table."""
    recipe, found = trained.recipe, {}
    plain = aj.Candidate("moments", padding="none")
    for count in (n for n in CLOSURES if n < recipe.spec.num_steps):
        for name, fit in (
            ("moments", plain),
            ("scales", dataclasses.replace(plain, scales=FITTED_SCALES)),
        ):
            options = aj.Options(fit, closures=count, holdout=0.0, seed=trained.seed)
            calibration = aj.linen.Calibration(factory.build(recipe), options)
            states, _ = solve(calibration, trained.variables, batches)
            found[f"{name}, n={count}"] = states
            if name == "moments":
                found[f"guard, n={count}"] = guarded(states)
    return found


def guarded(states: States) -> States:
    """The states of the same fit with a guard."""

    def one(state: aj.CompiledState) -> aj.CompiledState:
        limits = with_limits(state.predictor.statistics)
        predictor = dataclasses.replace(state.predictor, statistics=limits)
        return dataclasses.replace(state, predictor=predictor)

    return {path: one(state) for path, state in states.items()}


def row(name: str, records: Records, fitted: Mapping[str, States]) -> Row:
    """Every operator on the records of one kind of input."""
    (spec,) = {record.spec for record in records.values()}
    errors = {}
    for operator, states in fitted.items():
        settings = lambda path, states=states: dict(
            predictor=states[path].predictor, closures=states[path].closures
        )
        errors[operator] = [
            fidelity.rel_l2(record, aj.asap_attention, spec=spec, **settings(path))
            for path, record in records.items()
        ]
    for steps in (steps for steps in BUDGETS if steps < spec.num_steps):
        small = dataclasses.replace(spec, num_steps=steps)
        errors[f"Sinkhorn S={steps}"] = [
            fidelity.rel_l2(record, aj.sinkhorn_attention, spec=small)
            for record in records.values()
        ]
    watched = fitted.get(WATCHED) or next(iter(fitted.values()))
    found = diagnosis.diagnose(records, watched, teacher=False)
    layers = found.layers.values()
    ratios = [float(layer.score_ratio) for layer in layers]
    errors = {name: [float(x) for x in values] for name, values in errors.items()}
    return Row(
        name,
        {operator: float(np.mean(values)) for operator, values in errors.items()},
        {operator: float(np.max(values)) for operator, values in errors.items()},
        max(float(layer.drift) for layer in layers),
        max(ratios, key=lambda ratio: abs(np.log(ratio))),
        bool(found.recalibrate),
    )


def table(rows: list[Row]) -> Table:
    """The rows as text."""
    operators = list(rows[0].rel_l2)
    headings = ["inputs", *operators, "drift", "score ratio", "diagnose"]
    cells = [
        [
            row.inputs,
            *(f"{row.rel_l2[name]:.3f}" for name in operators),
            f"{row.drift:.1f}",
            f"{row.score_ratio:.2f}",
            "recalibrate" if row.recalibrate else "ok",
        ]
        for row in rows
    ]
    return Table(headings, cells)
