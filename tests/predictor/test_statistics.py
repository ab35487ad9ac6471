"""Calibration statistics against float64 NumPy, scaled calibration, and the guard."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj
from asap_jax.fitting import targets
from asap_jax.predictor import statistics
from asap_jax.records import Record

BATCH, HEADS, LENGTH, DIM = 4, 2, 12, 4
SPEC = aj.SinkhornSpec(num_steps=8, epsilon=0.7)
PLAIN = aj.Candidate("moments", padding="none")
RUN = jax.jit(
    functools.partial(aj.asap_attention, spec=SPEC, closures=2, return_weights=True),
)


def record(rng, mask=None, spec=SPEC):
    """Queries and keys that share a part, of another size in every example."""
    draw = lambda: rng.normal(size=(BATCH, LENGTH, HEADS, DIM))
    shared, size = draw(), np.exp(0.1 * rng.normal(size=(BATCH, 1, 1, 1)))
    q, k = size * (shared + 0.3), 0.8 * (shared + 0.5 * draw())
    return Record.of(*(problems.array(x, "float32") for x in (q, k, draw())), None, mask, spec)


@pytest.fixture(scope="module")
def fitted():
    """Calibration records, a predictor with its statistics, and a record of other examples."""
    rng = np.random.default_rng(3)
    records = [record(rng) for _ in range(3)]
    predictor, _ = PLAIN.fit(records, 2)
    total = functools.reduce(
        functools.partial(jax.tree.map, jnp.add), map(targets.statistics_sums, records)
    )
    return dataclasses.replace(predictor, statistics=total.statistics()), record(rng)


def expected_logs(record, example, head, keys):
    """The logarithms of the four numbers of one problem, from its scores."""
    pick = lambda x: np.asarray(x, np.float64)[example, :, head]
    q, k = pick(record.query), pick(record.key)[keys]
    s = q @ k.T / np.sqrt(DIM) / SPEC.epsilon
    s = s - s.mean(0) - s.mean(1, keepdims=True) + s.mean()
    rms = lambda x: np.sqrt(np.square(x - x.mean(0)).sum(1).mean() / np.sqrt(DIM))
    return np.log([np.sqrt(np.square(s).mean()), rms(q), rms(k), len(k)])


@pytest.mark.parametrize("lengths", [None, [12, 5, 7, 0]], ids=["all", "padded"])
def test_statistics_are_those_of_the_centred_scores(rng, lengths):
    """An example without a key counts nowhere."""
    mask = None if lengths is None else problems.array(problems.key_padding(lengths, LENGTH))
    one = record(rng, mask)
    active = [n for n in lengths or [LENGTH] * BATCH if n]
    logs = np.array(
        [[expected_logs(one, b, h, slice(n)) for b, n in enumerate(active)] for h in range(HEADS)]
    )
    found = targets.statistics_sums(one).statistics()
    for i, name in enumerate(statistics.NAMES):
        np.testing.assert_allclose(found[name]["mean"], logs[..., i].mean(1), atol=1e-5)
        np.testing.assert_allclose(found[name]["std"], logs[..., i].std(1), atol=2e-3)


def test_scaled_calibration_has_the_statistics_of_scaled_copies(rng):
    one, scales = record(rng), (1.0, 1.5, 2.0)
    sums = [targets.statistics_sums(one.with_queries(scale)) for scale in scales]
    copies = functools.reduce(functools.partial(jax.tree.map, jnp.add), sums).statistics()
    found = sums[0].statistics(scales)
    chex.assert_trees_all_close(found, copies, atol=2e-3)


def test_equal_tokens_have_no_statistics(rng):
    one = record(rng)
    same = dataclasses.replace(one, query=jnp.ones_like(one.query))
    np.testing.assert_array_equal(targets.statistics_sums(same).count, 0)


def test_a_fit_to_scaled_queries_is_the_fit_to_both_records(rng):
    one = record(rng)
    scaled = dataclasses.replace(PLAIN, scales=(1.0, 1.5))
    expected, _ = PLAIN.fit([one, one.with_queries(1.5)], 2)
    chex.assert_trees_all_close(scaled.fit([one], 2)[0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("scales", "match"),
    [((), "one or more different"), ((1.0, 1.0), "one or more different"), ((0.0,), "scales")],
)
def test_scales_that_make_no_sense_are_refused(scales, match):
    with pytest.raises(ValueError, match=match):
        aj.Candidate("moments", scales=scales)


def weights_of(predictor, one, scale):
    return RUN(scale * one.query, one.key, one.value, predictor=predictor)[1]


def error(weights, one, scale):
    teacher = reference.sinkhorn_layer(
        scale * np.asarray(one.query, np.float64), one.key, one.value,
        num_steps=SPEC.num_steps, epsilon=SPEC.epsilon,
    )[1]  # fmt: skip
    heads = range(HEADS)
    a = np.asarray(weights, np.float64)
    return np.mean([reference.relative_l2(a[:, h], teacher[:, h]) for h in heads])


def test_a_guard_changes_nothing_within_its_limits(fitted):
    predictor, one = fitted
    guarded = predictor.replace(statistics=statistics.with_limits(predictor.statistics))
    small = weights_of(predictor, one, 0.5)
    np.testing.assert_allclose(weights_of(guarded, one, 0.5), small, rtol=1e-6, atol=1e-8)
    assert np.abs(weights_of(guarded, one, 3.0) - weights_of(predictor, one, 3.0)).max() > 0.1


@pytest.mark.parametrize("scale", [1.0, 1.5, 2.0, 3.0, 5.0, 10.0])
def test_a_guarded_layer_is_no_worse_than_closures_from_zero(fitted, scale):
    """Two closures from the key dual 0 are Sinkhorn with two steps."""
    predictor, one = fitted
    guarded = predictor.replace(statistics=statistics.with_limits(predictor.statistics))
    zero = reference.sinkhorn_layer(
        scale * np.asarray(one.query, np.float64), one.key, one.value,
        num_steps=2, epsilon=SPEC.epsilon,
    )[1]  # fmt: skip
    assert error(weights_of(guarded, one, scale), one, scale) <= error(zero, one, scale)


def test_without_a_guard_a_layer_becomes_worse_than_closures_from_zero(fitted):
    """What the guard is for."""
    predictor, one = fitted
    plain, two = error(weights_of(predictor, one, 10.0), one, 10.0), aj.SinkhornSpec(2, 0.7)
    _, zero = aj.sinkhorn_attention(
        10 * one.query, one.key, one.value, spec=two, return_weights=True
    )
    assert plain > error(zero, one, 10.0)


def test_the_shrunk_problem_is_the_calibrated_one(fitted):
    """Queries far beyond the limit come back to it, with the scores in the stated ratio."""
    predictor, one = fitted
    limits = statistics.with_limits(predictor.statistics)
    p = targets.problem(one.with_queries(100.0))
    shrunk, ratio = statistics.inside(limits, p)
    found = np.asarray(statistics.logs(shrunk, SPEC)[0])[..., 1]
    expected = np.log(np.asarray(limits["limits"]["query"]))
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), atol=1e-4)
    np.testing.assert_allclose(shrunk.scores, ratio[..., None] * p.scores, rtol=1e-4, atol=1e-5)
    assert statistics.inside(predictor.statistics, p) == (p, None)
