"""Tries ideas beyond the recommended fits one by one on the same teacher, to see which help.

Every idea is a candidate of the automatic fit with one change.  It is fitted on calibration
examples for 1, 2 and 3 closures, and measured once on test examples.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import asap_jax as aj
from train.evaluation import compile_teacher, fidelity, operators
from train.reporting import progress
from train.reporting.table import Report, Table
from train.runtime import machine
from train.study import cache
from train.study.entries import closure_counts
from train.study.groups import load
from train.study.idea_features import GaussianPlan, ThirdOrder
from train.study.teacher_figures import sample
from train.training.splits import Split, announce, load_data
from train.training.teacher import Teacher

TEST_EXAMPLES = 200


def ideas(head_dim: int) -> tuple[aj.Candidate, ...]:
    """All ideas; the first is the baseline of the comparison."""
    moments = aj.Moments()
    bank = aj.SlicedPotentials(aj.slice_directions(0, 32, head_dim))
    every = lambda name, **settings: aj.Candidate(name, padding="none", **settings)
    return (
        every("moments"),
        aj.Candidate("moments of active tokens", padding="self"),
        aj.Candidate("moments of active tokens, all rows", padding="self", rows="all"),
        every("moments, pooled over heads", coefficients="pooled"),
        every("moments, weighted", damping=0.1),
        every("moments that a common shift leaves", features=(aj.Moments(absolute=False),)),
        every("moments, third order", features=(moments, ThirdOrder())),
        every("moments, Gaussian plan", features=(moments, GaussianPlan())),
        every("moments and 32 slices", features=(moments, bank)),
        every("moments, chain", chain=True),
        every("moments, chain, tuned", chain=True, tuned=40),
        every("codebook, 1 round", rounds=1),
        every("codebook, 2 rounds", rounds=2),
        every("codebook, 2 rounds, 32 centres", rounds=2, num_centres=32),
        every("codebook, 2 rounds, weighted", rounds=2, damping=0.1),
        every("codebook, 3 rounds", rounds=3),
        every("codebook, 3 rounds, 32 centres", rounds=3, num_centres=32),
        every("codebook, 3 rounds, 32 centres, weighted", rounds=3, num_centres=32, damping=0.1),
        every("codebook, 3 rounds, 64 centres", rounds=3, num_centres=64),
        every("codebook, 3 rounds, 64 centres, weighted", rounds=3, num_centres=64, damping=0.1),
        every("codebook, 4 rounds, 32 centres", rounds=4, num_centres=32),
        every("codebook, 2 rounds, chain", rounds=2, chain=True),
        every("codebook, 3 rounds, 32 centres, chain", rounds=3, num_centres=32, chain=True),
        every("codebook, 2 rounds, chain, tuned", rounds=2, chain=True, tuned=40),
    )


@dataclasses.dataclass(frozen=True)
class Tried:
    """One idea on one teacher: median attention rel-l2 over test cases, by closures."""

    run: str
    name: str
    rel_l2: dict[int, float]


def measure(
    folder: pathlib.Path,
    trained: Teacher,
    split: Split,
    chosen: Sequence[aj.Candidate],
    *,
    test_examples: int = TEST_EXAMPLES,
    num_images: int = compile_teacher.NUM_IMAGES,
) -> list[Tried]:
    """Fits and measures every idea on one teacher.

    Args:
      folder: run folder of the teacher.
      trained: a Sinkhorn teacher with two or more steps.
      split: its data.
      chosen: the ideas.
      test_examples: largest number of test examples to measure on.
      num_images: number of calibration examples.
    """
    reference = operators.teacher(trained.recipe, trained.variables)
    batches = compile_teacher.calibration_batches(trained, split.train, num_images)
    fit = [fidelity.capture(reference, batch) for batch in batches]
    inputs = trained.recipe.inputs.prepare(sample(split.test, test_examples))
    test = [fidelity.capture(reference, batch) for batch in fidelity.batches_of(inputs)]
    spec, tried = trained.recipe.spec, []
    metrics = functools.partial(
        fidelity.case_metrics,
        attend=operators.attend_compiled(spec),
        reference=reference.attend,
        key_mass=spec.key_mass,
    )
    counts = closure_counts(spec)
    masked = next(iter(fit[0].values())).mask is not None
    with progress.bar(f"try {folder}", len(chosen)) as report:
        for done, candidate in enumerate(chosen, 1):
            rel_l2 = {}
            for n in counts:
                if candidate.suits(n, masked=masked):
                    cases = []
                    for path in fit[0]:
                        records = [batch[path] for batch in fit]
                        predictor, _ = candidate.fit(records, n, seed=trained.seed)
                        state = aj.CompiledState(predictor, spec, n)
                        measured = [metrics(batch[path], state) for batch in test]
                        cases += [values["rel_l2"] for values in measured]
                    rel_l2[n] = float(np.median(jax.device_get(cases)))
            if rel_l2:
                tried.append(Tried(str(folder), candidate.name, rel_l2))
            report(done, candidate.name)
    return tried


def run(
    folders: Sequence[pathlib.Path],
    data_dir: str | None,
    out: pathlib.Path,
    *,
    test_examples: int = TEST_EXAMPLES,
    num_images: int = compile_teacher.NUM_IMAGES,
    again: bool = False,
    choose: Callable[[int], Sequence[aj.Candidate]] = ideas,
) -> tuple[Report, list[pathlib.Path]]:
    """Measures all ideas on all teachers and writes ``ideas.md`` and ``ideas.json``.

    The figures of a teacher are also stored in its run folder. A later study with the same settings
    reads them from there.

    Args:
      folders: run folders of Sinkhorn teachers.
      data_dir: TFDS folder.
      out: folder to write to.
      test_examples, num_images: see ``measure``.
      again: measure again, even if figures are stored.
      choose: from the width of a head to the ideas.

    Returns:
      The report and the paths of its files.

    Raises:
      UserError: see ``load``; or a data set does not exist.
    """
    tried, tables = [], []
    limits = dict(test_examples=test_examples, num_images=num_images)
    for folder, trained in load(folders):
        split = load_data(trained.recipe, data_dir, folder)
        announce(split)
        chosen = choose(trained.recipe.model.head_dim)
        settings = cache.settings_of(
            trained,
            test=test_examples,
            calibration=num_images,
            ideas=[candidate.name for candidate in chosen],
        )
        figures = cache.cached(
            folder / cache.IDEAS,
            settings,
            functools.partial(measure, folder, trained, split, chosen, **limits),
            _read,
            again=again,
        )
        tried += [dataclasses.replace(idea, run=str(folder)) for idea in figures]
        tables.append(_table(str(folder), figures))
    facts = {
        "figure": "median attention rel-l2 over test cases after n closures",
        "examples": f"{num_images} training examples to fit, {test_examples} test examples",
        **machine.facts(),
    }
    report = Report("Ideas, one by one", tables, facts, {"tried": tried})
    return report, list(report.write(out, "ideas"))


def _table(title: str, tried: Sequence[Tried]) -> Table:
    counts = sorted({n for idea in tried for n in idea.rel_l2})
    cell = lambda idea, n: f"{idea.rel_l2[n]:.4f}" if n in idea.rel_l2 else "-"
    rows = [[idea.name, *(cell(idea, n) for n in counts)] for idea in tried]
    return Table(["idea", *(f"n={n}" for n in counts)], rows, title)


def _read(stored: list[dict[str, Any]]) -> list[Tried]:
    """The ideas from JSON, where the numbers of closures are strings."""
    as_counts = lambda rel_l2: {int(n): float(value) for n, value in rel_l2.items()}
    return [Tried(**{**idea, "rel_l2": as_counts(idea["rel_l2"])}) for idea in stored]
