"""The study of operators on several teachers and seeds (``python -m train study fidelity``).

For every teacher: softmax, the Sinkhorn budgets below its own, the paper's ASAP-0 and ASAP, and
moments and the automatic fit for 1, 2 and 3 closures.  All of them are fitted on training
examples and measured on test examples; teachers that differ in the seed alone are one group.
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
from train.study import cache, closures_plot, results
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
    again: bool = False,
) -> tuple[Study, list[pathlib.Path]]:
    """The study of the teachers in ``folders``; the files are written after each of them.

    Each teacher's figures are stored in its run folder too, and read from there under the same
    settings.

    Args:
      folders: run folders of Sinkhorn teachers.
      data_dir: TFDS folder.
      out: folder for ``study.md``, ``study.json`` and ``study.png``.
      test_examples, num_images: see ``measure``.
      thorough: let the automatic fit choose among ``aj.THOROUGH``.
      again: measure again although there are stored figures.

    Returns:
      The study and the files.

    Raises:
      UserError: see ``load`` and ``groups_of``; the data are not there.
    """
    candidates = aj.THOROUGH if thorough else aj.CANDIDATES
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
            study = Study("Fidelity over seeds", tuple(finished.values()), _common_facts(thorough))
            written = [*study.write(out), closures_plot.draw(study, out / "study.png")]
    return study, written


def _facts(recipe, done, split, test_examples, num_images) -> dict[str, str]:
    """What a group was measured on."""
    spread = lambda name, form: results.Spread.of([getattr(t, name) for t in done]).text(form)
    seeds = ", ".join(str(one.seed) for one in done)
    used, unit = min(test_examples, len(split.test)), split.test.unit
    facts = {
        "seeds": f"{seeds}; of several, the median and the range from lowest to highest",
        "teacher accuracy": f"{spread('accuracy', '{:.3f}')} on all {len(split.test)} test {unit}",
        "score standard deviation": spread("score_std", "{:.2f}"),
    }
    lowest = [line for line in results.lines_of(done) if line.family == "Sinkhorn"]
    lowest = [line for line in lowest if line.same_ending]
    if lowest:
        first = lowest[0]
        facts[f"rel-l2 of {first.name}"] = (
            f"{first.values['rel_l2'].text('{:.4f}')}, the lowest budget that ends as the teacher"
        )
    counts = collections.defaultdict(collections.Counter)
    for one in done:
        for row in one.rows:
            counts[row.name].update(row.chosen.values())
    for name, counted in counts.items():
        if counted:
            shares = (f"{candidate!r} in {n}" for candidate, n in counted.most_common())
            facts[f"{name}: chosen"] = f"{', '.join(shares)} of {counted.total()} layers"
    facts["data"] = (
        f"{recipe.dataset}, {used} test {unit}, none of them used to fit; {done[0].cases} cases a "
        f"teacher (a batch of up to {fidelity.BATCH_SIZE} at a layer)"
    )
    facts["fit"] = f"{min(num_images, len(split.train))} training {unit}"
    facts["seconds a teacher"] = spread("seconds", "{:.0f}")
    return facts


def _common_facts(thorough: bool) -> dict[str, str]:
    chosen = "THOROUGH" if thorough else "CANDIDATES"
    return {
        "a star": "the operator ends on the other side than the teacher",
        "rel-l2": "of the attention weights, mean and median over cases",
        "extra cost": "multiply-adds of the prediction, in units of the products of one head's "
        "scores (N M d); sorts, exponentials and the closures are not counted",
        "auto": f"{chosen}, chosen on held-out calibration batches for fidelity alone",
        "date": time.strftime("%Y-%m-%d"),
        **machine.facts(),
    }
