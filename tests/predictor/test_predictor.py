"""The predictor: from features to a dual, on either side, as a pytree."""

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj

BANK = aj.slice_directions(0, 6, 4)

predict = jax.jit(aj.predict, static_argnames=("scale", "epsilon"))


def expected(q, k, coefficients, query_valid=None, key_valid=None, **settings):
    """The float64 prediction for a batch; coefficients (6,) or (3, 6)."""
    as_bool = lambda valid: None if valid is None else valid != 0
    return reference.batched(
        lambda q, k, w, query_valid, key_valid: reference.predicted_dual(
            q,
            k,
            BANK,
            w,
            query_valid=as_bool(query_valid),
            key_valid=as_bool(key_valid),
            **settings,
        ),
        (q, 2),
        (k, 2),
        (np.asarray(coefficients), 1),
        (query_valid, 1),
        (key_valid, 1),
    )


@pytest.mark.parametrize("shape", [(6,), (3, 6)])
@pytest.mark.parametrize("side", ["query", "key"])
def test_prediction_is_the_centred_combination_of_potentials(rng, dtype, side, shape):
    q, k = problems.per_head(rng, dtype=dtype)
    w = problems.normal(rng, *shape, dtype=dtype)
    predictor = aj.Predictor(directions=BANK, coefficients=w, side=side)
    dual = predict(predictor, q, k)
    chex.assert_shape(dual, (2, 3, 7 if side == "query" else 5))
    chex.assert_type(dual, dtype)
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype.name]
    np.testing.assert_allclose(dual, expected(q, k, w, side=side), rtol=0, atol=tolerance)


@pytest.mark.parametrize("side", ["query", "key"])
def test_scale_and_validities_reach_the_features(rng, x64, side):
    q, k = problems.per_head(rng, dtype="float64")
    w = problems.normal(rng, 6, dtype="float64")
    query_valid, key_valid = rng.random((2, 1, 7)) < 0.7, rng.random((2, 1, 5)) < 0.7
    predictor = aj.Predictor(directions=BANK, coefficients=w, side=side)
    dual = predict(
        predictor,
        q,
        k,
        scale=0.4,
        query_valid=problems.array(query_valid),
        key_valid=problems.array(key_valid),
    )
    loop = expected(q, k, w, query_valid, key_valid, side=side, scale=0.4)
    np.testing.assert_allclose(dual, loop, rtol=0, atol=1e-12)


def test_directions_can_have_any_length(rng):
    q, k = problems.per_head(rng)
    w = problems.normal(rng, 6)
    chex.assert_trees_all_close(
        predict(aj.Predictor(directions=7 * BANK, coefficients=w), q, k),
        predict(aj.Predictor(directions=BANK, coefficients=w), q, k),
        atol=1e-5,
    )


def test_feature_families_are_concatenated(rng):
    q, k = problems.per_head(rng)
    w = problems.normal(rng, 6)
    together = aj.Predictor(directions=BANK, coefficients=w)
    apart = aj.Predictor(
        features=(aj.SlicedPotentials(BANK[:2]), aj.SlicedPotentials(BANK[2:])),
        head=aj.LinearHead(w),
    )
    chex.assert_trees_all_close(predict(together, q, k), predict(apart, q, k), atol=1e-6)
    chex.assert_trees_all_equal(together.coefficients, apart.coefficients)


def test_token_bias_is_added_by_position_and_centred(rng):
    q, k = problems.per_head(rng)
    bias = problems.normal(rng, 7)
    plain = aj.Predictor(directions=BANK, coefficients=problems.normal(rng, 6))
    moved = plain.replace(token_bias=bias)
    difference = predict(moved, q, k) - predict(plain, q, k)
    centred = np.asarray(bias) - np.asarray(bias).mean()
    np.testing.assert_allclose(difference, np.broadcast_to(centred, (2, 3, 7)), atol=1e-5)


@pytest.mark.parametrize("side", ["query", "key"])
def test_first_step_baseline_adds_the_first_closure_from_zero(rng, x64, side):
    q, k = problems.per_head(rng, dtype="float64")
    s = aj.scores(q, k)
    w = problems.normal(rng, 6, dtype="float64")
    predictor = aj.Predictor(directions=BANK, coefficients=w, side=side, baseline="first_step")
    dual = predict(predictor, q, k, scores=s, epsilon=0.5)
    transform = reference.query_ctransform if side == "query" else reference.key_ctransform
    zero, own = (np.zeros(5), q) if side == "query" else (np.zeros(7), k)
    first = reference.batched(lambda s: transform(s, zero, epsilon=0.5), (s, 2))
    first = first + reference.query_shift(own)
    loop = expected(q, k, w, side=side) + first - first.mean(-1, keepdims=True)
    np.testing.assert_allclose(dual, loop, rtol=0, atol=1e-12)


def test_predictor_is_a_pytree_of_its_arrays(rng):
    predictor = aj.Predictor(directions=BANK, coefficients=problems.normal(rng, 6), side="key")
    leaves, tree = jax.tree.flatten(predictor)
    assert sorted(leaf.shape for leaf in leaves) == [(6,), (6, 4)]
    again = jax.tree.unflatten(tree, leaves)
    assert (again.side, again.baseline) == ("key", "none")
    chex.assert_trees_all_equal(again, predictor)
    doubled = jax.tree.map(lambda x: 2 * x, predictor)
    q, k = problems.per_head(rng)
    chex.assert_trees_all_close(
        predict(doubled, q, k), 2 * predict(predictor, q, k), rtol=1e-4, atol=1e-5
    )


def test_predictor_survives_flax_serialization(rng):
    predictor = aj.Predictor(directions=BANK, coefficients=problems.normal(rng, 6))
    blank = jax.tree.map(jnp.zeros_like, predictor)
    packed = flax.serialization.to_bytes(predictor)
    chex.assert_trees_all_equal(flax.serialization.from_bytes(blank, packed), predictor)


def test_predictors_can_be_stacked_and_mapped(rng):
    q, k = problems.per_head(rng)
    layers = [aj.Predictor(directions=BANK, coefficients=problems.normal(rng, 6)) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    together = jax.vmap(lambda predictor: aj.predict(predictor, q, k))(stacked)
    loop = jnp.stack([predict(predictor, q, k) for predictor in layers])
    chex.assert_trees_all_close(together, loop, atol=1e-6)


def test_gradient_reaches_coefficients_and_directions(rng, x64):
    q, k = problems.per_head(rng, dtype="float64")
    directions = BANK.astype(jnp.float64)
    w = problems.normal(rng, 6, dtype="float64")
    loss = lambda directions, w: jnp.sum(
        jnp.sin(predict(aj.Predictor(directions=directions, coefficients=w), q, k))
    )
    exact, measured = problems.slope(loss, (directions, w), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


def test_a_predictor_without_features_or_head_is_refused(rng):
    q, k = problems.per_head(rng)
    for predictor in (
        aj.Predictor(),
        aj.Predictor(directions=BANK),
        aj.Predictor(coefficients=jnp.ones(6)),
    ):
        with pytest.raises(ValueError, match="predictor"):
            aj.predict(predictor, q, k)
