"""The vision transformer: shapes, its blocks, and one parameter tree for every attention family."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import asap_jax as aj
from train.models.vit import Block, VisionTransformer, ViTSizes, patches
from train.training import factory


def factories():
    return {
        "softmax": lambda layer: aj.softmax_attention,
        "S=1": lambda layer: aj.linen.SinkhornAttention(aj.SinkhornSpec(num_steps=1)),
        "S=10": lambda layer: aj.linen.SinkhornAttention(aj.SinkhornSpec(num_steps=10)),
    }


@pytest.fixture
def images(rng):
    return rng.normal(size=(3, 28, 28, 1)).astype(np.float32)


def test_patches_are_the_squares_of_the_image_row_by_row(rng):
    image = rng.normal(size=(2, 6, 4, 3)).astype(np.float32)
    cut = patches(image, 2)
    assert cut.shape == (2, 6, 12)
    np.testing.assert_array_equal(cut[1, 3].reshape(2, 2, 3), image[1, 2:4, 2:4])


def test_a_patch_size_that_does_not_divide_is_refused(images):
    with pytest.raises(ValueError, match="patch_size 5 does not divide images of 28x28"):
        patches(images, 5)


def test_every_attention_family_has_the_same_parameters(tiny, images):
    trees = {
        name: factory.build(tiny, attention).init(jax.random.key(0), images)["params"]
        for name, attention in factories().items()
    }
    for tree in trees.values():
        chex.assert_trees_all_equal(tree, trees["softmax"])


def test_one_set_of_parameters_serves_every_family_and_one_step_is_softmax(tiny, images):
    params = factory.build(tiny).init(jax.random.key(0), images)
    logits = {
        name: factory.build(tiny, attention).apply(params, images)
        for name, attention in factories().items()
    }
    assert logits["S=10"].shape == (3, 10)
    np.testing.assert_allclose(logits["S=1"], logits["softmax"], atol=1e-5)
    assert np.abs(logits["S=10"] - logits["softmax"]).max() > 1e-4


def test_head_width_does_not_depend_on_the_model_width(images):
    sizes = ViTSizes(patch_size=7, width=12, depth=1, num_heads=2, head_dim=64, mlp_dim=8)
    model = VisionTransformer(10, sizes, lambda layer: aj.softmax_attention)
    params = model.init(jax.random.key(0), images)["params"]
    attention = params["block_0"]["attention"]
    assert attention["query"]["kernel"].shape == (12, 2, 64)
    assert attention["out"]["kernel"].shape == (2, 64, 12)
    assert params["positions"].shape == (1, 17, 12)
    assert params["cls"].shape == (1, 1, 12)


def test_without_feed_forward_a_block_is_attention_and_residual_only(rng):
    sizes = ViTSizes(patch_size=1, width=8, depth=1, num_heads=1, head_dim=8, mlp_dim=0)
    block = Block(sizes, lambda layer: aj.softmax_attention)
    x = rng.normal(size=(2, 5, 8)).astype(np.float32)
    params = block.init(jax.random.key(0), x)["params"]
    assert set(params) == {"attention", "attention_norm"}
    params["attention"]["out"]["kernel"] = jnp.zeros_like(params["attention"]["out"]["kernel"])
    np.testing.assert_array_equal(block.apply({"params": params}, x), x)


def test_blocks_normalise_first_and_use_the_exact_gelu(rng):
    sizes = ViTSizes(patch_size=1, width=8, depth=1, num_heads=1, head_dim=4, mlp_dim=6)
    block = Block(sizes, lambda layer: aj.softmax_attention)
    x = rng.normal(size=(1, 3, 4)).astype(np.float32)
    params = block.init(jax.random.key(1), x)["params"]
    params["attention"]["out"]["kernel"] = jnp.zeros_like(params["attention"]["out"]["kernel"])
    mean, spread = x.mean(-1, keepdims=True), np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    hidden = (x - mean) / spread @ np.asarray(params["mlp_in"]["kernel"])
    hidden = np.asarray(0.5 * hidden * (1 + jax.scipy.special.erf(hidden / np.sqrt(2))))
    expected = x + hidden @ np.asarray(params["mlp_out"]["kernel"])
    np.testing.assert_allclose(block.apply({"params": params}, x), expected, atol=2e-5)


def test_the_class_token_alone_is_classified(tiny, images):
    """With no block the class token never sees the image."""
    shallow = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, depth=0))
    model = factory.build(shallow)
    logits = model.apply(model.init(jax.random.key(0), images), images)
    np.testing.assert_allclose(logits[1:], logits[:-1], atol=1e-6)
