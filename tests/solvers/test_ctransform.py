"""The two entropic c-transforms and the weights made from a pair of duals."""

import chex
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
SIDES = ["key", "query"]

transforms = {
    "key": jax.jit(aj.key_ctransform, static_argnames="epsilon"),
    "query": jax.jit(aj.query_ctransform, static_argnames="epsilon"),
}
attention_weights = jax.jit(aj.attention_weights, static_argnames="epsilon")
references = {"key": reference.key_ctransform, "query": reference.query_ctransform}


def problem(rng, side, dtype="float32", bound=10.0):
    """Scores (2, 3, 7, 5) and a dual of the side the transform sums over."""
    s = problems.uniform_scores(rng, 2, 3, 7, 5, dtype=dtype, bound=bound)
    return s, problems.normal(rng, 2, 3, 7 if side == "key" else 5, dtype=dtype, size=3.0)


def weights_of(side, s, dual, result, **settings):
    """The weights, given the start and the result of one transform."""
    f, g = (dual, result) if side == "key" else (result, dual)
    return attention_weights(s, f, g, **settings)


def side_sums(side, weights):
    return weights.sum(-2 if side == "key" else -1)


@pytest.mark.parametrize("epsilon", [1.0, 0.5])
@pytest.mark.parametrize("side", SIDES)
def test_transform_follows_the_formula(rng, dtype, side, epsilon):
    s, dual = problem(rng, side, dtype)
    result = transforms[side](s, dual, epsilon=epsilon)
    chex.assert_type(result, dtype)
    expected = reference.batched(references[side], (s, 2), (dual, 1), epsilon=epsilon)
    chex.assert_trees_all_close(result, expected.astype(dtype), atol=TOLERANCE[dtype.name])


@pytest.mark.parametrize("side", SIDES)
def test_transform_makes_its_marginal_exact(rng, dtype, side):
    s, dual = problem(rng, side, dtype, bound=50.0)
    sums = side_sums(side, weights_of(side, s, dual, transforms[side](s, dual)))
    tolerance = {"float32": 5e-5, "float64": 1e-12}[dtype.name]
    chex.assert_trees_all_close(sums, jnp.ones_like(sums), atol=tolerance)


