"""Moment features: values, masks, offsets, and the folded evaluation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj
from asap_jax.features import check_tokens

FAMILY = aj.Moments()
SHAPED = aj.Moments(absolute=False)

features = jax.jit(
    lambda family, q, k, query_valid=None, key_valid=None, scale=None: family(
        q, k, scale=scale, query_valid=query_valid, key_valid=key_valid
    ),
    static_argnames="scale",
)


@jax.jit
def folded_forms(family, w, q, k, query_valid, key_valid):
    """(the family's own linear form, the prediction of a predictor with these coefficients)."""
    predictor = aj.Predictor((family,), coefficients=w)
    return (
        family.linear(w, check_tokens(q, k, None, query_valid, key_valid)),
        aj.predict(predictor, q, k, query_valid=query_valid, key_valid=key_valid),
    )


def expected(q, k, query_valid=None, key_valid=None, **settings):
    return reference.batched(
        lambda q, k, query_valid, key_valid: reference.moment_features(
            q, k, query_valid=query_valid, key_valid=key_valid, **settings
        ),
        (q, 2),
        (k, 2),
        (query_valid, 1),
        (key_valid, 1),
    )


def validities(rng):
    """Differing per problem, with at least two tokens on each side."""
    query_valid, key_valid = rng.random((2, 1, 7)) < 0.6, rng.random((2, 1, 5)) < 0.6
    query_valid[..., :2] = key_valid[..., 1:3] = True
    return query_valid, key_valid


@pytest.mark.parametrize("scale", [None, 0.3])
def test_features_are_the_moments_of_both_sides(rng, dtype, scale):
    q, k = problems.per_head(rng, dtype=dtype)
    x = features(FAMILY, q, k, scale=scale)
    chex.assert_shape(x, (2, 3, 7, 12))
    chex.assert_type(x, dtype)
    assert FAMILY.num_features(4) == 12
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype.name]
    np.testing.assert_allclose(x, expected(q, k, scale=scale), rtol=tolerance, atol=tolerance)


def test_leaving_out_absolute_features_does_not_change_the_others(rng):
    q, k = problems.per_head(rng)
    x = features(SHAPED, q, k)
    assert x.shape[-1] == SHAPED.num_features(4) == 10
    chex.assert_trees_all_close(x, np.asarray(features(FAMILY, q, k))[..., :10], atol=1e-6)


def test_moments_use_active_tokens_and_give_features_of_all_tokens(rng, x64):
    q, k = problems.per_head(rng, dtype="float64")
    query_valid, key_valid = validities(rng)
    x = features(FAMILY, q, k, problems.array(query_valid), problems.array(key_valid))
    loop = expected(q, k, query_valid, key_valid)
    np.testing.assert_allclose(x, loop, rtol=0, atol=1e-12)
    assert np.abs(loop[:, 0][~query_valid[:, 0]]).max() > 0.1


def test_values_of_masked_tokens_do_not_change_active_tokens(rng):
    q, k = problems.per_head(rng)
    query_valid, key_valid = validities(rng)
    spoil = lambda x, valid: np.where(valid[..., None], x, np.float32(np.nan))
    keep = lambda x: np.where(query_valid[..., None], x, np.float32(0))
    spoilt = features(FAMILY, spoil(q, query_valid), spoil(k, key_valid), query_valid, key_valid)
    clean = features(FAMILY, q, k, query_valid, key_valid)
    chex.assert_trees_all_equal(keep(spoilt), keep(clean))


def test_features_are_finite_without_an_active_token(rng):
    q, k = problems.per_head(rng)
    chex.assert_tree_all_finite(features(FAMILY, q, k, np.zeros(7, bool), np.zeros(5, bool)))


@pytest.mark.parametrize("offset", [10.0, 1e3])
def test_a_common_offset_changes_nothing_but_the_absolute_features(rng, offset):
    q, k = map(np.asarray, problems.per_head(rng, queries=64, keys=64))
    shift = np.float32(offset) * np.sign(rng.normal(size=(1, 1, 1, 4))).astype(np.float32)
    plain = expected(q, k)[..., :10]
    moved = features(SHAPED, q + shift, k + shift)
    size = np.sqrt(np.mean(plain**2, axis=(0, 1, 2)))
    error = np.abs(moved - plain).max(axis=(0, 1, 2)) / size
    assert error.max() < 4e-6 * (10 + offset)
    moved, exact = features(FAMILY, q + shift, k + shift), expected(q + shift, k + shift)
    assert np.abs(moved - exact).max() / np.abs(exact).max() < 1e-5


@pytest.mark.parametrize("family", [FAMILY, SHAPED], ids=["absolute", "invariant"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_folded_forms_equal_the_features(rng, dtype, family, per_head, masked):
    q, k = problems.per_head(rng, dtype=dtype)
    count = family.num_features(4)
    w = problems.normal(rng, *((3, count) if per_head else (count,)), dtype=dtype)
    valid = tuple(map(problems.array, validities(rng))) if masked else (None, None)
    x = features(family, q, k, *valid)
    direct = np.einsum("bhnf,hf->bhn", x, np.broadcast_to(w, (3, count)))
    folded, mean = map(np.asarray, folded_forms(family, w, q, k, *valid))
    tolerance = {"float32": 2e-5, "float64": 1e-12}[dtype.name]
    difference = folded - direct
    np.testing.assert_allclose(
        difference, np.broadcast_to(difference.mean(-1, keepdims=True), direct.shape),
        atol=tolerance,
    )  # fmt: skip
    np.testing.assert_allclose(mean, direct, atol=tolerance)


@pytest.mark.parametrize("side", ["query", "key"])
def test_families_are_concatenated_on_both_sides(rng, x64, side):
    """Folded moments beside sliced potentials."""
    q, k = problems.per_head(rng, dtype="float64")
    bank = aj.slice_directions(0, 6, 4)
    w = problems.normal(rng, 3, 18, dtype="float64")
    predictor = aj.Predictor((aj.SlicedPotentials(bank), FAMILY), coefficients=w, side=side)
    own, other = (q, k) if side == "query" else (k, q)
    loop = reference.batched(
        lambda own, other, w: (
            np.concatenate(
                [
                    reference.sliced_features(own, other, bank),
                    reference.moment_features(own, other),
                ],
                -1,
            )
            @ w
        ),
        (own, 2),
        (other, 2),
        (w, 1),
    )
    np.testing.assert_allclose(jax.jit(aj.predict)(predictor, q, k), loop, atol=1e-6)


def test_a_wrong_number_of_coefficients_is_refused(rng):
    q, k = problems.per_head(rng)
    with pytest.raises(
        ValueError, match=r"coefficients of shape \(11,\).*\(2, 3, 7, 12\).*head_dim"
    ):
        aj.predict(aj.Predictor((FAMILY,), coefficients=jnp.ones(11)), q, k)


def test_gradients_are_those_of_the_formula(rng, x64):
    q, k = problems.per_head(rng, dtype="float64")
    w = problems.normal(rng, 12, dtype="float64")
    loss = lambda q, k: jnp.sum(jnp.sin(FAMILY.linear(w, check_tokens(q, k))))
    exact, measured = problems.slope(loss, (q, k), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-6)
