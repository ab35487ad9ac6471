"""Fidelity and balance metrics."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference
import scipy.stats

import asap_jax as aj


@pytest.fixture
def weights(rng):
    """Two row-stochastic stacks (2, 3, 6, 5): an approximation and its reference."""
    pair = rng.gamma(1.0, size=(2, 2, 3, 6, 5))
    pair = pair / pair.sum(-1, keepdims=True)
    return problems.array(pair[0], jnp.float32), problems.array(pair[1], jnp.float32)


def as_float64(*arrays):
    return tuple(np.asarray(x, np.float64) for x in arrays)


def test_relative_l2_is_per_head_over_the_batch(weights):
    a, b = as_float64(*weights)
    per_head = [reference.relative_l2(a[:, h], b[:, h]) for h in range(3)]
    np.testing.assert_allclose(aj.metrics.attention_rel_l2(*weights), np.mean(per_head), rtol=1e-5)


def test_relative_l2_can_be_pooled(weights):
    pooled = aj.metrics.attention_rel_l2(*weights, pooled=True)
    np.testing.assert_allclose(pooled, reference.relative_l2(*as_float64(*weights)), rtol=1e-5)


def test_relative_l2_is_relative_to_the_second_argument(weights):
    a, b = weights
    np.testing.assert_allclose(aj.metrics.attention_rel_l2(jnp.zeros_like(b), b), 1.0, rtol=1e-6)
    np.testing.assert_allclose(aj.metrics.attention_rel_l2(3 * b, b), 2.0, rtol=1e-6)
    assert aj.metrics.attention_rel_l2(a, a) == 0


def test_relative_l2_works_for_one_head(weights):
    a, b = weights[0][0, 0], weights[1][0, 0]
    expected = reference.relative_l2(*as_float64(a, b))
    np.testing.assert_allclose(aj.metrics.attention_rel_l2(a, b), expected, rtol=1e-5)


def test_output_rmse_over_all_or_over_valid_queries(rng):
    a, b = (problems.array(rng.normal(size=(2, 6, 3, 4)), jnp.float32) for _ in range(2))
    square = (np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2
    np.testing.assert_allclose(aj.metrics.output_rmse(a, b), np.sqrt(square.mean()), rtol=1e-5)
    valid = rng.random((2, 6)) < 0.6
    rubbish = jnp.where(valid[..., None, None], a, jnp.nan)
    np.testing.assert_allclose(
        aj.metrics.output_rmse(rubbish, b, query_valid=problems.array(valid)),
        np.sqrt(square[valid].mean()),
        rtol=1e-5,
    )


def test_row_error_is_the_mean_distance_from_one(weights):
    a = 1.3 * weights[0].at[0, 0, 0].set(0.0)
    np.testing.assert_allclose(
        aj.metrics.row_error(a), reference.row_error(*as_float64(a)), rtol=1e-5
    )
    valid = np.broadcast_to(np.arange(6) > 0, (2, 3, 6))
    np.testing.assert_allclose(aj.metrics.row_error(a, problems.array(valid)), 0.3, rtol=1e-5)
    np.testing.assert_allclose(
        aj.metrics.row_error(a, query_valid=problems.array(valid[:1, :1])), 0.3, rtol=1e-5
    )


def test_column_error_accepts_valid_keys_and_a_target(weights, rng):
    a = weights[0]
    valid = rng.random((2, 3, 5)) < 0.6
    target = rng.uniform(0.5, 2.0, size=(2, 1, 1))
    (exact,) = as_float64(a)
    np.testing.assert_allclose(aj.metrics.column_error(a), reference.column_error(exact), rtol=1e-5)
    np.testing.assert_allclose(
        aj.metrics.column_error(a, key_valid=problems.array(valid), target=1.2),
        reference.column_error(exact, valid, 1.2),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        aj.metrics.column_error(a, problems.array(valid), problems.array(target, jnp.float32)),
        reference.column_error(exact, valid, target),
        rtol=1e-5,
    )


def test_agreement_is_the_share_of_equal_predictions():
    logits = problems.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
    other = problems.array([[5.0, 6.0], [1.0, 2.0], [0.0, 1.0], [9.0, 0.0]])
    np.testing.assert_allclose(aj.metrics.agreement(logits, other), 0.5)
    np.testing.assert_allclose(aj.metrics.agreement(logits, 7 * logits), 1.0)


def test_plan_kl_is_from_the_reference_to_the_approximation(weights):
    a, b = as_float64(*weights)
    expected = scipy.stats.entropy(b.reshape(6, 30) / 6, a.reshape(6, 30) / 6, axis=-1).mean()
    np.testing.assert_allclose(aj.metrics.plan_kl(*weights), expected, rtol=1e-4)
    assert abs(float(aj.metrics.plan_kl(weights[1], weights[1]))) < 1e-7


def test_plan_kl_counts_zero_times_log_zero_as_zero(weights):
    a, b = weights
    value = aj.metrics.plan_kl(a.at[..., 2].set(0.0), b.at[..., 2].set(0.0))
    assert np.isfinite(value)
    assert np.isposinf(aj.metrics.plan_kl(a.at[..., 2].set(0.0), b))


def test_entropy_is_that_of_the_normalised_rows(weights):
    a, _ = weights
    (exact,) = as_float64(a)
    expected = scipy.stats.entropy(exact, axis=-1)
    np.testing.assert_allclose(aj.metrics.entropy(2.5 * a), expected.mean(), rtol=1e-5)
    valid = np.arange(6) < 4
    np.testing.assert_allclose(
        aj.metrics.entropy(a, problems.array(valid)), expected[..., :4].mean(), rtol=1e-5
    )
    uniform = jnp.full((6, 5), 0.2)
    np.testing.assert_allclose(aj.metrics.entropy(uniform), np.log(5), rtol=1e-6)
    np.testing.assert_allclose(aj.metrics.entropy(jnp.eye(5)), 0.0, atol=1e-7)


def test_metrics_are_computed_in_float32_at_least(weights):
    a, b = (x.astype(jnp.bfloat16) for x in weights)
    for value in (
        aj.metrics.attention_rel_l2(a, b),
        aj.metrics.row_error(a),
        aj.metrics.column_error(a),
        aj.metrics.plan_kl(a, b),
        aj.metrics.entropy(a),
    ):
        chex.assert_shape(value, ())
        chex.assert_type(value, jnp.float32)


def test_metrics_run_under_jit(weights):
    jitted = jax.jit(lambda a, b: (aj.metrics.attention_rel_l2(a, b), aj.metrics.row_error(a)))
    plain = (aj.metrics.attention_rel_l2(*weights), aj.metrics.row_error(weights[0]))
    chex.assert_trees_all_close(jitted(*weights), plain, atol=1e-6)


def test_shapes_that_differ_are_refused(weights):
    a, b = weights
    for function in (aj.metrics.attention_rel_l2, aj.metrics.plan_kl):
        with pytest.raises(ValueError, match=r"\(2, 3, 6, 5\).*\(2, 3, 6, 4\)"):
            function(a, b[..., :4])
    with pytest.raises(ValueError, match=r"\(6, 5\).*\(6, 4\)"):
        aj.metrics.agreement(a[0, 0], b[0, 0, :, :4])


def test_output_rel_l2_is_the_mean_over_heads_of_relative_distances(rng):
    a, b = (np.asarray(problems.normal(rng, 2, 7, 3, 4)) for _ in range(2))
    by_head = lambda x: np.sqrt(np.square(x.astype(np.float64)).sum((0, 1, 3)))
    expected = (by_head(a - b) / by_head(b)).mean()
    np.testing.assert_allclose(aj.metrics.output_rel_l2(a, b), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"output of shape \(2, 7, 3, 3\).*\(2, 7, 3, 4\)"):
        aj.metrics.output_rel_l2(a[..., :3], b)


def test_every_metric_is_nan_with_nothing_active(weights):
    """An example with every key masked: all weights are 0 and no token is valid."""
    nothing = jnp.zeros((1, 1, 6, 5))
    nobody, outputs = jnp.zeros(6, bool), jnp.zeros((1, 6, 1, 4))
    values = {
        "attention_rel_l2": aj.metrics.attention_rel_l2(nothing, nothing),
        "output_rel_l2": aj.metrics.output_rel_l2(outputs, outputs),
        "output_rmse": aj.metrics.output_rmse(outputs, outputs, query_valid=nobody),
        "row_error": aj.metrics.row_error(nothing, nobody),
        "column_error": aj.metrics.column_error(nothing, jnp.zeros(5, bool)),
        "plan_kl": aj.metrics.plan_kl(nothing, nothing),
        "entropy": aj.metrics.entropy(nothing),
    }
    for name, value in values.items():
        assert np.isnan(value), name
