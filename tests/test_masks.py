"""Masks, masking biases and the tokens they leave active."""

import chex
import flax.linen as nn
import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj
from asap_jax import masks

SHAPE = (2, 3, 6, 6)  # batch, heads, queries, keys
SPEC = aj.SinkhornSpec(num_steps=4)

sinkhorn_duals = jax.jit(aj.sinkhorn_duals)
attention_weights = jax.jit(aj.attention_weights)


def teacher(s, mask):
    """The teacher's weights under a mask, from its duals."""
    duals = sinkhorn_duals(s, spec=SPEC, mask=mask)
    return attention_weights(s, duals.query, duals.key, mask=mask)


def spellings(lengths, size):
    """One key-padding mask as different users write it."""
    valid = np.arange(size) < np.asarray(lengths)[:, None]
    key_only = problems.array(valid[:, None, None, :])
    full = jnp.broadcast_to(key_only, SHAPE)
    return {
        "bool": key_only,
        "int": key_only.astype(jnp.int32),
        "uint8": key_only.astype(jnp.uint8),
        "float": key_only.astype(jnp.float32),
        "bfloat16": key_only.astype(jnp.bfloat16),
        "numpy": np.asarray(key_only),
        "numpy view": np.asarray(full)[:, ::-1].transpose(0, 1, 3, 2).swapaxes(-1, -2),
        "flax": nn.make_attention_mask(jnp.ones_like(valid), problems.array(valid)),
        "per query": jnp.broadcast_to(key_only, (2, 1, 6, 6)),
        "full": full,
    }


def test_all_forms_of_a_mask_give_the_same_weights(rng):
    s = problems.uniform_scores(rng, *SHAPE)
    written = spellings([6, 4], 6)
    expected = teacher(s, written["full"])
    assert (np.asarray(expected)[1, ..., 4:] == 0).all()
    for name, mask in written.items():
        try:
            chex.assert_trees_all_close(teacher(s, mask), expected, atol=1e-6)
        except AssertionError as error:
            raise AssertionError(f"spelling {name!r}") from error


def test_a_mask_that_differs_per_query_is_applied_entry_by_entry(rng):
    s = problems.uniform_scores(rng, *SHAPE)
    mask = problems.random_mask(rng, *SHAPE)
    weights = np.asarray(teacher(s, problems.array(mask)))
    assert (weights[~mask] == 0).all()
    expected = reference.batched(
        lambda s, mask: reference.sinkhorn(s, num_steps=4, mask=mask), (s, 2), (mask, 2)
    )
    np.testing.assert_allclose(weights, expected, atol=5e-6)


def test_mask_without_an_effect_changes_nothing(rng):
    s = problems.uniform_scores(rng, *SHAPE)
    chex.assert_trees_all_close(
        teacher(s, jnp.ones((1, 1, 1, 1), bool)), teacher(s, None), atol=1e-6
    )


@pytest.mark.parametrize("shape", [(6,), (6, 6), (2, 6), (2, 6, 6), (1, 2, 3, 6, 6)])
def test_a_mask_of_another_rank_is_refused(shape):
    with pytest.raises(ValueError, match="mask") as error:
        masks.as_mask(jnp.ones(shape, bool), SHAPE)
    assert str(shape) in str(error.value)
    assert str(SHAPE) in str(error.value)


@pytest.mark.parametrize("shape", [(2, 3, 6, 5), (3, 1, 6, 6), (2, 2, 6, 6), (2, 1, 1, 7)])
def test_a_mask_that_does_not_broadcast_is_refused(shape):
    with pytest.raises(ValueError, match="mask") as error:
        masks.as_mask(jnp.ones(shape, bool), SHAPE)
    assert str(shape) in str(error.value)
    assert str(SHAPE) in str(error.value)


@pytest.mark.parametrize("value", [0.5, -1e9, 2.0, np.nan])
def test_a_mask_that_is_not_zero_or_one_is_refused(value):
    mask = np.ones((1, 1, 1, 6), np.float32)
    mask[..., -1] = value
    with pytest.raises(ValueError, match="bias"):
        masks.as_mask(problems.array(mask), SHAPE)


