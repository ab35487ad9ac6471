"""What is in the programs: no array of N x M entries, and the kernels that were asked for."""

import functools
import math

import hlo
import jax
import jax.numpy as jnp
import pytest

import asap_jax as aj

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 2, 1003, 1401, 8
SHAPES = {
    "every example": (1, 1, 1, KEYS),
    "each example": (BATCH, 1, 1, KEYS),
    "each head": (BATCH, HEADS, 1, KEYS),
    "queries": (BATCH, 1, QUERIES, 1),
}
MASKED = {"nothing": ()}
for spelt, shape in SHAPES.items():
    MASKED |= {f"mask, {spelt}": ("mask", shape), f"bias, {spelt}": ("bias", shape)}
MASKED["queries as mask, keys as bias"] = ("both", SHAPES["queries"], SHAPES["each example"])


def like(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(attend, masked, platform, dtype):
    """The module of the output and of the gradient in q, k, v and the bias."""
    q = like((BATCH, QUERIES, HEADS, DIM), dtype)
    k = like((BATCH, KEYS, HEADS, DIM), dtype)
    bias, mask = {
        "mask": lambda shape: (None, like(shape, bool)),
        "bias": lambda shape: (like(shape, jnp.float32), None),
        "both": lambda mask, bias: (like(bias, jnp.float32), like(mask, bool)),
    }[masked[0]](*masked[1:]) if masked else (None, None)  # fmt: skip

    def loss(q, k, v, bias, mask):
        out = attend(q, k, v, bias, mask)
        return jnp.sum(out.astype(jnp.float32)), out

    grads = jax.value_and_grad(loss, (0, 1, 2, *((3,) if bias is not None else ())), has_aux=True)
    return hlo.lowered(grads, (q, k, k, bias, mask), platform)


def assert_no_square(text):
    largest = hlo.largest_array(text)
    assert math.prod(largest) < QUERIES * KEYS, largest


def sinkhorn(num_steps, **settings):
    return functools.partial(aj.sinkhorn_attention, spec=aj.SinkhornSpec(num_steps), **settings)


@pytest.mark.parametrize("masked", MASKED)
def test_tiles_hold_no_array_of_all_scores(masked):
    attend = sinkhorn(3, implementation="streaming")
    for text in lowered(attend, MASKED[masked], ("cpu", "cuda", "tpu"), jnp.float32):
        assert_no_square(text)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("masked", MASKED)
def test_fused_kernels_hold_no_array_of_all_scores(pretend, platform, masked):
    pretend(*{"cuda": ("gpu", (9, 0)), "tpu": ("tpu",)}[platform])
    attend = functools.partial(aj.softmax_attention, implementation="fused")
    for text in lowered(attend, MASKED[masked], (platform,), jnp.bfloat16):
        assert_no_square(text)
        assert {"cuda": "__cudnn$fmhaSoftmax", "tpu": "tpu_custom_call"}[platform] in text


@pytest.mark.parametrize(("num_steps", "calls"), [(2, 3), (5, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_splash_attention_lowers_for_any_number_of_closures(pretend, num_steps, calls, dtype):
    pretend("tpu")
    attend = sinkhorn(num_steps, implementation="splash")
    masked = MASKED["mask, each example"]
    for text in lowered(attend, masked, ("tpu",), dtype):
        assert_no_square(text)
        assert text.count("tpu_custom_call") >= calls
