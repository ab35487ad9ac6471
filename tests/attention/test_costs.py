"""The squared-Euclidean cost, brought to the scores of the attention functions."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import asap_jax as aj
from asap_jax.attention.costs import squared_euclidean_inputs, unit_tokens

# ------------------------------------------------------------- references, float64 NumPy


def cost(q, k, *, scale=None, normalize=True):
    """C_ij = scale |q_i - k_j|^2 / 2, per head from Flax's layout."""
    q, k = problems.heads_first(q), problems.heads_first(k)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if normalize:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return scale / 2 * ((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1)


def normalise(a, step, mask):
    """One half-step on the plan: rows to 1 (even steps), columns to queries / keys (odd)."""
    total = a.sum(-1 if step % 2 == 0 else -2, keepdims=True)
    target = 1.0
    if step % 2:
        queries, keys = mask.any(-1).sum(-1), mask.any(-2).sum(-1)
        target = (queries / keys)[..., None, None]
    return np.where(total > 0, a / np.where(total > 0, total, 1) * target, 0)


def sinkhorn_plan(c, *, num_steps, epsilon=1.0, mask=None):
    """The plan of the cost kernel after ``num_steps`` half-steps, rows first."""
    mask = np.broadcast_to(True if mask is None else mask, c.shape)
    a = np.where(mask, np.exp(-c / epsilon), 0.0)
    for step in range(num_steps):
        a = normalise(a, step, mask)
    return a


def inputs(rng, *, dtype="float32", **settings):
    return problems.attention_inputs(rng, dtype=dtype, **settings)


# ------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10])
def test_the_teacher_runs_on_the_cost_kernel_at_every_budget(rng, dtype, num_steps, normalize):
    q, k, v = inputs(rng, dtype=dtype)
    for scale in (None, 2.0):
        spec = aj.SinkhornSpec(num_steps, epsilon=0.5, scale=scale)

        @jax.jit
        def run(q, k, v, scale=scale, spec=spec):
            q, k, bias = squared_euclidean_inputs(q, k, scale=scale, normalize=normalize)
            return aj.sinkhorn_attention(q, k, v, bias, spec=spec, return_weights=True)[1]

        c = cost(q, k, scale=scale, normalize=normalize)
        expected = sinkhorn_plan(c, num_steps=num_steps, epsilon=0.5)
        tolerance = {"float32": 5e-6, "float64": 1e-12}[dtype.name]
        np.testing.assert_allclose(run(q, k, v), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("normalize", [True, False])
def test_masks_work_together_with_the_cost(rng, normalize):
    q, k, v = inputs(rng)
    mask = problems.key_padding([5, 3], 5)
    q_, k_, bias = squared_euclidean_inputs(q, k, normalize=normalize)
    spoilt = k_.at[1, 3:].set(jnp.nan)
    _, weights = aj.sinkhorn_attention(
        q_, spoilt, v, bias, problems.array(mask), spec=aj.SinkhornSpec(4), return_weights=True
    )
    expected = sinkhorn_plan(cost(q, k, normalize=normalize), num_steps=4, mask=mask)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("closures", ["one_sided", "two_sided"])
def test_a_compiled_layer_with_zero_coefficients_closes_the_cost_kernel(rng, closures, normalize):
    # With coefficients 0 the predicted cost dual is 0: closures of exp(-C) itself.
    q, k, v = inputs(rng)
    predictor = aj.Predictor(directions=jnp.eye(4), coefficients=jnp.zeros(4))
    q_, k_, bias = squared_euclidean_inputs(q, k, normalize=normalize)
    _, weights = aj.asap_attention(
        q_,
        k_,
        v,
        bias,
        predictor=predictor,
        spec=aj.SinkhornSpec(4),
        closures=closures,
        return_weights=True,
    )
    c = cost(q, k, normalize=normalize)
    whole = np.ones(c.shape, bool)
    expected = np.exp(-c)
    for step in (1,) if closures == "one_sided" else (1, 0, 1):
        expected = normalise(expected, step, whole)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=5e-6)


def test_the_query_dual_stays_in_score_coordinates(rng, x64):
    # Adding rho gives the dual of the cost kernel, as for plain scores: the fit sees no new term.
    q, k, _ = inputs(rng, dtype="float64")
    q_, k_, bias = squared_euclidean_inputs(q, k, normalize=False)
    q_, k_ = jnp.swapaxes(q_, 1, 2), jnp.swapaxes(k_, 1, 2)
    spec = aj.SinkhornSpec(10)
    duals = aj.sinkhorn_duals(aj.scores(q_, k_, bias=bias), spec=spec)
    of_cost = aj.sinkhorn_duals(-problems.array(cost(q, k, normalize=False)), spec=spec)
    dual = duals.source + aj.query_shift(q_)
    np.testing.assert_allclose(dual, of_cost.source, rtol=0, atol=1e-10)


# ------------------------------------------------------------------------------ inputs


def test_normalised_tokens_have_unit_length_and_need_no_bias(rng):
    q, k, _ = inputs(rng, size=7.0)
    q_, k_, bias = squared_euclidean_inputs(q, k)
    assert bias is None
    for x in (q_, k_):
        np.testing.assert_allclose(np.linalg.norm(x, axis=-1), 1, atol=1e-6)


def test_the_bias_is_minus_half_the_scaled_squared_norm_of_the_keys(rng):
    q, k, _ = inputs(rng)
    q_, k_, bias = squared_euclidean_inputs(q, k, scale=0.7, normalize=False)
    chex.assert_trees_all_equal((q_, k_), (q, k))
    expected = -0.35 * (problems.heads_first(k) ** 2).sum(-1)[:, :, None]
    chex.assert_shape(bias, (2, 3, 1, 5))
    np.testing.assert_allclose(bias, expected, rtol=1e-5)


def test_grouped_keys_get_a_bias_for_every_query_head(rng):
    q, _, _ = inputs(rng, heads=6)
    _, k, v = inputs(rng, heads=2)
    spec = aj.SinkhornSpec(4)
    outs = []
    for keys, values in ((k, v), (jnp.repeat(k, 3, -2), jnp.repeat(v, 3, -2))):
        q_, k_, bias = squared_euclidean_inputs(q, keys, normalize=False)
        chex.assert_shape(bias, (2, 6, 1, 5))
        outs.append(aj.sinkhorn_attention(q_, k_, values, bias, spec=spec))
    chex.assert_trees_all_close(*outs, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_unit_tokens_neither_overflow_nor_vanish(rng, size):
    x = problems.normal(rng, 4, 3, size=size)
    expected = np.asarray(x, np.float64)
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(unit_tokens(x), expected, atol=1e-6)


def test_zero_tokens_stay_zero_with_finite_gradients():
    x = jnp.zeros((2, 3)).at[0, 0].set(2.0)
    grads = jax.grad(lambda x: jnp.sum(jnp.sin(unit_tokens(x))))(x)
    chex.assert_tree_all_finite(grads)
    np.testing.assert_array_equal(unit_tokens(x), [[1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_match_finite_differences(rng, x64, normalize):
    q, k, v = inputs(rng, dtype="float64")
    mixing = problems.normal(rng, 2, 7, 3, 4, dtype="float64")

    @jax.jit
    def loss(q, k, v):
        q, k, bias = squared_euclidean_inputs(q, k, normalize=normalize)
        return jnp.sum(mixing * aj.sinkhorn_attention(q, k, v, bias, spec=aj.SinkhornSpec(4)))

    exact, measured = problems.slope(loss, (q, k, v), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


def test_half_precision_keeps_its_dtype_and_a_wide_bias(rng):
    q, k, v = inputs(rng, dtype="bfloat16")
    for normalize in (True, False):
        q_, k_, bias = squared_euclidean_inputs(q, k, normalize=normalize)
        chex.assert_type([q_, k_], jnp.bfloat16)
        out = aj.sinkhorn_attention(q_, k_, v, bias, spec=aj.SinkhornSpec(4))
        chex.assert_type(out, jnp.bfloat16)
    chex.assert_type(bias, jnp.float32)


def test_vmap_and_jit_agree(rng):
    q, k, _ = inputs(rng)
    function = functools.partial(squared_euclidean_inputs, normalize=False)
    expected = function(q, k)
    chex.assert_trees_all_close(jax.jit(function)(q, k), expected)
    chex.assert_trees_all_close(jax.vmap(function)(q, k), expected)


# --------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("query", "key", "error"),
    [
        (jnp.ones((7, 4)), jnp.ones((5, 4)), ValueError),
        (jnp.ones((2, 7, 3, 4)), jnp.ones((7, 3, 4)), ValueError),
        (jnp.ones((2, 7, 3, 4)), jnp.ones((2, 5, 3, 5)), ValueError),
        (jnp.ones((2, 7, 3, 4)), jnp.ones((2, 5, 2, 4)), ValueError),
        (jnp.ones((2, 7, 3, 4), int), jnp.ones((2, 5, 3, 4)), TypeError),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(query, key, error):
    with pytest.raises(error, match="query"):
        squared_euclidean_inputs(query, key)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_a_scale_that_is_not_positive_is_refused(rng, scale):
    q, k, _ = inputs(rng)
    with pytest.raises(ValueError, match="scale"):
        squared_euclidean_inputs(q, k, scale=scale)


def test_a_traced_switch_is_refused(rng):
    q, k, _ = inputs(rng)
    with pytest.raises(TypeError, match="normalize"):
        jax.jit(lambda flag: squared_euclidean_inputs(q, k, normalize=flag))(True)
