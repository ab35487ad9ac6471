"""Ideas past the recommended fits, one by one on the same teacher: what helps and what does not.

Every idea is a candidate of the automatic recipe with one thing changed, fitted to the aligned
dual of 1, 2 and 3 closures on calibration examples and measured once on test examples.  Feature
families that did not earn a place in the library live here.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

import asap_jax as aj
from asap_jax import masks
from asap_jax.features.moments import _moments, _product
from asap_jax.fitting import candidates
from train.evaluation import compile_teacher, fidelity, operators
from train.reporting import progress
from train.reporting.table import draw, markdown_lines
from train.runtime import machine
from train.study import cache
from train.study.groups import load
from train.study.measure import sample
from train.training import teacher as teachers
from train.training.teacher import Split, Teacher

CLOSURES = (1, 2, 3)
TEST_EXAMPLES = 200


@dataclasses.dataclass(frozen=True)
class _Extra:
    """Centred further columns on the moments of both sides; a family once it is subclassed."""

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None):
        t = _moments(q, k, scale, query_valid, key_valid)
        x = jnp.stack(self.columns(t), axis=-1)
        return x - masks.token_mean(x, t.valid)


@flax.struct.dataclass
class ThirdOrder(_Extra):
    """``u'C C_x C u``, the next term in the covariances after those of ``aj.Moments``."""

    def num_features(self, head_dim: int) -> int:
        """1."""
        return 1

    def columns(self, t):
        """One column ``(..., N)``."""
        by_c = _product(t.u, t.c)
        return [jnp.sum(by_c * _product(by_c, t.c_own), -1)]


@flax.struct.dataclass
class GaussianPlan(_Extra):
    """The dual between Gaussians of the moments of both sides, by the exact recursion.

    Between ``N(0, A)`` and ``N(0, B)`` every half-step of Sinkhorn gives a quadratic dual:
    ``-x'P x / 2`` with ``P = (Q + 1/B)^-1``, where ``Q = (P + 1/A)^-1`` is the other side's of the
    step before; ``P = B`` after the first.  Features are ``u'P u`` and ``u'P delta``.
    """

    steps: int = flax.struct.field(pytree_node=False, default=4)

    def num_features(self, head_dim: int) -> int:
        """2."""
        return 2

    def columns(self, t):
        """Two columns ``(..., N)``."""
        small = 1e-4 * jnp.eye(t.c.shape[-1], dtype=t.c.dtype)
        own, other = (jnp.linalg.inv(c + small) for c in (t.c_own, t.c))
        p = t.c
        for _ in range(self.steps):
            p = jnp.linalg.inv(jnp.linalg.inv(p + own) + other)
        by_p = _product(t.u, p)
        return [jnp.sum(t.u * by_p, -1), jnp.einsum("...nd,...d->...n", by_p, t.delta)]


def ideas(head_dim: int) -> tuple[aj.Candidate, ...]:
    """All of them; the first is what the others are told from."""
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
      trained: a Sinkhorn teacher of two steps or more.
      split: its data.
      chosen: the ideas.
      test_examples, num_images: how many to measure and to calibrate on.
    """
    reference = operators.teacher(trained.recipe, trained.variables)
    batches = compile_teacher.calibration_batches(trained, split.train, num_images)
    fit = [fidelity.capture(reference, batch) for batch in batches]
    inputs = trained.recipe.inputs.prepare(sample(split.test, test_examples))
    test = [
        fidelity.capture(reference, inputs[start : start + fidelity.BATCH_SIZE])
        for start in range(0, len(inputs), fidelity.BATCH_SIZE)
    ]
    found = []
    counts = [n for n in CLOSURES if n < trained.recipe.spec.num_steps]
    with progress.bar(f"try {folder}", len(chosen)) as report:
        for done, candidate in enumerate(chosen, 1):
            rel_l2 = {}
            for n in counts:
                if candidate.suits(n, masked=next(iter(fit[0].values())).mask is not None):
                    cases = []
                    for path in fit[0]:
                        records = [record[path] for record in fit]
                        predictor, _ = candidates.fit(candidate, records, n, seed=trained.seed)
                        cases += [
                            candidates.rel_l2(record[path], predictor, closures=n)
                            for record in test
                        ]
                    rel_l2[n] = float(np.median(jax.device_get(cases)))
            if rel_l2:
                found.append(Tried(str(folder), candidate.name, rel_l2))
            report(done, candidate.name)
    return found


def run(
    folders: Sequence[pathlib.Path],
    data_dir: str | None,
    out: pathlib.Path,
    *,
    test_examples: int = TEST_EXAMPLES,
    num_images: int = compile_teacher.NUM_IMAGES,
    again: bool = False,
    choose: Callable[[int], Sequence[aj.Candidate]] = ideas,
) -> list[Tried]:
    """Measures all teachers, prints a table each and writes ``ideas.md`` and ``ideas.json``.

    Each teacher's figures are kept in its run folder too and, under the same settings, taken from
    there.

    Args:
      folders: run folders of Sinkhorn teachers.
      data_dir: TFDS folder.
      out: folder to write to.
      test_examples, num_images: see ``measure``.
      again: measure teachers anew whose figures were kept.
      choose: from the width of a head to candidates.

    Raises:
      UserError: see ``load``; the data are not there.
    """
    found: list[Tried] = []
    lines = ["# Ideas, one by one", ""]
    for folder, trained in load(folders):
        split = teachers.load_data(trained.recipe, data_dir, folder)
        chosen = choose(trained.recipe.model.head_dim)
        settings = dict(
            step=trained.step,
            seed=trained.seed,
            test=test_examples,
            calibration=num_images,
            ideas=[candidate.name for candidate in chosen],
            versions=machine.facts()["versions"],
        )
        file = folder / cache.IDEAS
        some = None if again else cache.read(file, settings, _read)
        if some is None:
            teachers.announce(split)
            some = measure(
                folder,
                trained,
                split,
                chosen,
                test_examples=test_examples,
                num_images=num_images,
            )
            cache.write(file, settings, some)
        found += [dataclasses.replace(one, run=str(folder)) for one in some]
        counts = sorted({n for tried in some for n in tried.rel_l2})
        headings = ["idea", *(f"n={n}" for n in counts)]
        cell = lambda tried, n: f"{tried.rel_l2[n]:.4f}" if n in tried.rel_l2 else "-"
        rows = [[tried.name, *(cell(tried, n) for n in counts)] for tried in some]
        draw(progress.console(), str(folder), headings, rows)
        lines += [f"## {folder}", "", *markdown_lines(headings, rows), ""]
    facts = {
        "figure": "median attention rel-l2 over test cases after n closures",
        "examples": f"{num_images} training examples to fit, {test_examples} test examples",
        **machine.facts(),
    }
    lines += [f"- {name}: {fact}" for name, fact in facts.items()]
    out.mkdir(parents=True, exist_ok=True)
    (out / "ideas.md").write_text("\n".join(lines) + "\n")
    stored = {"tried": [dataclasses.asdict(tried) for tried in found], "facts": facts}
    (out / "ideas.json").write_text(json.dumps(stored, indent=1) + "\n")
    return found


def _read(plain) -> list[Tried]:
    """From JSON, whose keys are texts."""
    as_counts = lambda rel_l2: {int(n): float(value) for n, value in rel_l2.items()}
    return [Tried(**{**one, "rel_l2": as_counts(one["rel_l2"])}) for one in plain]