def test_a_complex_mask_is_refused():
    with pytest.raises(TypeError, match="complex64"):
        masks.as_mask(jnp.ones((1, 1, 1, 6), jnp.complex64), SHAPE)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("float32", -1e8),
        ("float32", -1e9),
        ("float32", np.finfo(np.float32).min),
        ("float32", -np.inf),
        ("bfloat16", -1e9),
        ("bfloat16", float(jnp.finfo(jnp.bfloat16).min)),
        ("float16", float(jnp.finfo(jnp.float16).min)),
        ("float16", -np.inf),
    ],
)
def test_a_bias_is_split_into_a_finite_part_and_a_mask(dtype, fill):
    bias = problems.array([[[[0.5, fill, -30.0, fill, 0.0, -1e4]]]], dtype)
    finite, mask = masks.as_bias(bias, SHAPE)
    np.testing.assert_array_equal(np.ravel(mask), [True, False, True, False, True, True])
    assert np.isfinite(np.asarray(finite, np.float32)).all()
    kept = np.ravel(mask)
    chex.assert_trees_all_equal(jnp.ravel(finite)[kept], jnp.ravel(bias)[kept])


def test_a_mild_bias_masks_nothing():
    bias = jnp.full((1, 1, 1, 6), -1e4)
    finite, mask = masks.as_bias(bias, SHAPE)
    assert mask is None
    chex.assert_trees_all_equal(finite, bias)


def test_closures_include_every_query_with_a_key_and_every_key_with_a_query():
    mask = np.ones((2, 1, 6, 6), bool)
    mask[0, 0, 2, :] = False
    mask[1, 0, :, 4] = False
    valid = masks.closure_validity(problems.array(mask), SHAPE)
    np.testing.assert_array_equal(valid.query, np.broadcast_to(mask.any(-1), SHAPE[:3]))
    np.testing.assert_array_equal(valid.key, np.broadcast_to(mask.any(-2), SHAPE[:3]))


def test_the_padding_setting_decides_which_tokens_have_features():
    key_only = problems.array(problems.key_padding([6, 4], 6))
    closures = masks.closure_validity(key_only, SHAPE)
    assert np.asarray(closures.query).all()
    own = masks.feature_validity(closures, "self")
    expected = np.broadcast_to(np.arange(6) < np.array([[[6]], [[4]]]), (2, 3, 6))
    np.testing.assert_array_equal(own.query, expected)
    np.testing.assert_array_equal(own.key, expected)
    cross = masks.feature_validity(closures, "none")
    assert np.asarray(cross.query).all()
    np.testing.assert_array_equal(cross.key, expected)


@pytest.mark.parametrize("key_mass", ["balanced", "unit"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_query_without_keys_and_an_example_without_tokens_give_exact_zeros(
    rng, num_steps, key_mass
):
    s = problems.uniform_scores(rng, *SHAPE)
    mask = np.ones((2, 1, 6, 6), bool)
    mask[0, 0, 3, :] = False
    mask[1] = False
    spec = aj.SinkhornSpec(num_steps=num_steps, key_mass=key_mass)

    def total(s):
        duals = aj.sinkhorn_duals(s, spec=spec, mask=problems.array(mask))
        weights = aj.attention_weights(s, duals.query, duals.key, mask=problems.array(mask))
        return jnp.sum(jnp.sin(weights)), weights

    grads, weights = jax.jit(jax.grad(total, has_aux=True))(s)
    chex.assert_tree_all_finite((grads, weights))
    assert (np.asarray(weights)[0, :, 3] == 0).all()
    assert (np.asarray(weights)[1] == 0).all()
    assert (np.asarray(grads)[0, :, 3] == 0).all()
    assert (np.asarray(grads)[1] == 0).all()


@hypothesis.given(mask=hypothesis.extra.numpy.arrays(np.bool_, (2, 1, 6, 6)))
def test_any_mask_gives_finite_weights_with_the_balanced_column_sums(mask):
    s = problems.uniform_scores(np.random.default_rng(1), *SHAPE)
    weights = np.asarray(teacher(s, problems.array(mask)), np.float64)
    assert np.isfinite(weights).all()
    assert (weights[~np.broadcast_to(mask, SHAPE)] == 0).all()
    queries, keys = mask.any(-1).sum(-1), mask.any(-2).sum(-1)
    target = mask.any(-2) * (queries / np.maximum(keys, 1))[..., None]
    np.testing.assert_allclose(weights.sum(-2), np.broadcast_to(target, SHAPE[:3]), atol=1e-5)


@pytest.mark.parametrize("fill", [-1e9, -np.inf])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_a_masking_bias_works_inside_a_jitted_function(make, fill):
    q = jnp.ones((1, 4, 1, 2))
    values = np.zeros((1, 1, 4, 4), np.float32)
    values[..., 3] = fill
    bias = make(values)
    weights = jax.jit(lambda q: aj.softmax_attention(q, q, q, bias, return_weights=True)[1])(q)
    np.testing.assert_allclose(weights[0, 0], np.full((4, 4), [1 / 3, 1 / 3, 1 / 3, 0]), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1, 6), (2, 1, 6, 6)])
