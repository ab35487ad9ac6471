"""Huge values and settings: the right answer, or an error that names the setting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import asap_jax as aj

FORMS = ("log", "scaling", "streaming")
SHAPE = (2, 9, 3, 4)


def inputs(rng, size):
    """Queries, keys, and values of one head near ``size``; the other heads have values near 1."""
    q, k, v = (rng.normal(size=SHAPE).astype("f") for _ in range(3))
    v[:, :, 1] = size * rng.uniform(0.5, 1, size=v[:, :, 1].shape)
    return q, k, v


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("form", FORMS)
def test_values_near_the_end_of_float32_give_the_right_output(rng, form, num_steps):
    for size in (1e36, 3e38):
        q, k, v = inputs(rng, size)
        function = functools.partial(
            aj.sinkhorn_attention, spec=aj.SinkhornSpec(num_steps), implementation=form
        )
        out = np.asarray(jax.jit(function)(q, k, v), np.float64)
        expected, _ = reference.sinkhorn_layer(q, k, v, num_steps=num_steps)
        scale = np.abs(expected).max((0, 1, 3), keepdims=True)
        # An output beyond float32 cannot be represented; no other is lost.
        fits = np.abs(expected) < np.finfo(np.float32).max
        np.testing.assert_allclose((out / scale)[fits], (expected / scale)[fits], atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_constant_values_are_returned_by_rows_that_sum_to_one(rng, form):
    q, k, _ = inputs(rng, 1.0)
    v = np.full(SHAPE, 3e38, np.float32)
    for spec in (aj.SinkhornSpec(1), aj.SinkhornSpec(3)):
        out = aj.sinkhorn_attention(q, k, v, spec=spec, implementation=form)
        np.testing.assert_allclose(np.asarray(out, np.float64) / 3e38, 1, rtol=2e-6)


def test_gradients_of_huge_values_are_those_of_small_ones(rng):
    """The output is linear in the values, so a power of two moves from them to the loss."""
    q, k, v = inputs(rng, 1.0)
    power = np.float32(2.0**100)

    def gradients(values, factor):
        attend = functools.partial(aj.sinkhorn_attention, spec=aj.SinkhornSpec(3))
        loss = lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v) * factor))
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, values)

    huge, small = gradients(v * power, 1 / power), gradients(v, np.float32(1))
    for ours, expected in zip(huge[:2], small[:2], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(huge[2] * power, small[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_offset_of_all_keys_costs_no_digits(rng, form, padded):
    """It is a constant for each query, which the first closure cancels."""
    q, k, v = inputs(rng, 1.0)
    k = (k + 1e4 * rng.uniform(0.5, 1, size=4)).astype("f")
    mask = None
    if padded:  # at the start, where a sample of the keys would see nothing
        mask = np.broadcast_to(np.arange(9) >= np.array([5, 0])[:, None], (2, 9))[:, None, None]
        k[0, :5] = 0
    for num_steps in (1, 2, 5):
        attend = functools.partial(
            aj.sinkhorn_attention, spec=aj.SinkhornSpec(num_steps), implementation=form
        )
        expected, _ = reference.sinkhorn_layer(q, k, v, mask=mask, num_steps=num_steps)
        np.testing.assert_allclose(attend(q, k, v, mask=mask), expected, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_an_offset_of_queries_and_keys_costs_the_digits_of_the_scores_alone(rng, form):
    """The products of the queries' offset with the keys stay: scores of about 1e4."""
    q, k, v = inputs(rng, 1.0)
    offset = 1e4 * rng.uniform(0.5, 1, size=4)
    q, k = (q + offset).astype("f"), (k + offset).astype("f")
    for num_steps in (1, 4):
        spec = aj.SinkhornSpec(num_steps)
        out = aj.sinkhorn_attention(q, k, v, spec=spec, implementation=form)
        expected, _ = reference.sinkhorn_layer(q, k, v, num_steps=num_steps)
        np.testing.assert_allclose(out, expected, atol=4 * 1e4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("value", [1e-38, 1e39, 1e-20])
def test_settings_that_overflow_are_refused_by_name(rng, value):
    q, k, v = inputs(rng, 1.0)
    for name in ("epsilon", "scale"):
        with pytest.raises(ValueError, match=f"{name} must be between"):
            aj.SinkhornSpec(**{name: value})
    with pytest.raises(ValueError, match="scale must be between"):
        aj.softmax_attention(q, k, v, scale=value)
    with pytest.raises(ValueError, match="scale must be between"):
        aj.scores(q, k, scale=value)
    with pytest.raises(ValueError, match="epsilon must be between"):
        aj.key_ctransform(np.zeros((2, 3)), np.zeros(2), epsilon=value)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e30, -9.9e7])
def test_a_bias_that_spoils_float32_scores_is_refused(rng, value):
    q, k, v = inputs(rng, 1.0)
    bias = np.zeros((2, 3, 9, 9), np.float32)
    bias[0, 1, 2, 3] = value
    with pytest.raises(ValueError, match="bias must be within"):
        aj.sinkhorn_attention(q, k, v, bias, spec=aj.SinkhornSpec(4))


@pytest.mark.parametrize("value", [np.inf, 1e30, -5e7])
@pytest.mark.parametrize("implementation", ["auto", "log", "streaming"])
def test_a_traced_bias_that_is_too_large_spoils_only_its_own_problem(rng, value, implementation):
    q, k, v = inputs(rng, 1.0)
    bias = np.zeros((2, 3, 9, 9), np.float32)
    settings = dict(spec=aj.SinkhornSpec(4), implementation=implementation)
    attend = jax.jit(lambda bias: aj.sinkhorn_attention(q, k, v, bias, **settings))
    clean = attend(bias)
    bias[0, 1, 2, 3] = value
    out = attend(bias)
    others = np.ones((2, 3), bool)
    others[0, 1] = False
    heads = lambda x: np.moveaxis(np.asarray(x), 2, 1)
    np.testing.assert_allclose(heads(out)[others], heads(clean)[others], atol=1e-6)
    assert np.isnan(heads(out)[0, 1]).any()


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_one_closure_from_a_huge_dual_has_exact_column_sums(rng, size):
    """Peaks of the kernel with such a start, minus the start, would have no digits left."""
    q, k, v = inputs(rng, 1.0)
    coefficients = rng.normal(size=(3, 12)).astype("f")
    predictor = aj.Predictor((aj.Moments(),), coefficients=coefficients)
    settings = dict(predictor=predictor, spec=aj.SinkhornSpec(4), closures=1)
    run = jax.jit(lambda *x: aj.asap_attention(*x, implementation="scaling", **settings))
    ones = np.ones_like(v)
    for x in (size * q, size * q + np.float32(1e4)):
        assert np.isfinite(run(x, size * k, v)).all()
        # Every key gives its mass 1 to the queries.
        np.testing.assert_allclose(np.asarray(run(x, size * k, ones)).sum(1), 9, rtol=1e-5)
