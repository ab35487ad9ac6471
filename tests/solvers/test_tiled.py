"""Closures tile by tile: the dense answer in linear memory."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import asap_jax as aj
from asap_jax.solvers import log_domain, tiled
from asap_jax.solvers.closures import Closures


@pytest.mark.parametrize(
    ("size", "masked", "num_steps"),
    [(1, False, 1), (1, False, 4), (300, True, 2), (300, True, 7)],
)
@pytest.mark.parametrize("side", ["query", "key"])
def test_tiles_give_the_dense_plan_and_its_gradient(rng, x64, side, num_steps, masked, size):
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, n, 4))) for n in (11, 7, 7))
    q = q * size
    bias = jnp.asarray(rng.normal(size=(1, 3, 1, 7)))
    mask = jnp.asarray(rng.random((2, 1, 11, 7)) > 0.3) if masked else None
    start = jnp.asarray(rng.normal(size=(2, 3, 11 if side == "query" else 7)))
    target = jnp.full((1, 1, 1), np.log(11 / 7))
    closures = Closures(side, num_steps)

    def in_tiles(q, k, v, bias, start):
        p = problems.problem(q, k, v=v, bias=bias, mask=mask, scale=0.5)
        return tiled.apply(p, start, target, closures, block=4)

    def dense(q, k, v, bias, start):
        p = problems.problem(q, k, v=v, bias=bias, mask=mask, scale=0.5)
        return log_domain.apply(p, start, target, closures)

    def results(function):
        loss = lambda *args: jnp.sum(jnp.sin(function(*args)))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))(q, k, v, bias, start)

    chex.assert_trees_all_close(results(in_tiles), results(dense), atol=1e-10)


def test_tiles_detect_underflow_and_fall_back_to_the_log_domain(rng):
    """A key that no query likes: its column of the row-closed plan underflows."""
    q, k, v = problems.attention_inputs(rng, queries=6, keys=6)
    bias = jnp.zeros((1, 1, 1, 6)).at[..., 2].set(-120.0)
    heads = lambda x: jnp.swapaxes(x, 1, 2)
    p, closures = problems.problem(*map(heads, (q, k)), v=heads(v), bias=bias), Closures("key", 4)
    p = p.replace(scale=0.5)
    start, target = jnp.zeros(heads(k).shape[:-1]), jnp.zeros((1, 1, 1))
    sides = tiled.Sides.of(p, target, closures.epsilon, block=2)
    assert not bool(tiled.row_and_column(sides, start).ok)
    outs = [
        aj.sinkhorn_attention(q, k, v, bias, spec=aj.SinkhornSpec(4), implementation=name)
        for name in ("streaming", "log")
    ]
    chex.assert_trees_all_close(*outs, rtol=1e-5, atol=1e-6)


def test_a_column_sum_that_would_be_clipped_is_not_trusted(rng):
    """Scores within the bound for plain exponentials, whose scalings leave the range."""
    q, k = jnp.ones((1, 2, 1, 1)), jnp.asarray([30.0, -30.0]).reshape(1, 2, 1, 1)
    v = problems.normal(rng, 1, 2, 1, 3)
    spec = aj.SinkhornSpec(2, scale=1.0)

    def results(name):
        loss = lambda q, k, v: jnp.sum(
            jnp.sin(aj.sinkhorn_attention(q, k, v, spec=spec, implementation=name))
        )
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

    chex.assert_trees_all_close(results("streaming"), results("log"), rtol=1e-5, atol=1e-6)
    out = aj.sinkhorn_attention(
        q, k, jnp.eye(2)[None, :, None], spec=spec, implementation="streaming"
    )
    np.testing.assert_allclose(out.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("start", [0.0, 1e8])
@pytest.mark.parametrize("num_steps", [1, 2, 5, 40])
@pytest.mark.parametrize("side", ["query", "key"])
def test_tiles_of_huge_scores_give_the_last_side_its_sums(rng, side, num_steps, start):
    """A float32 score of 1e8 is rounded to 8, and by the blocks of either side differently."""
    q, k = (1e4 * problems.normal(rng, 1, 1, 200, 4) for _ in range(2))
    p = problems.problem(q, k, v=jnp.eye(200)[None, None], scale=1.0)
    start = jnp.asarray(start * rng.normal(size=(1, 1, 200)), jnp.float32)
    weights = tiled.apply(p, start, jnp.zeros((1, 1, 1)), Closures(side, num_steps))
    ends_on_rows = (side == "key") == (num_steps % 2 == 1)
    np.testing.assert_allclose(weights.sum(-1 if ends_on_rows else -2), 1, rtol=1e-5)


def test_memory_of_tiles_does_not_grow_with_the_square_of_the_length():
    def temporary(length, implementation):
        like = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        function = functools.partial(
            aj.sinkhorn_attention, spec=aj.SinkhornSpec(3), implementation=implementation
        )
        loss = lambda *qkv: jnp.sum(function(*qkv))
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return step.lower(like, like, like).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192, "streaming") < 0.05 * temporary(8192, "scaling")
    assert temporary(8192, "streaming") < 3 * temporary(4096, "streaming")


@pytest.mark.parametrize("shape", [(1, 1, 1, "N"), (1, 1, "N", 1), (1, 1, 1, 1)])
def test_tiles_do_not_expand_a_mask_with_axes_of_size_one(shape):
    """The last tile is filled up with masked rows: no mask of size N x N comes of that."""
    length = 8200  # no multiple of a tile

    def temporary(masked):
        like = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        sizes = [length if n == "N" else n for n in shape]
        mask = jax.ShapeDtypeStruct(sizes, jnp.bool_)
        attend = functools.partial(
            aj.sinkhorn_attention, spec=aj.SinkhornSpec(3), implementation="streaming"
        )
        loss = lambda q, k, v, mask: jnp.sum(attend(q, k, v, mask=mask if masked else None))
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        lowered = step.lower(like, like, like, mask)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(True) < 1.5 * temporary(False)