def test_a_bias_with_the_values_of_a_mask_is_refused(shape):
    keep = np.arange(6) < 4
    keep = np.broadcast_to(keep, shape)
    for low in (-1e3, -1e4, -1e6):
        with pytest.raises(ValueError, match="as an additive mask does"):
            masks.as_bias(np.where(keep, 0, np.float32(low)), (2, 3, 6, 6))
    with pytest.raises(ValueError, match="bias holds only 0 and 1"):
        masks.as_bias(keep.astype("float32"), (2, 3, 6, 6))


def test_the_values_of_a_soft_mask_are_refused_with_a_bias_of_positions_too():
    keep, positions = np.arange(6) < 4, np.linspace(-3, 40, 6)
    for low in (-1e4, -1e5):
        bias = (np.where(keep, 0, low) + positions).astype("float32")[None, None, None]
        with pytest.raises(ValueError, match="only -1e\\+08 or lower masks"):
            masks.as_bias(bias, (2, 3, 6, 6))
    steps = np.array([0, -2e3, -4e3, -6e3, -8e3, -1e4], "float32")[None, None, None]
    assert masks.as_bias(steps, (2, 3, 6, 6))[1] is None


@pytest.mark.parametrize("jit", [False, True])
def test_a_float16_mask_with_a_bias_of_positions_is_a_mask(jit):
    keep, positions = np.arange(6) < 4, np.linspace(0, 40, 6)
    bias = (np.where(keep, 0, -65504) + positions).astype(np.float16)[None, None, None]
    split = lambda bias: masks.as_bias(bias, (2, 3, 6, 6))
    values, mask = jax.jit(split)(bias) if jit else split(bias)
    np.testing.assert_array_equal(mask[0, 0, 0], keep)
    np.testing.assert_array_equal(values[0, 0, 0, :4], bias[0, 0, 0, :4])


def test_other_biases_of_two_values_are_biases():
    shape = (1, 1, 6, 6)
    keep = np.eye(6, dtype=bool)[None, None]
    for low, high in ((0, -100), (0, 2), (-1, 1), (0, 0), (1, 1), (-1e4, -2e4), (0, 1e4)):
        bias, mask = masks.as_bias(np.where(keep, np.float32(low), np.float32(high)), shape)
        assert mask is None
        np.testing.assert_array_equal(bias, np.where(keep, low, high))
    slopes = -np.abs(np.subtract.outer(np.arange(6), np.arange(6))) * 1e4
    assert masks.as_bias(slopes.astype("float32")[None, None], shape)[1] is None
    _, mask = masks.as_bias(np.where(keep, np.float32(0), np.float32(-1e9)), shape)
    np.testing.assert_array_equal(mask, keep)
    half = np.finfo(np.float16).min  # of float16, -65504 masks
    _, mask = masks.as_bias(np.where(keep, np.float16(0), half), shape)
    np.testing.assert_array_equal(mask, keep)
