"""Codebook features and the k-means behind them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj
from asap_jax.features.kmeans import kmeans

CENTRES = 6

# One compiled program; `test_centres_of_another_shape_are_refused` calls a family as it is.
features = jax.jit(lambda family, *tokens, **masks: family(*tokens, **masks))


def family_of(rng, *, side="key", dtype="float64", epsilon=1.0, shift=0.0):
    """A codebook whose inner predictor is of the given side."""
    inner = aj.Predictor(
        (aj.Moments(),), coefficients=problems.normal(rng, 3, 12, dtype=dtype, size=0.3), side=side
    )
    own, other = (problems.normal(rng, 3, CENTRES, 4, dtype=dtype) for _ in range(2))
    return aj.Codebook(own + shift, other + shift, inner, epsilon=epsilon)


def expected(family, q, k, query_valid=None, key_valid=None, **settings):
    def head(q, k, own, other, w, query_valid, key_valid):
        scale = settings.get("scale")
        x = reference.moment_features(
            k, q, scale=scale, query_valid=key_valid, key_valid=query_valid
        )
        h = x @ w - reference.query_shift(k, scale=scale)
        return reference.codebook_features(
            q, k, h, own, other, query_valid=query_valid, key_valid=key_valid, **settings
        )

    return reference.batched(
        head, (q, 2), (k, 2), (family.own, 2), (family.other, 2),
        (family.inner.coefficients, 1), (query_valid, 1), (key_valid, 1),
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"scale": 0.3}, {"epsilon": 0.6}], ids=str)
def test_features_are_the_bounds_of_the_transform(rng, dtype, settings):
    q, k = problems.per_head(rng, dtype=dtype)
    family = family_of(rng, dtype=dtype, epsilon=settings.get("epsilon", 1.0))
    x = jax.jit(lambda q, k: family(q, k, scale=settings.get("scale")))(q, k)
    chex.assert_shape(x, (2, 3, 7, family.num_features(4)))
    chex.assert_type(x, dtype)
    tolerance = {"float32": 3e-5, "float64": 1e-11}[dtype.name]
    np.testing.assert_allclose(x, expected(family, q, k, **settings), atol=tolerance)


def test_masked_tokens_are_left_out_and_all_tokens_get_features(rng, x64):
    q, k = problems.per_head(rng, dtype="float64")
    query_valid, key_valid = rng.random((2, 1, 7)) < 0.6, rng.random((2, 1, 5)) < 0.6
    query_valid[..., :2] = key_valid[..., 1:3] = True
    family = family_of(rng)
    dirty = np.where(key_valid[..., None], k, np.nan)
    x = features(family, q, dirty, query_valid=query_valid, key_valid=key_valid)
    np.testing.assert_allclose(x, expected(family, q, k, query_valid, key_valid), atol=1e-11)


def test_features_and_gradients_are_finite_without_an_active_token(rng):
    q, k = problems.per_head(rng)
    family = family_of(rng, dtype="float32")
    none = lambda q, k: jnp.sum(
        jnp.sin(family(q, k, query_valid=jnp.zeros(7, bool), key_valid=jnp.zeros(5, bool)))
    )
    chex.assert_tree_all_finite(jax.jit(jax.value_and_grad(none, argnums=(0, 1)))(q, k))


def test_a_common_offset_does_not_lose_float32_digits(rng):
    """The tokens and the centres move together; nothing else may change."""
    q, k = problems.per_head(rng)
    seed = np.random.default_rng(5)
    inner = aj.Predictor(
        (aj.Moments(absolute=False),), coefficients=problems.normal(seed, 3, 10, size=0.3)
    )
    own, other = (problems.normal(seed, 3, CENTRES, 4) for _ in range(2))
    evaluate = lambda *arrays: np.asarray(features(aj.Codebook(*arrays[2:], inner), *arrays[:2]))
    arrays = [np.asarray(x) for x in (q, k, own, other)]
    plain, moved = evaluate(*arrays), evaluate(*(x + np.float32(1e3) for x in arrays))
    assert np.abs(moved - plain).max() < 3e-3 * np.abs(plain).max()


def test_gradients_are_those_of_the_formula(rng, x64):
    q, k = problems.per_head(rng, dtype="float64")
    family = family_of(rng)
    loss = lambda q, k: jnp.sum(jnp.sin(family(q, k)))
    exact, measured = problems.slope(loss, (q, k), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


def test_tangents_equal_the_transform_if_every_token_is_a_centre(rng, x64):
    """Then the highest tangent touches it, whatever the inner dual is."""
    q, k = (np.asarray(x) for x in problems.per_head(rng, dtype="float64"))
    family = family_of(rng).replace(own=q[0])
    x = features(family, q[:1], k[:1])
    h = reference.batched(
        lambda q, k, w: (
            reference.moment_features(k, q) @ w - reference.query_shift(k)
        ),
        (q[:1], 2), (k[:1], 2), (family.inner.coefficients, 1),
    )  # fmt: skip
    transform = reference.batched(
        lambda q, k, h: reference.query_ctransform(reference.scores(q, k), h)
        + reference.scores(q, k).mean(1),
        (q[:1], 2), (k[:1], 2), (h, 1),
    )  # fmt: skip
    transform = transform - transform.mean(-1, keepdims=True)
    np.testing.assert_allclose(x[..., 0], transform, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 6, 5), (2, 6, 4), (6, 3)])
def test_centres_of_another_shape_are_refused(rng, shape):
    q, k = problems.per_head(rng)
    family = family_of(rng, dtype="float32").replace(own=jnp.ones(shape))
    with pytest.raises(ValueError, match=rf"own centres of shape \({shape[0]}, "):
        family(q, k)


# ---------------------------------------------------------------------------------------- k-means


def test_k_means_finds_separate_clusters(rng):
    truth = 10 * np.array([[0, 0], [0, 1], [1, 0], [1, 1.0]])
    tokens = truth[rng.integers(0, 4, size=(3, 200))] + 0.1 * rng.normal(size=(3, 200, 2)) + 50
    valid = np.arange(200) < 180
    tokens[:, 180:] = np.nan
    book = kmeans(
        jax.random.key(0),
        np.asarray(tokens, np.float32),
        np.broadcast_to(valid, (3, 200)),
        num_centres=4,
    )
    for head in np.asarray(book):
        order = head[np.lexsort(np.round(head).T[::-1])]
        np.testing.assert_allclose(order, truth + 50, atol=0.1)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_more_centres_than_tokens_are_finite(rng, count):
    tokens = problems.normal(rng, 2, 5, 4)
    valid = np.broadcast_to(np.arange(5) < count, (2, 5))
    book = kmeans(jax.random.key(0), tokens, valid, num_centres=4)
    chex.assert_shape(book, (2, 4, 4))
    chex.assert_tree_all_finite(book)


def test_k_means_lowers_the_distance_and_is_deterministic(rng):
    tokens = problems.normal(rng, 2, 300, 4)
    valid = np.ones((2, 300), bool)
    cost = lambda book: (
        np.square(np.asarray(tokens)[:, :, None] - np.asarray(book)[:, None]).sum(-1).min(-1).mean()
    )
    run = lambda steps: kmeans(jax.random.key(0), tokens, valid, num_centres=8, num_steps=steps)
    assert cost(run(25)) < cost(run(1)) < cost(run(0))
    chex.assert_trees_all_equal(run(25), run(25))
