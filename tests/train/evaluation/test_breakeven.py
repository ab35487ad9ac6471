"""Break-even points: the time of a fit over the time that a batch saves."""

import math

import pytest

from train.evaluation.breakeven import break_even


def test_batches_to_break_even_are_fit_time_over_time_saved():
    point = break_even("ASAP-0", "teacher", 1, 6.0, 12.0)
    assert point.batches == pytest.approx(500)  # 6 s / 12 ms
    assert str(point) == (
        "ASAP-0 (R=1): fit 6.0 s, +12.00 ms a batch against teacher: pays after 500 batches"
    )


@pytest.mark.parametrize("saved", [0.0, -2.0])
def test_an_operator_that_is_not_faster_never_pays_and_says_so(saved):
    point = break_even("ASAP", "Sinkhorn S=3", 3, 6.0, saved)
    assert math.isinf(point.batches)
    assert "never pays" in str(point)
