"""Normal equations and the ridge solve."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference
from jax.sharding import PartitionSpec

import asap_jax as aj

# One program for each test's shapes; the fit is called as it is where its checks of values matter.
fit_ls = problems.numpy_results(jax.jit(aj.fit_ls, static_argnames="ridge"))
solve = jax.jit(lambda sums, *settings: sums.solve(*settings), static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnames="num_heads")
def sums_of(x, y, valid=None, *, num_heads=None):
    zero = aj.NormalEquations.zero(x.shape[-1], num_heads=num_heads, dtype=x.dtype)
    return zero.add(x, y, valid)


def regression(rng, *, dtype="float32", lead=(2, 3), rows=20, num_features=5, noise=0.3):
    """Features (*lead, rows, F), targets (*lead, rows) with a true linear part, and the truth."""
    dtype = jnp.dtype(dtype)
    x = rng.normal(size=(*lead, rows, num_features)).astype(dtype)
    truth = rng.normal(size=num_features)
    y = x.astype(np.float64) @ truth + noise * rng.normal(size=(*lead, rows))
    return x, y.astype(dtype), truth


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
    w = fit_ls(x, y, ridge=0.7).coefficients
    gradient = np.einsum("bhnf,bhn->f", x, x @ w - y)
    chex.assert_trees_all_close(gradient, -0.7 * w, atol=1e-10)


def test_invalid_rows_are_dropped_whatever_their_values(rng):
    x, y, _ = regression(rng)
    valid = rng.random((2, 3, 20)) < 0.6
    expected = reference.ridge_fit(x, y, ridge=1e-3, valid=valid)
    for rubbish in np.float32([np.nan, np.inf, 1e30]):
        dirty_x = np.where(valid[..., None], x, rubbish)
        dirty_y = np.where(valid, y, rubbish)
        fit = aj.fit_ls(dirty_x, dirty_y, valid=valid)
        np.testing.assert_allclose(fit.coefficients, expected, atol=2e-6)
    narrow = np.arange(20) < 12
    expected = reference.ridge_fit(x, y, ridge=1e-3, valid=np.arange(20) < 12)
    for spelling in (narrow, narrow[None, None], narrow.astype(np.float32)):
        np.testing.assert_allclose(fit_ls(x, y, valid=spelling).coefficients, expected, atol=2e-6)


def test_streaming_and_merging_equal_one_fit(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    valid = rng.random((2, 3, 20)) < 0.8
    once = fit_ls(x, y, valid=valid).coefficients

    @jax.jit
    def ways(x, y, valid):
        empty = aj.NormalEquations.zero(5, dtype=jnp.float64)
        streamed = empty.add(x[0], y[0], valid[0]).add(x[1], y[1], valid[1])
        merged = empty.add(x[0], y[0], valid[0]) + empty.add(x[1], y[1], valid[1])
        scanned, _ = jax.lax.scan(lambda e, xyv: (e.add(*xyv), None), empty, (x, y, valid))
        return [sums.solve(1e-3).coefficients for sums in (streamed, merged, scanned)]

    for coefficients in ways(x, y, valid):
        chex.assert_trees_all_close(coefficients, once, atol=1e-12)


def test_sums_merge_across_devices(rng):
    x, y, _ = regression(rng)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("batch")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec())
    def per_device(x, y):
        return jax.lax.psum(aj.NormalEquations.zero(5).add(x, y), "batch")

    fit = solve(jax.block_until_ready(per_device(x, y)), 1e-3)
    chex.assert_trees_all_close(fit.coefficients, fit_ls(x, y).coefficients, atol=1e-5)


def test_heads_can_be_fitted_separately_or_pooled(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    equations = sums_of(x, y, num_heads=3)
    apart = np.asarray(solve(equations, 1e-3).coefficients)
    chex.assert_shape(apart, (3, 5))
    for head in range(3):
        expected = reference.ridge_fit(x[:, head], y[:, head], ridge=1e-3)
        np.testing.assert_allclose(apart[head], expected, atol=1e-12)
    pooled = jax.jit(lambda sums: sums.pooled().solve(1e-3))(equations).coefficients
    np.testing.assert_allclose(pooled, reference.ridge_fit(x, y, ridge=1e-3), atol=1e-12)


def test_a_singular_gram_without_ridge_gives_the_minimum_norm_answer(rng, dtype):
    x, y, _ = regression(rng, dtype=dtype, lead=(), rows=40, num_features=4)
    x = np.concatenate([x, x[:, :2], np.zeros_like(x[:, :1])], -1)
    expected = np.linalg.lstsq(np.asarray(x, np.float64), np.asarray(y, np.float64), rcond=None)[0]
    tolerance = {"float32": 2e-5, "float64": 1e-10}[dtype.name]
    np.testing.assert_allclose(fit_ls(x, y, ridge=0).coefficients, expected, atol=tolerance)


def test_fewer_rows_than_features_without_ridge_interpolates(rng, x64):
    x, y, _ = regression(rng, dtype="float64", lead=(), rows=4, num_features=9)
    w = fit_ls(x, y, ridge=0.0).coefficients
    expected = np.linalg.lstsq(np.asarray(x), np.asarray(y), rcond=None)[0]
    np.testing.assert_allclose(w, expected, atol=1e-9)
    np.testing.assert_allclose(x @ w, y, atol=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_features_that_are_zero_get_zero_coefficients(ridge):
    fit = aj.fit_ls(jnp.zeros((6, 3)), jnp.ones(6), ridge=ridge)
    chex.assert_trees_all_equal(fit.coefficients, jnp.zeros(3))


def test_features_of_very_different_size_are_fitted_accurately(rng):
    x, y, _ = regression(rng, lead=(), rows=200, num_features=4)
    x = x * np.float32([0.1, 1.0, 3.0, 30.0])
    w = np.asarray(fit_ls(x, y, ridge=0.0).coefficients, np.float64)
    exact = np.asarray(x, np.float64) @ reference.ridge_fit(x, y, ridge=0.0)
    error = np.linalg.norm(np.asarray(x, np.float64) @ w - exact) / np.linalg.norm(exact)
    assert error < 1e-3


def first_set(x, value):
    """The array with another first entry."""
    x = x.copy()
    x.flat[0] = value
    return x


def test_no_usable_data_is_an_error_when_values_are_known(rng):
    x, y, _ = regression(rng)
    with pytest.raises(ValueError, match="valid"):
        aj.fit_ls(x, y, valid=np.zeros((2, 3, 20), bool))
    with pytest.raises(ValueError, match="finite"):
        aj.fit_ls(first_set(x, np.nan), y)
    with pytest.raises(ValueError, match="finite"):
        aj.fit_ls(x, first_set(y, np.inf))


def test_no_usable_data_is_flagged_and_finite_under_a_trace(rng):
    x, y, _ = regression(rng)
    fit = jax.jit(aj.fit_ls)
    assert bool(fit(x, y).ok)
    for bad in (
        fit(x, y, valid=np.zeros((2, 3, 20), bool)),
        fit(first_set(x, np.nan), y),
        fit(x, first_set(y, np.inf)),
    ):
        assert not bool(bad.ok)
        chex.assert_trees_all_equal(bad.coefficients, np.zeros(5, np.float32))


def test_ridge_can_be_any_real_scalar_and_changes_no_dtype(rng, x64):
    x, y, _ = regression(rng)
    expected = aj.fit_ls(x, y, ridge=0.5).coefficients
    chex.assert_type(expected, jnp.float32)
    for ridge in (np.float64(0.5), np.float32(0.5), np.asarray(0.5), jnp.float64(0.5)):
        chex.assert_trees_all_equal(aj.fit_ls(x, y, ridge=ridge).coefficients, expected)


def test_half_precision_rows_are_summed_in_float32(rng):
    x, y, _ = regression(rng, lead=(), rows=20_000, num_features=8, dtype="bfloat16")
    equations = jax.jit(aj.NormalEquations.zero(8).add)(x, y)
    chex.assert_type(equations.gram, jnp.float32)
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(equations.gram, exact.T @ exact, rtol=1e-4, atol=1e-4 * 20_000)
    fit = fit_ls(x, y)
    chex.assert_type(fit.coefficients, jnp.float32)
    expected = exact @ reference.ridge_fit(exact, np.asarray(y, np.float64), ridge=1e-3)
    error = np.linalg.norm(exact @ np.asarray(fit.coefficients, np.float64) - expected)
    assert error / np.linalg.norm(expected) < 1e-4


def test_the_explained_share_of_variance_is_reported(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    fit = fit_ls(x, y, ridge=0.0)
    residual = x @ fit.coefficients - y
    expected = 1 - np.sum(residual**2) / np.sum(y**2)
    np.testing.assert_allclose(fit.r_squared, expected, atol=1e-10)
    np.testing.assert_allclose(fit.num_rows, 120)


@pytest.mark.parametrize("ridge_scale", ["trace", "diagonal"])
def test_a_scaled_ridge_grows_with_the_gram(rng, x64, ridge_scale):
    x, y, _ = regression(rng, dtype="float64")
    x = x * np.array([1.0, 10.0, 0.1, 1.0, 3.0])
    equations = sums_of(x, y)
    fit = solve(equations, 0.2, ridge_scale)
    rows, targets = np.asarray(x).reshape(-1, 5), np.asarray(y).reshape(-1)
    gram = rows.T @ rows
    size = np.trace(gram) / 5 * np.eye(5) if ridge_scale == "trace" else np.diag(np.diag(gram))
    expected = np.linalg.solve(gram + 0.2 * size, rows.T @ targets)
    np.testing.assert_allclose(fit.coefficients, expected, rtol=1e-10)
    twice = solve(jax.jit(lambda sums: sums + sums)(equations), 0.2, ridge_scale)
    chex.assert_trees_all_close(twice.coefficients, fit.coefficients, rtol=1e-10)


def test_a_diagonal_ridge_does_not_depend_on_the_size_of_a_feature(rng, x64):
    x, y, _ = regression(rng, dtype="float64")
    size = np.array([1.0, 1e3, 1e-3, 1.0, 0.0])
    fit = lambda x: np.asarray(solve(sums_of(x, y), 0.2, "diagonal").coefficients)
    chex.assert_trees_all_close(fit(x * size) * size, fit(x * np.sign(size)), rtol=1e-8)


def test_an_unknown_ridge_scale_is_refused():
    with pytest.raises(ValueError, match="ridge_scale"):
        aj.NormalEquations.zero(2).solve(1.0, "rows")


@pytest.mark.parametrize("per_head", [False, True])
def test_weighted_rows_give_the_sums_of_the_quadratic_form(rng, x64, per_head):
    x, y, _ = regression(rng, dtype="float64")
    valid = rng.random((2, 3, 20)) < 0.7
    root = rng.normal(size=(2, 3, 20, 20))
    h = root @ np.swapaxes(root, -1, -2)

    @jax.jit
    def twice(x, y, h, valid):
        weigh = lambda z: jnp.einsum("bhnm,bhmf->bhnf", h, z)
        sums = aj.NormalEquations.zero(5, num_heads=3 if per_head else None, dtype=jnp.float64)
        for _ in range(2):
            sums = sums.add_weighted(x, y, weigh, valid)
        return sums

    sums = twice(x, y, h, valid)
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
