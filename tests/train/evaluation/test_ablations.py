"""The paper's rows: all there, each compiled as its name says, on a tiny trained model."""

import dataclasses

import numpy as np
import pytest

import asap_jax as aj
from train.data import tfds
from train.evaluation import ablations, compile_teacher, fidelity
from train.training import loop
from train.training.splits import Split

PAPER = """
ASAP-LS-0 (L=32), ASAP-LS (L=32), ASAP-KL-0 (L=32), ASAP-KL (L=32),
ASAP-0, M=512; ASAP, M=512; ASAP-0, M=1024; ASAP, M=1024; ASAP-0, M=4096; ASAP, M=4096;
ASAP-LS-0 (L=8); ASAP-LS (L=8); ASAP-LS-0 (L=16); ASAP-LS (L=16);
ASAP-LS-0 (L=64); ASAP-LS (L=64); ASAP-LS-0 (L=128); ASAP-LS (L=128);
ASAP shared coefficients; ASAP per-head coefficients; ASAP orthogonal slices;
Raw projections + ASAP transform; Rank displacement + ASAP transform;
Predict both duals, no c-transform;
ASAP-0, residual log-sum-exp fit, token bias (L=256);
ASAP, residual log-sum-exp fit, token bias (L=256)
"""


@pytest.fixture(scope="module")
def one_layer(shallow, examples, tmp_path_factory):
    """A teacher of one layer: every row of a table compiles it again."""
    return loop.train(shallow, examples, tmp_path_factory.mktemp("one_layer"))


def test_every_row_of_the_paper_is_there():
    names = [row.name for row in ablations.settings(aj.PaperFit())]
    flat = PAPER.replace("\n", " ")
    assert len(names) == len(set(names)) == 26
    assert all(name in flat for name in names)


def test_settings_differ_in_what_their_name_says_and_in_nothing_else():
    base = aj.PaperFit(ridge=0.5)
    rows = {row.name: row for row in ablations.settings(base)}
    assert rows["ASAP-LS (L=32)"].fit == base
    for name, change in {
        "ASAP-KL-0 (L=32)": {"objective": "kl"},
        "ASAP-LS (L=128)": {"num_slices": 128},
        "ASAP shared coefficients": {"coefficients": "shared"},
        "Rank displacement + ASAP transform": {"features": "rank_displacement"},
        "Predict both duals, no c-transform": {},
    }.items():
        assert rows[name].fit == dataclasses.replace(base, **change), name
    assert rows["Predict both duals, no c-transform"].closures == "none"
    assert rows["ASAP-KL-0 (L=32)"].closures == "one_sided"
    assert rows["ASAP-KL (L=32)"].closures == "two_sided"
    assert [rows[f"ASAP, M={count}"].num_images for count in (512, 1024, 4096)] == [512, 1024, 4096]


def test_one_table_holds_every_kind_of_row(one_layer, examples, test_examples, monkeypatch):
    fits, compile_once = [], compile_teacher.compile_teacher

    def counted(*args, **settings):
        fits.append(args[2])
        return compile_once(*args, **settings)

    monkeypatch.setattr(compile_teacher, "compile_teacher", counted)
    chosen = ("-KL-0", "Predict", "-0, residual", "M=50")
    monkeypatch.setattr(ablations, "IMAGES", (50, 10_000))
    every = ablations.settings
    monkeypatch.setattr(
        ablations,
        "settings",
        lambda fit, images: [
            dataclasses.replace(row, fit=dataclasses.replace(row.fit, num_slices=4))
            for row in every(fit, images)
            if any(part in row.name for part in chosen)
        ],
    )
    split = Split(examples.take(slice(60)), test_examples.take(slice(30)), tfds.PACKAGED)
    table, points = ablations.run(one_layer, split, rounds=1)
    names = [row.name for row in table.rows]
    assert names[:8] == [
        *("softmax swap", "Sinkhorn S=2", "Sinkhorn S=3", "Sinkhorn S=4", "Sinkhorn S=5"),
        *("ASAP-0", "ASAP", "ASAP-KL-0 (L=32)"),
    ]
    assert names[-1] == "teacher"
    # ASAP-0 and ASAP of one fit share it: KL, M=50, both duals, residual, default.
    assert len(fits) == 5
    assert "10000" in table.facts["left out"]
    assert all(np.isfinite(row.rel_l2) for row in table.rows)
    for row in table.rows[5:-1]:  # a key closure balances columns; without one nothing is exact
        closed = "no c-transform" not in row.name
        assert (row.column_error < 1e-5) == closed, row.name
    assert [(p.operator, p.baseline) for p in points] == [
        (name, baseline) for name in ("ASAP-0", "ASAP") for baseline in ("teacher", "Sinkhorn S=3")
    ]


def test_a_row_is_measured_with_its_own_fit(one_layer, examples, test_examples):
    rows = [
        ablations.Setting("a", aj.PaperFit(num_slices=4), "two_sided", 60),
        ablations.Setting("b", aj.PaperFit(num_slices=4, objective="kl"), "one_sided", 60),
    ]
    more = ablations.compile_rows(one_layer, examples, rows)
    table = fidelity.measure(
        one_layer.recipe, one_layer.variables, test_examples, more=more, budgets=(2,), rounds=1
    )
    for row, setting in zip(more, rows, strict=True):
        options = aj.Options(fit=setting.fit, seed=one_layer.seed)
        alone = compile_teacher.compile_teacher(one_layer, examples, options, num_images=60)
        for path, state in row.states.items():
            leaf = alone.variables["asap"]
            for part in path:
                leaf = leaf[part]
            expected = leaf["state"].predictor.coefficients
            np.testing.assert_array_equal(state.predictor.coefficients, expected)
            assert state.closures == setting.closures
    assert table.row("a").rel_l2 < table.row("softmax swap").rel_l2
