"""Normal equations and the ridge solve."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference
from jax.sharding import PartitionSpec

import asap_jax as aj


def regression(rng, *, dtype="float32", lead=(2, 3), rows=20, num_features=5, noise=0.3):
    """Features (*lead, rows, F), targets (*lead, rows) with a true linear part, and the truth."""
    x = problems.normal(rng, *lead, rows, num_features, dtype=dtype)
    truth = rng.normal(size=num_features)
    y = np.asarray(x, np.float64) @ truth + noise * rng.normal(size=(*lead, rows))
    return x, problems.array(y, dtype), truth


@pytest.mark.parametrize("ridge", [1e-3, 0.0, 5.0])
def test_fit_equals_the_closed_form(rng, dtype, ridge):
    x, y, _ = regression(rng, dtype=dtype)
    fit = aj.fit_ls(x, y, ridge=ridge)
    chex.assert_shape(fit.coefficients, (5,))
    chex.assert_type(fit.coefficients, dtype)
    tolerance = {"float32": 2e-6, "float64": 1e-12}[dtype.name]
    expected = reference.ridge_fit(x, y, ridge=ridge)
    np.testing.assert_allclose(fit.coefficients, expected, rtol=0, atol=tolerance)
    assert bool(fit.ok)


def test_fit_is_stationary(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    w = aj.fit_ls(x, y, ridge=0.7).coefficients
    gradient = jnp.einsum("bhnf,bhn->f", x, x @ w - y)
    chex.assert_trees_all_close(gradient, -0.7 * w, atol=1e-10)


def test_invalid_rows_are_dropped_whatever_their_values(rng):
    x, y, _ = regression(rng)
    valid = rng.random((2, 3, 20)) < 0.6
    expected = reference.ridge_fit(x, y, ridge=1e-3, valid=valid)
    for rubbish in (jnp.nan, jnp.inf, 1e30):
        dirty_x = jnp.where(valid[..., None], x, rubbish)
        dirty_y = jnp.where(valid, y, rubbish)
        fit = aj.fit_ls(dirty_x, dirty_y, valid=problems.array(valid))
        np.testing.assert_allclose(fit.coefficients, expected, atol=2e-6)
    narrow = problems.array(np.arange(20) < 12)
    expected = reference.ridge_fit(x, y, ridge=1e-3, valid=np.arange(20) < 12)
    for spelling in (narrow, narrow[None, None], narrow.astype(jnp.float32)):
        np.testing.assert_allclose(
            aj.fit_ls(x, y, valid=spelling).coefficients, expected, atol=2e-6
        )


def test_streaming_and_merging_equal_one_fit(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    valid = problems.array(rng.random((2, 3, 20)) < 0.8)
    once = aj.fit_ls(x, y, valid=valid).coefficients
    empty = aj.NormalEquations.zero(5, dtype=jnp.float64)
    streamed = empty
    for i in range(2):
        streamed = streamed.add(x[i], y[i], valid[i])
    chex.assert_trees_all_close(streamed.solve(1e-3).coefficients, once, atol=1e-12)
    merged = empty.add(x[0], y[0], valid[0]) + empty.add(x[1], y[1], valid[1])
    chex.assert_trees_all_close(merged.solve(1e-3).coefficients, once, atol=1e-12)
    scanned, _ = jax.lax.scan(lambda e, xyv: (e.add(*xyv), None), empty, (x, y, valid))
    chex.assert_trees_all_close(scanned.solve(1e-3).coefficients, once, atol=1e-12)


def test_sums_merge_across_devices(rng):
    x, y, _ = regression(rng)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("batch")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec())
    def per_device(x, y):
        return jax.lax.psum(aj.NormalEquations.zero(5).add(x, y), "batch")

    fit = jax.block_until_ready(per_device(x, y)).solve(1e-3)
    chex.assert_trees_all_close(fit.coefficients, aj.fit_ls(x, y).coefficients, atol=1e-5)


def test_heads_can_be_fitted_separately_or_pooled(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    equations = aj.NormalEquations.zero(5, num_heads=3, dtype=jnp.float64).add(x, y)
    apart = equations.solve(1e-3).coefficients
    chex.assert_shape(apart, (3, 5))
    for head in range(3):
        expected = reference.ridge_fit(x[:, head], y[:, head], ridge=1e-3)
        np.testing.assert_allclose(apart[head], expected, atol=1e-12)
    pooled = equations.pooled().solve(1e-3).coefficients
    np.testing.assert_allclose(pooled, reference.ridge_fit(x, y, ridge=1e-3), atol=1e-12)


def test_a_singular_gram_without_ridge_gives_the_minimum_norm_answer(rng, dtype):
    x, y, _ = regression(rng, dtype=dtype, lead=(), rows=40, num_features=4)
    x = jnp.concatenate([x, x[:, :2], jnp.zeros_like(x[:, :1])], -1)
    expected = np.linalg.lstsq(np.asarray(x, np.float64), np.asarray(y, np.float64), rcond=None)[0]
    tolerance = {"float32": 2e-5, "float64": 1e-10}[dtype.name]
    np.testing.assert_allclose(aj.fit_ls(x, y, ridge=0).coefficients, expected, atol=tolerance)


def test_fewer_rows_than_features_without_ridge_interpolates(rng, x64):
    x, y, _ = regression(rng, dtype="float64", lead=(), rows=4, num_features=9)
    w = aj.fit_ls(x, y, ridge=0.0).coefficients
    expected = np.linalg.lstsq(np.asarray(x), np.asarray(y), rcond=None)[0]
    np.testing.assert_allclose(w, expected, atol=1e-9)
    np.testing.assert_allclose(x @ w, y, atol=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_features_that_are_zero_get_zero_coefficients(ridge):
    fit = aj.fit_ls(jnp.zeros((6, 3)), jnp.ones(6), ridge=ridge)
    chex.assert_trees_all_equal(fit.coefficients, jnp.zeros(3))


def test_features_of_very_different_size_are_fitted_accurately(rng):
    x, y, _ = regression(rng, lead=(), rows=200, num_features=4)
    x = x * problems.array([0.1, 1.0, 3.0, 30.0])[None]
    w = np.asarray(aj.fit_ls(x, y, ridge=0.0).coefficients, np.float64)
    exact = np.asarray(x, np.float64) @ reference.ridge_fit(x, y, ridge=0.0)
    error = np.linalg.norm(np.asarray(x, np.float64) @ w - exact) / np.linalg.norm(exact)
    assert error < 1e-3


def test_no_usable_data_is_an_error_when_values_are_known(rng):
    x, y, _ = regression(rng)
    with pytest.raises(ValueError, match="valid"):
        aj.fit_ls(x, y, valid=jnp.zeros((2, 3, 20), bool))
    with pytest.raises(ValueError, match="finite"):
        aj.fit_ls(x.at[0, 0, 0, 0].set(jnp.nan), y)
    with pytest.raises(ValueError, match="finite"):
        aj.fit_ls(x, y.at[0, 0, 0].set(jnp.inf))


def test_no_usable_data_is_flagged_and_finite_under_a_trace(rng):
    x, y, _ = regression(rng)
    fit = jax.jit(aj.fit_ls)
    assert bool(fit(x, y).ok)
    for bad in (
        fit(x, y, valid=jnp.zeros((2, 3, 20), bool)),
        fit(x.at[0, 0, 0, 0].set(jnp.nan), y),
        fit(x, y.at[0, 0, 0].set(jnp.inf)),
    ):
        assert not bool(bad.ok)
        chex.assert_trees_all_equal(bad.coefficients, jnp.zeros(5))


def test_ridge_can_be_any_real_scalar_and_changes_no_dtype(rng, x64):
    x, y, _ = regression(rng)
    expected = aj.fit_ls(x, y, ridge=0.5).coefficients
    chex.assert_type(expected, jnp.float32)
    for ridge in (np.float64(0.5), np.float32(0.5), np.asarray(0.5), jnp.float64(0.5)):
        chex.assert_trees_all_equal(aj.fit_ls(x, y, ridge=ridge).coefficients, expected)


def test_half_precision_rows_are_summed_in_float32(rng):
    x, y, _ = regression(rng, lead=(), rows=20_000, num_features=8, dtype="bfloat16")
    equations = aj.NormalEquations.zero(8).add(x, y)
    chex.assert_type(equations.gram, jnp.float32)
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(equations.gram, exact.T @ exact, rtol=1e-4, atol=1e-4 * 20_000)
    fit = aj.fit_ls(x, y)
    chex.assert_type(fit.coefficients, jnp.float32)
    expected = exact @ reference.ridge_fit(exact, np.asarray(y, np.float64), ridge=1e-3)
    error = np.linalg.norm(exact @ np.asarray(fit.coefficients, np.float64) - expected)
    assert error / np.linalg.norm(expected) < 1e-4


def test_the_explained_share_of_variance_is_reported(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    fit = aj.fit_ls(x, y, ridge=0.0)
    residual = x @ fit.coefficients - y
    expected = 1 - jnp.sum(residual**2) / jnp.sum(y**2)
    np.testing.assert_allclose(fit.r_squared, expected, atol=1e-10)
    np.testing.assert_allclose(fit.num_rows, 120)


@pytest.mark.parametrize("ridge_scale", ["trace", "diagonal"])
def test_a_scaled_ridge_grows_with_the_gram(rng, x64, ridge_scale):
    x, y, _ = regression(rng, dtype="float64")
    x = x * problems.array([1.0, 10.0, 0.1, 1.0, 3.0]).reshape(1, 1, 1, 5)
    equations = aj.NormalEquations.zero(5, dtype=jnp.float64).add(x, y)
    fit = equations.solve(0.2, ridge_scale)
    rows, targets = np.asarray(x).reshape(-1, 5), np.asarray(y).reshape(-1)
    gram = rows.T @ rows
    size = np.trace(gram) / 5 * np.eye(5) if ridge_scale == "trace" else np.diag(np.diag(gram))
    expected = np.linalg.solve(gram + 0.2 * size, rows.T @ targets)
    np.testing.assert_allclose(fit.coefficients, expected, rtol=1e-10)
    twice = (equations + equations).solve(0.2, ridge_scale)
    chex.assert_trees_all_close(twice.coefficients, fit.coefficients, rtol=1e-10)


def test_a_diagonal_ridge_does_not_depend_on_the_size_of_a_feature(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    size = problems.array([1.0, 1e3, 1e-3, 1.0, 0.0]).reshape(1, 1, 1, 5)
    solve = lambda x: aj.NormalEquations.zero(5, dtype=jnp.float64).add(x, y).solve(0.2, "diagonal")
    scaled = solve(x * size).coefficients * size.reshape(5)
    chex.assert_trees_all_close(scaled, solve(x * jnp.sign(size)).coefficients, rtol=1e-8)


def test_an_unknown_ridge_scale_is_refused():
    with pytest.raises(ValueError, match="ridge_scale"):
        aj.NormalEquations.zero(2).solve(1.0, "rows")


@pytest.mark.parametrize("per_head", [False, True])
def test_weighted_rows_give_the_sums_of_the_quadratic_form(rng, x64, per_head):
    x, y, _ = regression(rng, dtype="float64")
    valid = rng.random((2, 3, 20)) < 0.7
    root = rng.normal(size=(2, 3, 20, 20))
    h = root @ np.swapaxes(root, -1, -2)
    weigh = lambda z: jnp.einsum("bhnm,bhmf->bhnf", problems.array(h), z)
    zero = aj.NormalEquations.zero(5, num_heads=3 if per_head else None, dtype=jnp.float64)
    sums = zero.add_weighted(x, y, weigh, problems.array(valid))
    sums = sums.add_weighted(x, y, weigh, problems.array(valid))
    z, t = np.where(valid[..., None], x, 0.0), np.where(valid, y, 0.0)
    gram = 2 * np.einsum("bhnf,bhnm,bhmg->hfg", z, h, z)
    moment = 2 * np.einsum("bhnf,bhnm,bhm->hf", z, h, t)
    square = 2 * np.einsum("bhn,bhnm,bhm->h", t, h, t)
    if not per_head:
        gram, moment, square = gram.sum(0), moment.sum(0), square.sum(0)
    np.testing.assert_allclose(sums.gram, gram, rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(sums.moment, moment, rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(sums.target_square, square, rtol=1e-10)
    count = valid.sum((0, 2)) * 2
    np.testing.assert_array_equal(sums.num_rows, count if per_head else count.sum())
