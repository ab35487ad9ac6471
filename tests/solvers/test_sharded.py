"""Tokens sharded over devices under plain jit: the same result, and no device holds all keys."""

import functools

import chex
import jax
import numpy as np
import problems
import pytest

import asap_jax as aj
from train.bench import sharded

LENGTH, HEADS, DIM = 520, 2, 8
PREDICTOR = aj.Predictor(
    (aj.Moments(),),
    aj.LinearHead(np.random.default_rng(1).normal(size=(HEADS, DIM + 8)).astype("float32") / 9),
    side="key",
)
TILES = dict(spec=aj.SinkhornSpec(10), implementation="streaming")
OPERATORS = {
    "one closure": functools.partial(
        aj.asap_attention, predictor=PREDICTOR, closures=1, ending="row", **TILES
    ),
    "two closures": functools.partial(aj.asap_attention, predictor=PREDICTOR, closures=2, **TILES),
    "teacher": functools.partial(aj.sinkhorn_attention, **TILES),
}
SPLIT = {"queries": (1, 0), "keys": (0, 1), "both": (1, 1)}


def shardings(which):
    """Shardings of query, key, value and of a key mask over two devices."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("tokens",))
    over = lambda split, *axes: jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*axes) if split else jax.sharding.PartitionSpec()
    )
    queries, keys = SPLIT[which]
    tokens = lambda split: over(split, None, "tokens")
    return tokens(queries), tokens(keys), tokens(keys), over(keys, None, None, None, "tokens")


@pytest.mark.parametrize(
    ("name", "which"),
    [
        *((name, "both") for name in OPERATORS),
        ("two closures", "queries"),
        ("two closures", "keys"),
    ],
)
def test_sharded_tokens_give_the_result_and_gradients_of_one_device(rng, name, which):
    arrays = [rng.normal(size=(1, LENGTH, HEADS, DIM)).astype("float32") for _ in range(3)]
    mask = (np.arange(LENGTH) < 500)[None, None, None]
    both = problems.graded(lambda q, k, v, mask: OPERATORS[name](q, k, v, mask=mask))
    placed = [jax.device_put(x, s) for x, s in zip((*arrays, mask), shardings(which), strict=True)]
    chex.assert_trees_all_close(both(*placed), both(*arrays, mask), rtol=2e-5, atol=2e-5)


def test_tokens_stay_sharded_inside_shard_map(rng):
    """`shard_map` over examples, with the tokens over an axis that is left to the compiler."""
    mesh = jax.make_mesh((1, 2), ("data", "tokens"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tokens = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "tokens"))
    arrays = [rng.normal(size=(2, LENGTH, HEADS, DIM)).astype("float32") for _ in range(3)]
    placed = [jax.device_put(x, tokens) for x in arrays]
    attend = OPERATORS["two closures"]
    both = problems.graded(attend)
    data = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(both, mesh=mesh, in_specs=data, out_specs=data, axis_names={"data"})
    compiled = jax.jit(mapped, out_shardings=tokens).lower(*placed).compile()
    expected = both(*arrays)
    chex.assert_trees_all_close(compiled(*placed), expected, rtol=2e-5, atol=2e-5)
    assert sharded.gathered_tokens(compiled.as_text(), LENGTH) <= 130  # a block of queries


@pytest.mark.parametrize("name", ["one closure, row ending, moments", "Sinkhorn S=10"])
def test_no_device_gathers_the_tokens_and_memory_falls_with_the_number_of_devices(name):
    attend = sharded.operators()[name]
    one, two = (sharded.measure(name, attend, count, 2048) for count in (1, 2))
    assert one.gathered == 0
    assert two.gathered <= 128  # a block of queries
    assert two.forward < 0.6 * one.forward
    assert two.gradient < 0.7 * one.gradient


def test_gathered_tokens_are_read_from_the_program():
    program = "%a = f32[2,64,8]{2,1,0} all-gather(f32[1,64,8] %x)\n%b = f32[4096] add(...)"
    assert sharded.gathered_tokens(program, 4096) == 64
    assert sharded.gathered_tokens("%b = f32[4096] add(...)", 4096) == 0
