"""Break-even points, from a table written by hand."""

import math

import pytest

import asap_jax as aj
from train.evaluation import breakeven
from train.evaluation.fidelity_table import COLUMNS, FidelityTable, Row

ODD, EVEN = (aj.SinkhornSpec(num_steps=steps) for steps in (9, 10))


def row(name, milliseconds):
    rest = dict.fromkeys(set(COLUMNS) - {"milliseconds"}, 0.0)
    return Row(name=name, milliseconds=milliseconds, **rest)


TABLE = FidelityTable(
    title="by hand",
    rows=(row("Sinkhorn S=3", 10.0), row("ASAP-0", 8.0), row("ASAP", 12.0), row("teacher", 20.0)),
    facts={},
)


def test_batches_to_break_even_are_fit_time_over_time_saved():
    points = {(p.operator, p.baseline): p for p in breakeven.report(TABLE, 6.0, EVEN)}
    assert points["ASAP-0", "teacher"].saved_milliseconds == 12.0
    assert points["ASAP-0", "teacher"].batches == pytest.approx(500)  # 6 s / 12 ms
    assert points["ASAP-0", "Sinkhorn S=3"].batches == pytest.approx(3000)  # 6 s / 2 ms
    assert points["ASAP", "teacher"].batches == pytest.approx(750)  # 6 s / 8 ms


def test_a_slower_operator_never_pays_and_says_so():
    point = breakeven.report(TABLE, 6.0, EVEN)[3]
    assert (point.operator, point.baseline) == ("ASAP", "Sinkhorn S=3")
    assert math.isinf(point.batches)
    assert point.saved_milliseconds == -2.0
    assert "never pays" in str(point)


@pytest.mark.parametrize(
    ("closures", "spec", "count"),
    [
        ("one_sided", EVEN, 1),
        ("one_sided", ODD, 1),
        ("two_sided", ODD, 2),
        ("two_sided", EVEN, 3),
    ],
)
def test_operation_counts_of_the_cost_appendix(closures, spec, count):
    points = {p.operator: p for p in breakeven.report(TABLE, 6.0, spec)}
    name = {"one_sided": "ASAP-0", "two_sided": "ASAP"}[closures]
    assert points[name].closures == count