@pytest.mark.parametrize("side", SIDES)
def test_log_target_sets_the_marginal(rng, x64, side):
    s, dual = problem(rng, side, "float64")
    length = 5 if side == "key" else 7
    target = problems.array(rng.uniform(0.1, 3.0, size=(2, 3, length)))
    result = transforms[side](s, dual, epsilon=0.5, log_target=jnp.log(target))
    weights = weights_of(side, s, dual, result, epsilon=0.5)
    chex.assert_trees_all_close(side_sums(side, weights), target, rtol=1e-12)
    shared = transforms[side](s, dual, epsilon=0.5, log_target=np.log(1.4))
    weights = weights_of(side, s, dual, shared, epsilon=0.5)
    chex.assert_trees_all_close(side_sums(side, weights), jnp.full_like(target, 1.4), rtol=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_masked_entries_are_left_out_and_slots_without_entries_get_zero(rng, dtype, side):
    s, dual = problem(rng, side, dtype)
    mask = problems.random_mask(rng, 2, 1, 7, 5)
    mask[0, 0, :, 3] = False
    mask[1, 0, 2, :] = False
    result = transforms[side](s, dual, mask=problems.array(mask))
    expected = reference.batched(
        lambda s, dual, mask: references[side](s, dual, mask=mask), (s, 2), (dual, 1), (mask, 2)
    )
    chex.assert_trees_all_close(result, expected.astype(dtype), atol=TOLERANCE[dtype.name])
    empty = result[0, :, 3] if side == "key" else result[1, :, 2]
    assert (empty == 0).all()
    weights = weights_of(side, s, dual, result, mask=problems.array(mask))
    assert (np.asarray(weights)[~np.broadcast_to(mask, weights.shape)] == 0).all()


@pytest.mark.parametrize("side", SIDES)
def test_minus_infinite_scores_act_like_a_mask(rng, side):
    s, dual = problem(rng, side)
    mask = problems.random_mask(rng, 2, 3, 7, 5)
    mask[0, 1, :, 2] = False
    hidden = jnp.where(mask, s, -jnp.inf)
    chex.assert_trees_all_close(
        transforms[side](hidden, dual),
        transforms[side](s, dual, mask=problems.array(mask)),
        atol=1e-6,
    )


@pytest.mark.parametrize("side", SIDES)
def test_values_of_masked_entries_do_not_matter(rng, side):
    s, dual = problem(rng, side)
    mask = problems.random_mask(rng, 2, 3, 7, 5)
    clean = transforms[side](s, dual, mask=problems.array(mask))
    for rubbish in (jnp.nan, jnp.inf, -jnp.inf, 1e38):
        dirty = jnp.where(mask, s, rubbish)
        chex.assert_trees_all_equal(transforms[side](dirty, dual, mask=problems.array(mask)), clean)


def test_duals_of_masked_slots_do_not_reach_the_weights(rng):
    s, f = problem(rng, "key")
    mask = np.ones((1, 1, 7, 5), bool)
    mask[..., 4, :] = False
    mask[..., 2] = False
    g = transforms["key"](s, f, mask=problems.array(mask))
    weights = attention_weights(s, f, g, mask=problems.array(mask))
    assert np.isfinite(weights).all()
    for rubbish in (jnp.nan, jnp.inf, -jnp.inf):
        dirty = attention_weights(
            s, f.at[..., 4].set(rubbish), g.at[..., 2].set(rubbish), mask=problems.array(mask)
        )
        chex.assert_trees_all_equal(dirty, weights)


@pytest.mark.parametrize("side", SIDES)
def test_a_constant_added_to_the_dual_is_subtracted_from_the_result(rng, x64, side):
    s, dual = problem(rng, side, "float64")
    moved = transforms[side](s, dual + 2.5)
    chex.assert_trees_all_close(moved, transforms[side](s, dual) - 2.5, atol=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_transform_of_the_cost_kernel_is_the_shifted_score_transform(rng, x64, side):
    q, k = problems.per_head(rng, dtype="float64")
    s, cost = aj.scores(q, k), reference.quadratic_cost(q, k)
    rho, kappa = reference.query_shift(q), reference.query_shift(k)
    near, far = (rho, kappa) if side == "key" else (kappa, rho)
    dual = problems.normal(rng, *near.shape, dtype="float64")
    chex.assert_trees_all_close(
        transforms[side](problems.array(-cost), dual),
        transforms[side](s, dual - near) + far,
        atol=1e-12,
    )


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_scores_neither_overflow_nor_vanish(rng, offset):
    s, f = problem(rng, "key")
    weights = attention_weights(s + offset, f, transforms["key"](s + offset, f))
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.sum(-2), 1.0, atol=2e-2)  # 1e4 has a spacing of 1e-3


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32(rng, low):
    s, f = problem(rng, "key", low)
    g = transforms["key"](s, f)
    chex.assert_type(g, jnp.float32)
    expected = reference.batched(reference.key_ctransform, (s, 2), (f, 1))
    chex.assert_trees_all_close(g, expected.astype(np.float32), atol=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_gradients_match_finite_differences_and_are_finite_at_empty_slots(rng, x64, side):
    s, dual = problem(rng, side, "float64", bound=3.0)
    mask = problems.random_mask(rng, 2, 3, 7, 5)
    mask[0, 0] = False
    mask[1, 1, :, 2] = False
    mask[1, 2, 3, :] = False
    mask = problems.array(mask)
    loss = lambda s, dual: jnp.sum(jnp.sin(transforms[side](s, dual, mask=mask)))
    exact, measured = problems.slope(loss, (s, dual), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-6)
    grads = jax.grad(loss, argnums=(0, 1))(s, dual)
    chex.assert_tree_all_finite(grads)
    assert (np.asarray(grads[0])[~np.asarray(mask)] == 0).all()


@pytest.mark.parametrize("side", SIDES)
def test_vmap_over_one_argument_equals_a_loop(rng, side):
    s, dual = problem(rng, side)
    shared = problems.array(dual[0])
    mapped = jax.vmap(transforms[side], in_axes=(0, None))(s, shared)
    chex.assert_trees_all_close(
        mapped, jnp.stack([transforms[side](x, shared) for x in s]), atol=1e-6
    )


@hypothesis.given(
    s=hypothesis.extra.numpy.arrays(np.float32, (1, 4, 3), elements=st.floats(-1e4, 1e4, width=32)),
    f=hypothesis.extra.numpy.arrays(np.float32, (1, 4), elements=st.floats(-1e3, 1e3, width=32)),
    mask=hypothesis.extra.numpy.arrays(np.bool_, (1, 4, 3)),
)
def test_any_scores_and_any_mask_give_finite_duals_and_exact_columns(s, f, mask):
    g = transforms["key"](s, f, mask=mask)
    assert np.isfinite(g).all()
    weights = np.asarray(attention_weights(s, f, g, mask=mask), np.float64)
    # The exponent is a sum of terms up to 1e4, rounded in float32 to about 2e-3.
    np.testing.assert_allclose(weights.sum(-2), mask.any(-2), atol=5e-3)
    assert (weights[~mask] == 0).all()
