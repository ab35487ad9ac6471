"""Statistics over cases and layers, against NumPy, and how they are printed."""

import numpy as np
import pytest

import asap_jax as aj
from train.study.paper import rows
from train.study.paper.fits import FitTime
from train.study.paper.frozen import METRICS, Cases, Score, Times
from train.study.paper.summary import Spread, line, number


def test_a_spread_is_mean_deviation_median_and_worst_layer():
    values = np.random.default_rng(0).uniform(size=(4, 3))
    layers = ["a", "b", "c"] * 4
    spread = Spread.of(values.ravel().tolist(), layers)
    assert spread.mean == pytest.approx(values.mean())
    assert spread.std == pytest.approx(values.std(ddof=1))
    assert spread.median == pytest.approx(np.median(values))
    assert spread.worst_layer == pytest.approx(values.mean(0).max())
    assert spread.count == 12
    assert (Spread.of([2.0]).std, Spread.of([2.0]).worst_layer) == (0.0, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.4567, "0.457"), (1.24e-7, "1.24e-07"), (float("inf"), "inf")],
)
def test_small_errors_are_printed_in_scientific_notation(value, text):
    assert number(value) == text


def test_the_deviation_is_printed_with_more_than_one_value():
    assert Spread.of([0.8, 0.9]).text("{:.2f}", 100) == "85.00 ± 7.07"
    assert Spread.of([0.8]).text("{:.2f}", 100) == "80.00"


class Stub:
    """A teacher whose figures are given."""

    def __init__(self, seed):
        self.values = np.random.default_rng(seed).uniform(size=(8, 2))
        self.seed = seed

    def cases(self, row):
        return Cases(["0", "1"] * 8, dict.fromkeys(METRICS, self.values.ravel().tolist()))

    def score(self, row):
        return Score(0.5 + 0.1 * self.seed, 1.0, 40)

    def fit_time(self, row):
        return FitTime(10.0, 1.0 + self.seed)


def test_a_line_pools_the_cases_of_all_seeds():
    teachers, row = [Stub(seed) for seed in range(3)], rows.least_squares(64)[1]
    base = "Sinkhorn normalizer (S=3)"
    times = [{row.name: Times([1.0, 3.0], [5.0]), base: Times([4.0, 4.0], [6.0])}] * 3
    one = line(row, teachers, aj.SinkhornSpec(20), score=True, times=times)
    pooled = np.concatenate([teacher.values for teacher in teachers])
    assert one.metrics["rel_l2"].count == 3 * 8 * 2
    assert one.metrics["rel_l2"].mean == pytest.approx(pooled.mean())
    assert one.metrics["rel_l2"].std == pytest.approx(pooled.std(ddof=1))
    assert one.metrics["rel_l2"].worst_layer == pytest.approx(pooled.mean(0).max())
    assert (one.accuracy.mean, one.accuracy.count) == (pytest.approx(0.6), 3)
    assert (one.fit_warm.mean, one.fit_first.mean) == (2.0, 10.0)
    assert (one.layer.mean, one.layer.count, one.speedup) == (2.0, 6, 2.0)
    assert (one.num_fit, one.passes, one.calls) == (64, 3, 4)
