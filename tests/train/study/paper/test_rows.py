"""Counts of the rows: passes, calls and final updates, and the rows that every table has."""

import pytest

import asap_jax as aj
from train.study.paper import frozen_tables, rows
from train.study.paper.presets import PRESETS

COLUMNS, ROWS = aj.SinkhornSpec(num_steps=20), aj.SinkhornSpec(num_steps=5)
SMALL = PRESETS["small"]


@pytest.mark.parametrize(
    ("spec", "passes", "calls", "updates"),
    [
        (COLUMNS, (1, 3), (2, 4), ("one-sided key", "two-sided column-ending")),
        (ROWS, (1, 2), (2, 2), ("one-sided key", "two-sided row-ending")),
    ],
)
def test_the_paper_counts_one_two_or_three_transforms(spec, passes, calls, updates):
    pair = rows.least_squares(100)
    assert tuple(row.passes(spec) for row in pair) == passes
    assert tuple(row.calls(spec) for row in pair) == calls
    assert tuple(row.final_update(spec) for row in pair) == updates


def test_the_residual_fit_costs_one_pass_more_and_its_control_is_sinkhorn_of_as_many_steps():
    for spec, steps in ((COLUMNS, (2, 4)), (ROWS, (2, 3))):
        fitted = rows.residual(spec, 100, 8, token_bias=False)
        assert [row.zero for row in fitted] == [False, True, False, True]
        assert tuple(row.passes(spec) for row in fitted[::2]) == steps
        for control, count in zip(fitted[1::2], steps, strict=True):
            assert control.name.endswith(f"Sinkhorn S={count}")


def test_one_call_is_one_pass_and_one_call():
    for spec, mass in ((COLUMNS, True), (ROWS, False)):
        two, moments, codebook = rows.recommended(spec, SMALL)
        assert (two.passes(spec), two.closures) == (2, 2)
        for row in (moments, codebook):
            assert (row.passes(spec), row.calls(spec)) == (1, 1)
            assert row.fit.row_mass == mass
            assert row.final_update(spec) == "1 closures, row-ending"


def test_every_frozen_table_has_the_recommended_rows_and_the_budgets_of_both_endings():
    for table in frozen_tables.TABLES.values():
        names = [row.name for row in table.choose(COLUMNS, SMALL)]
        assert len(set(names)) == len(names)
        for steps in (2, 3, 4, 5, 6):
            assert f"Sinkhorn normalizer (S={steps})" in names
        assert {row.name for row in rows.recommended(COLUMNS, SMALL)} <= set(names)
        assert names[-1] == "Sinkhorn teacher (S=20)"


def test_budgets_are_below_the_teacher():
    assert [row.steps for row in rows.budgets(ROWS)] == [2, 3, 4]


def test_rows_share_figures_when_only_their_labels_differ():
    one, other = rows.least_squares(100)[0], rows.Compiled("x", aj.PaperFit(), "one_sided", 100)
    assert rows.key(one) == rows.key(other)
    assert rows.key(one) != rows.key(rows.least_squares(101)[0])
    assert rows.key(one) != rows.key(rows.least_squares(100)[1])


def test_every_row_has_its_counts():
    for table in frozen_tables.TABLES.values():
        for row in table.choose(COLUMNS, SMALL):
            passes, calls = row.passes(COLUMNS), row.calls(COLUMNS)
            direct = "both duals" in row.name
            assert (passes == 0) == direct, row.name
            assert calls >= 1
            assert (row.final_update(COLUMNS) == "none") == direct, row.name
