"""The judgement of a report, on rows made up for it, and the comparison of model outputs."""

import math

import jax
import numpy as np
import problems
import pytest

from asap_jax.compiler import clock, end_to_end, verdict
from asap_jax.compiler.report import METRICS, CompileReport, LayerReport

TWO = "compiled, 2 closures"


def rows(compiled, *budgets, calls=3, output=None):
    """A compiled operator and Sinkhorn S=1, 2, ... with these errors."""
    row = lambda calls, error: dict.fromkeys(METRICS, error) | dict(calls=calls)
    found = {TWO: row(calls, compiled)}
    for steps, error in enumerate(budgets, 1):
        found[f"Sinkhorn S={steps}"] = row(steps + (steps + 1) % 2, error)
    if output is not None:
        found[TWO]["output_rel_l2"] = output
    return found | {"teacher": row(11, 0.0)}


def layer(found, path="layer", **fit):
    fit = dict(r_squared=0.9, num_rows=10_000, num_coefficients=40, setting="moments") | fit
    return LayerReport(path, found, fit, closures=2, num_steps=10)


def test_the_rival_is_the_best_sinkhorn_of_as_many_calls():
    (found,) = verdict.verdicts(rows(0.2, 0.9, 0.4, 0.3, 0.15, 0.1), "teacher")
    assert (found.closer, found.rival, found.rival_error) == (True, "Sinkhorn S=3", 0.3)
    assert found.enough == "Sinkhorn S=4"  # S=4 and S=5 have five calls each
    (found,) = verdict.verdicts(rows(0.35, 0.9, 0.4, 0.3), "teacher")
    assert (found.closer, found.rival) == (False, "Sinkhorn S=3")


def test_layers_that_end_on_rows_are_judged_by_their_outputs():
    (found,) = verdict.verdicts(rows(0.5, 0.9, 0.4, 0.3, output=0.1), "row")
    assert (found.closer, found.error) == (True, 0.1)


def test_an_error_that_is_not_a_number_is_not_closer():
    (found,) = verdict.verdicts(rows(math.nan, 0.9), "teacher")
    assert found.closer is False


def test_no_budget_of_as_many_calls_gives_no_judgement():
    (found,) = verdict.verdicts(rows(0.2, calls=1), "teacher")
    assert (found.closer, found.rival, found.enough) == (None, None, None)


@pytest.mark.parametrize(
    ("fit", "word"),
    [
        (dict(featureless_queries=5.0), 'padding="none"'),
        (dict(setting="PaperFit"), 'fit="moments"'),
        (dict(num_rows=100), "more calibration batches"),
        ({}, "closures=3"),
        ({}, 'fit="auto"'),
    ],
)
def test_the_report_says_what_to_try(fit, word):
    text = str(layer(rows(0.5, 0.9, 0.4), **fit))
    assert "NO CLOSER than Sinkhorn S=2 (3 calls): 0.5 against 0.4" in text
    (advice,) = (line for line in text.splitlines() if "what to try" in line)
    assert word in advice


def test_a_good_layer_gets_no_advice():
    assert "what to try" not in str(layer(rows(0.1, 0.9, 0.4)))


def test_the_head_of_a_report_names_the_worst_layer_and_layers_that_lose():
    layers = {name: layer(rows(e, 0.9, 0.4), name) for name, e in (("a", 0.1), ("b", 0.5))}
    model = end_to_end.ModelReport(10, 0.9, 0.1, 0.7, 3.0)
    text = str(CompileReport(layers, True, 4, 1, 12.0, 7.0, model))
    assert "12.0 s (7.0 s of it compilation)" in text
    assert "median layer 0.3, worst layer 0.5 (b)" in text
    assert "WARNING: no closer than Sinkhorn with as few calls: b\n" in text
    assert "same class for 90.0 %" in text
    assert "0.7 at the worst example" in text


@pytest.mark.parametrize("error", [0.3, math.nan])
def test_the_head_of_a_report_names_layers_that_are_far_from_the_teacher(error):
    layers = {"a": layer(rows(error, 0.9, 0.8), "a"), "b": layer(rows(0.1, 0.9, 0.8), "b")}
    text = str(CompileReport(layers, True, 4, 1, 1.0))
    assert f"WARNING: error above 0.2: a ({error:.2g})\n" in text
    assert "error above" not in str(CompileReport({"b": layers["b"]}, True, 4, 1, 1.0))


# ----------------------------------------------------------------------------- outputs of the model


def test_outputs_are_compared_example_by_example(rng):
    theirs = rng.normal(size=(2, 4, 5)).astype("f4")
    ours = theirs.copy()
    ours[1, 2] = -3 * theirs[1, 2]
    pairs = [([problems.array(a)], [problems.array(b)]) for a, b in zip(ours, theirs, strict=True)]
    found = end_to_end.compare(pairs)
    assert (found.num_examples, found.agreement) == (8, 7 / 8)
    assert (found.mean_change, found.worst_change) == pytest.approx((0.5, 4.0), rel=1e-5)
    assert found.largest_difference == pytest.approx(4 * np.abs(theirs[1, 2]).max())


def test_tokens_are_no_classes_and_several_outputs_are_one_example(rng):
    theirs = [problems.normal(rng, 3, 4, 5), problems.normal(rng, 3)]
    ours = [2 * theirs[0], theirs[1]]
    found = end_to_end.compare([(ours, theirs)])
    assert (found.num_examples, found.agreement) == (3, None)
    assert 0.5 < found.mean_change < 1


def test_numbers_that_the_teacher_does_not_have_are_left_out(rng):
    theirs, ours = rng.normal(size=(2, 3, 5)).astype("f4")
    expected = end_to_end.compare([([problems.array(ours)], [problems.array(theirs)])])
    beside = lambda x, fill: [problems.array(np.pad(x, ((0, 0), (0, 1)), constant_values=fill))]
    found = end_to_end.compare([(beside(ours, np.inf), beside(theirs, np.inf))])
    assert found.worst_change == pytest.approx(expected.worst_change)
    broken = end_to_end.compare([(beside(ours, np.nan), beside(theirs, 1.0))])
    assert np.isnan(broken.worst_change)


@pytest.mark.parametrize("shapes", [[], [()], [(3, 2), (4, 2)]], ids=["none", "scalar", "lengths"])
def test_outputs_without_examples_are_not_compared(rng, shapes):
    outputs = [problems.normal(rng, *shape) for shape in shapes]
    assert end_to_end.compare([(outputs, outputs)]) is None


# ---------------------------------------------------------------------------------------- the clock


def test_nested_blocks_count_once_and_compilation_is_a_part():
    watch = clock.Clock()
    with watch, watch:
        jax.jit(lambda x: x * 3.25 + 17)(np.float32(watch.seconds)).block_until_ready()
    before = watch.seconds
    jax.jit(lambda x: x * 4.25 + 18)(np.float32(1)).block_until_ready()
    assert 0 < watch.compile_seconds < watch.seconds == before
