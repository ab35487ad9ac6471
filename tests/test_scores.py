"""Scores and the shift between score and cost coordinates."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj

TOLERANCE = {"float32": 2e-6, "float64": 1e-14}


@pytest.mark.parametrize("scale", [None, 0.3])
def test_scores_are_scaled_products_plus_bias(rng, dtype, scale):
    q, k = problems.per_head(rng, dtype=dtype)
    bias = problems.normal(rng, 1, 3, 7, 5, dtype=dtype)
    s = aj.scores(q, k, scale=scale, bias=bias)
    chex.assert_shape(s, (2, 3, 7, 5))
    chex.assert_type(s, dtype)
    expected = reference.scores(q, k, scale=scale, bias=bias)
    chex.assert_trees_all_close(s, expected.astype(dtype), atol=TOLERANCE[dtype.name])


def test_scores_of_one_head_need_no_leading_axes(rng):
    q, k = problems.normal(rng, 7, 4), problems.normal(rng, 5, 4)
    chex.assert_trees_all_close(
        aj.scores(q, k), reference.scores(q, k).astype(np.float32), atol=2e-6
    )


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_scores_of_half_precision_are_computed_in_float32(rng, low):
    q, k = problems.per_head(rng, dtype=low)
    s = aj.scores(q, k)
    chex.assert_type(s, jnp.float32)
    chex.assert_trees_all_close(s, reference.scores(q, k).astype(np.float32), atol=2e-6)


def test_float64_on_one_side_is_kept(rng, x64):
    q, k = problems.normal(rng, 7, 4), problems.normal(rng, 5, 4, dtype="float64")
    chex.assert_type(aj.scores(q, k), jnp.float64)
    chex.assert_type(aj.scores(q, q), jnp.float32)


@pytest.mark.parametrize("fill", [-1e8, -1e9, -1e30, np.finfo(np.float32).min, -np.inf])
def test_masking_bias_entries_become_minus_infinity(rng, fill):
    q, k = problems.per_head(rng)
    bias = np.zeros((1, 1, 1, 5), np.float32)
    bias[..., 3:] = fill
    s = aj.scores(q, k, bias=problems.array(bias))
    assert np.isneginf(s[..., 3:]).all()
    chex.assert_trees_all_close(s[..., :3], aj.scores(q, k)[..., :3])


def test_query_shift_is_half_the_scaled_squared_norm(rng, dtype):
    q, _ = problems.per_head(rng, dtype=dtype)
    for scale in (None, 0.7):
        rho = aj.query_shift(q, scale=scale)
        chex.assert_type(rho, dtype)
        expected = reference.query_shift(q, scale=scale).astype(dtype)
        chex.assert_trees_all_close(rho, expected, rtol=TOLERANCE[dtype.name])


def test_shifts_turn_scores_into_the_quadratic_cost(rng, x64):
    q, k = problems.per_head(rng, dtype="float64")
    rho, kappa = aj.query_shift(q), aj.query_shift(k)
    cost = rho[..., :, None] + kappa[..., None, :] - aj.scores(q, k)
    chex.assert_trees_all_close(cost, reference.quadratic_cost(q, k), atol=1e-13)


def test_scale_can_be_any_real_scalar(rng):
    q, k = problems.per_head(rng)
    expected = aj.scores(q, k, scale=0.25)
    for scale in (np.float64(0.25), np.float32(0.25), np.asarray(0.25), jnp.float32(0.25)):
        s = aj.scores(q, k, scale=scale)
        chex.assert_type(s, jnp.float32)
        chex.assert_trees_all_equal(s, expected)


def test_jit_and_partial_vmap_agree_with_plain_calls(rng):
    q, k = problems.per_head(rng)
    expected = jnp.stack([aj.scores(x, k[0]) for x in q])
    mapped = jax.jit(jax.vmap(aj.scores, in_axes=(0, None)))
    chex.assert_trees_all_close(mapped(q, k[0]), expected, atol=1e-6)


def test_gradient_matches_finite_differences(rng, x64):
    q, k = problems.per_head(rng, dtype="float64")
    exact, measured = problems.slope(lambda q, k: jnp.sum(jnp.tanh(aj.scores(q, k))), (q, k), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-6)
