"""The study of operators on several teachers and seeds (``python -m train study fidelity``).

On every teacher it measures softmax, Sinkhorn budgets below the teacher's, the paper's ASAP-0 and
ASAP, and moments and the automatic fit for 1, 2 and 3 closures, and two codebooks for one closure
that ends on rows. They are fitted on training
examples and measured on test examples.  Teachers that differ only in the seed form a group.
"""

import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence

import asap_jax as aj
from train.evaluation import compile_teacher, fidelity
from train.runtime import machine
from train.study import cache, closures_plot, entries, results
from train.study.groups import groups_of, load
from train.study.results import Group, Study
from train.study.teacher_figures import TEST_EXAMPLES, measure
from train.training.splits import announce, load_data


def run(
    folders: Sequence[pathlib.Path],
    data_dir: str | None,
    out: pathlib.Path,
    *,
    test_examples: int = TEST_EXAMPLES,
    num_images: int = compile_teacher.NUM_IMAGES,
    thorough: bool = False,
    auto: bool = True,
    again: bool = False,
) -> tuple[Study, list[pathlib.Path]]:
    """Runs the study, and writes its files after every teacher.

    The figures of a teacher are also stored in its run folder. A later study with the same settings
    reads them from there.

    Args:
      folders: run folders of Sinkhorn teachers.
      data_dir: TFDS folder.
      out: folder for ``study.md``, ``study.json`` and ``study.png``.
      test_examples, num_images: see ``measure``.
      thorough: let the automatic fit choose from ``aj.THOROUGH`` instead of ``aj.CANDIDATES``.
      auto: with the automatic fit, which takes most of the time.
      again: measure again, even if figures are stored.

    Returns:
      The study and the paths of its files.

    Raises:
      UserError: see ``load`` and ``groups_of``; or a data set does not exist.
    """
    candidates = (aj.THOROUGH if thorough else aj.CANDIDATES) if auto else ()
    finished: dict[str, Group] = {}
    for label, members in groups_of(load(folders)).items():
        done = []
        for folder, trained in members:
            split = load_data(trained.recipe, data_dir, folder)
            announce(split)
            settings = cache.settings_of(
                trained,
                training=len(split.train),
                test=min(test_examples, len(split.test)),
                calibration=num_images,
                candidates=[repr(candidate) for candidate in candidates],
                codebooks=list(entries.codebooks(trained.recipe.spec)),
                columns=list(results.COLUMNS),
            )
            limits = dict(test_examples=test_examples, num_images=num_images)
            figures = cache.cached(
                folder / cache.FIDELITY,
                settings,
                functools.partial(measure, folder, trained, split, candidates=candidates, **limits),
                results.TeacherFigures.read,
                again=again,
            )
            done.append(dataclasses.replace(figures, run=str(folder)))
            facts = _facts(trained.recipe, done, split, test_examples, num_images)
            finished[label] = Group(label, facts, results.lines_of(done), tuple(done))
            study = Study(
                "Fidelity over seeds", tuple(finished.values()), _common_facts(thorough, auto)
            )
            written = [*study.write(out), closures_plot.draw(study, out / "study.png")]
    return study, written


def _facts(recipe, done, split, test_examples, num_images) -> dict[str, str]:
    """What the figures of a group were measured on."""
    spread = lambda name, form: results.Spread.of(
        [getattr(teacher, name) for teacher in done]
    ).text(form)
    seeds = ", ".join(str(teacher.seed) for teacher in done)
    used, unit = min(test_examples, len(split.test)), split.test.unit
    facts = {
        "seeds": f"{seeds}; figures of several seeds are median and range (lowest to highest)",
        "teacher accuracy": f"{spread('accuracy', '{:.3f}')} on all {len(split.test)} test {unit}",
        "score standard deviation": spread("score_std", "{:.2f}"),
    }
    sinkhorn = [line for line in results.lines_of(done) if line.family == "Sinkhorn"]
    same_ending = [line for line in sinkhorn if line.same_ending]
    if same_ending:
        lowest = same_ending[0]
        facts[f"rel-l2 of {lowest.name}"] = (
            f"{lowest.values['rel_l2'].text('{:.4f}')}, the lowest budget that ends on the same "
            "side as the teacher"
        )
    counts = collections.defaultdict(collections.Counter)
    for teacher in done:
        for row in teacher.rows:
            counts[row.name].update(row.chosen.values())
    for name, counted in counts.items():
        if counted:
            shares = (f"{candidate!r} in {n}" for candidate, n in counted.most_common())
            facts[f"{name}: chosen"] = f"{', '.join(shares)} of {counted.total()} layers"
    facts["data"] = (
        f"{recipe.dataset}, {used} test {unit}, none of them used to fit; {done[0].cases} cases "
        f"per teacher (a case is a batch of up to {fidelity.BATCH_SIZE} at one layer)"
    )
    facts["fit"] = f"{min(num_images, len(split.train))} training {unit}"
    facts["seconds per teacher"] = spread("seconds", "{:.0f}")
    return facts


def _common_facts(thorough: bool, auto: bool) -> dict[str, str]:
    chosen = "THOROUGH" if thorough else "CANDIDATES"
    chosen = f"{chosen}, chosen on held-out calibration batches for fidelity alone"
    return {
        "a star": "the operator does not end on the same side as the teacher",
        "rel-l2": "of the attention weights, mean and median over cases",
        "output median": "relative distance of the head outputs, median over cases",
        "calls": "softmax attention calls of a layer that stores no N x M array",
        "extra cost": "multiply-adds of the prediction, in units of the products of one head's "
        "scores (N M d); sorts, exponentials and the closures are not counted",
        "auto": chosen if auto else "left out",
        "date": time.strftime("%Y-%m-%d"),
        **machine.facts(),
    }
