"""`axis_name`: tokens shared by the devices of a `shard_map` axis give the result of one device."""

import functools
import re

import chex
import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx

import asap_jax as aj
from asap_jax.solvers import plan
from asap_jax.solvers.flash import platform, reference, ring, splash

BATCH, LENGTH, KEYS, HEADS, DIM = 2, 12, 16, 2, 8
TOKENS = jax.sharding.PartitionSpec(None, "tokens")
KEY_MASK = jax.sharding.PartitionSpec(None, None, None, "tokens")
QUERY_MASK = jax.sharding.PartitionSpec(None, None, "tokens")


def coefficients(features):
    values = np.random.default_rng(1).normal(size=(HEADS, features)) / 9
    return aj.LinearHead(values.astype("float32"))


KEY_DUAL = aj.Predictor((aj.Moments(),), coefficients(DIM + 8), side="key")
QUERY_DUAL = aj.Predictor((aj.Moments(),), coefficients(DIM + 8), side="query", padding="none")
ROW_MASS = KEY_DUAL.replace(row_mass=aj.RowMass((aj.Moments(),), coefficients(DIM + 8)))
EVEN, UNIT = aj.SinkhornSpec(10), aj.SinkhornSpec(10, key_mass="unit")
OPERATORS = {
    "softmax": aj.softmax_attention,
    "teacher that ends on columns": functools.partial(aj.sinkhorn_attention, spec=EVEN),
    "teacher that ends on rows": functools.partial(
        aj.sinkhorn_attention, spec=aj.SinkhornSpec(5, epsilon=0.5, key_mass="unit")
    ),
    "one call": functools.partial(
        aj.asap_attention, predictor=KEY_DUAL, spec=UNIT, closures=1, ending="row"
    ),
    "row mass": functools.partial(
        aj.asap_attention, predictor=ROW_MASS, spec=EVEN, closures=1, ending="row"
    ),
    "two closures": functools.partial(aj.asap_attention, predictor=KEY_DUAL, spec=EVEN, closures=2),
    "one closure from queries": functools.partial(
        aj.asap_attention, predictor=QUERY_DUAL, spec=UNIT, closures=1
    ),
    "three closures from queries": functools.partial(
        aj.asap_attention, predictor=QUERY_DUAL, spec=EVEN, closures=3
    ),
}
MASKS = {
    "no mask": (None, None, None, None),
    # The last device has no active key at all.
    "key mask": ((np.arange(KEYS) < 7)[None, None, None], KEY_MASK, None, None),
    "query mask": ((np.arange(LENGTH) > 7)[None, None, :, None], QUERY_MASK, None, None),
    "both": (
        (np.arange(KEYS) % 3 > 0)[None, None, None],
        KEY_MASK,
        np.where(np.arange(LENGTH) < 5, 0.0, -1e9).astype("float32")[None, None, :, None],
        QUERY_MASK,
    ),
    "bias of the keys": (
        None,
        None,
        np.linspace(-2, 3, KEYS, dtype="float32")[None, None, None],
        KEY_MASK,
    ),
}


def mesh():
    return jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("tokens",))


def arrays(rng, dtype="float32"):
    shapes = (BATCH, LENGTH, HEADS, DIM), (BATCH, KEYS, HEADS, DIM), (BATCH, KEYS, HEADS, DIM)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def sharded(attend, masking):
    """`attend(query, key, value)` over two devices that share the tokens, jitted."""
    mask, mask_spec, bias, bias_spec = masking
    given = {"mask": (mask, mask_spec), "bias": (bias, bias_spec)}
    given = {name: pair for name, pair in given.items() if pair[0] is not None}
    specs = TOKENS, TOKENS, TOKENS, {name: spec for name, (_, spec) in given.items()}
    function = lambda q, k, v, more: attend(q, k, v, axis_name="tokens", **more)
    mapped = jax.shard_map(function, mesh=mesh(), in_specs=specs, out_specs=TOKENS)
    return jax.jit(lambda q, k, v: mapped(q, k, v, {name: a for name, (a, _) in given.items()}))


@pytest.mark.parametrize(
    ("name", "masking"),
    [
        *((name, "both") for name in OPERATORS),
        *(("one closure from queries", masking) for masking in MASKS if masking != "both"),
    ],
)
def test_the_result_and_the_gradients_are_those_of_one_device(rng, name, masking):
    inputs, masking = arrays(rng), MASKS[masking]
    alone = functools.partial(OPERATORS[name], mask=masking[0], bias=masking[2])
    expected = problems.graded(alone)(*inputs)
    together = problems.graded(sharded(OPERATORS[name], masking))(*inputs)
    chex.assert_trees_all_close(together, expected, rtol=2e-5, atol=2e-5)


def test_bfloat16(rng):
    inputs, attend = arrays(rng, "bfloat16"), OPERATORS["two closures"]
    expected = problems.graded(attend)(*[x.astype(jnp.float32) for x in inputs])
    together = problems.graded(sharded(attend, MASKS["no mask"]))(*inputs)
    assert {x.dtype.name for x in jax.tree.leaves(together)} == {"bfloat16"}
    together = jax.tree.map(lambda x: x.astype(jnp.float32), together)
    chex.assert_trees_all_close(together, expected, atol=2e-2)


def test_a_guarded_prediction_shrinks_tokens_by_their_size_on_all_devices(rng):
    limits = {"limits": {side: np.full(HEADS, 0.7, "float32") for side in ("query", "key")}}
    predictor = KEY_DUAL.replace(statistics=limits)
    attend = functools.partial(aj.asap_attention, predictor=predictor, spec=EVEN, closures=2)
    inputs = arrays(rng)
    expected = attend(*inputs)
    chex.assert_trees_all_close(sharded(attend, MASKS["no mask"])(*inputs), expected, atol=1e-5)
    assert np.abs(expected - OPERATORS["two closures"](*inputs)).max() > 1e-2


def test_huge_values_and_offset_keys(rng):
    query, key, value = arrays(rng)
    inputs = (
        query,
        jnp.round(key * 1024) / 1024 + 64,  # exact in float32
        value * np.where(np.arange(KEYS) < 8, 1, 1e35).astype("float32")[None, :, None, None],
    )
    attend = OPERATORS["two closures"]
    together = sharded(attend, MASKS["no mask"])(*inputs)
    chex.assert_trees_all_close(together / 1e35, attend(*inputs) / 1e35, atol=1e-4)


def test_no_device_holds_all_tokens_or_a_matrix_of_scores(rng):
    """In the compiled program of one device: nothing is gathered, and nothing is N x M."""
    length = 1024
    inputs = [jnp.asarray(rng.normal(size=(1, length, 1, DIM)), jnp.float32) for _ in range(3)]
    step = sharded(one_head, MASKS["no mask"])
    loss = lambda *inputs: jnp.sum(jnp.sin(step(*inputs)))
    place = jax.sharding.NamedSharding(mesh(), TOKENS)
    program = (
        jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=place, out_shardings=place)
        .lower(*inputs)
        .compile()
        .as_text()
    )
    assert "collective-permute" in program
    assert "all-gather" not in program
    shapes = [shape.split(",") for shape in re.findall(r"\w\d+\[([\d,]+)\]", program)]
    assert any(str(length // 2) in shape for shape in shapes)
    assert not any(str(length) in shape for shape in shapes)
    assert not any(shape.count(str(length // 2)) > 1 for shape in shapes)


def one_head(query, key, value, **options):
    """One call of attention, for inputs of one head."""
    head = aj.LinearHead(KEY_DUAL.head.coefficients[0])
    predictor = aj.Predictor((aj.Moments(),), head, side="key")
    return aj.asap_attention(
        query, key, value, predictor=predictor, spec=EVEN, closures=1, ending="row", **options
    )


def test_splash_attention_goes_round_too(rng):
    """In the interpreter. Pallas kernels need check_vma=False."""
    heads_first = jax.sharding.PartitionSpec(None, None, "tokens")
    q, k, v = (jnp.asarray(rng.normal(size=(1, HEADS, 260, DIM)), jnp.float32) for _ in range(3))
    inputs = q, k, v, q[..., 0]  # the last is a bias on the keys
    around = lambda *inputs: ring.around(splash.kernel(interpret=True), "tokens").attend(*inputs)
    together = jax.shard_map(
        around, mesh=mesh(), in_specs=heads_first, out_specs=heads_first, check_vma=False
    )
    loss = lambda attend, *inputs: jnp.sum(jnp.sin(attend(*inputs)))
    gradients = lambda attend: jax.jit(jax.grad(functools.partial(loss, attend), (0, 1, 2, 3)))
    expected = gradients(reference.kernel().attend)(*inputs)
    chex.assert_trees_all_close(gradients(together)(*inputs), expected, atol=2e-5)


def test_a_fused_kernel_on_shared_tokens_lowers_for_tpus(monkeypatch, rng):
    plan._mix.clear_cache()
    monkeypatch.setattr(platform, "name", lambda: "tpu")
    step = functools.partial(aj.softmax_attention, axis_name="tokens", implementation="fused")
    mapped = jax.shard_map(step, mesh=mesh(), in_specs=TOKENS, out_specs=TOKENS, check_vma=False)
    (text,) = hlo.lowered(mapped, arrays(rng), ("tpu",))
    plan._mix.clear_cache()
    assert "tpu_custom_call" in text
    assert "collective_permute" in text


def test_examples_and_tokens_on_two_axes(rng):
    """The batch over one axis of the mesh, the tokens over another."""
    inputs, attend = arrays(rng), OPERATORS["one call"]
    both = jax.make_mesh((1, 2), ("data", "tokens"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("data", "tokens")
    step = functools.partial(attend, axis_name="tokens")
    mapped = jax.jit(jax.shard_map(step, mesh=both, in_specs=spec, out_specs=spec))
    chex.assert_trees_all_close(
        problems.graded(mapped)(*inputs), problems.graded(attend)(*inputs), atol=2e-5
    )


class Encoder(nn.Module):
    """Self-attention of one layer."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        attention = aj.linen.SinkhornAttention(EVEN, axis_name=self.axis_name)
        return x + nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention)(x)


def test_a_compiled_linen_model_serves_tokens_on_two_devices(rng):
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, 16)), jnp.float32)
    model, shared = Encoder(), Encoder(axis_name="tokens")
    variables = shared.init(jax.random.key(0), x)
    compiled = aj.linen.compile(model, variables, [x + i for i in range(5)])
    apply = jax.shard_map(shared.apply, mesh=mesh(), in_specs=(None, TOKENS), out_specs=TOKENS)
    for given in (variables, compiled.variables):
        together = jax.jit(apply)(given, x)
        chex.assert_trees_all_close(together, model.apply(given, x), atol=2e-5)
    with pytest.raises(ValueError, match="cannot record with axis_name='tokens'"):
        aj.linen.compile(shared, variables, [x])


def test_a_compiled_nnx_model_serves_tokens_on_two_devices(rng):
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, 16)), jnp.float32)
    attention = aj.nnx.SinkhornAttention(EVEN)
    model = nnx.MultiHeadAttention(
        HEADS, 16, decode=False, attention_fn=attention, rngs=nnx.Rngs(0)
    )
    compiled = aj.nnx.compile(model, [x + i for i in range(5)]).model
    expected = compiled(x)
    compiled.attention_fn.axis_name = "tokens"
    graph, state = nnx.split(compiled)
    apply = lambda state, x: nnx.merge(graph, state)(x)
    apply = jax.shard_map(apply, mesh=mesh(), in_specs=(None, TOKENS), out_specs=TOKENS)
    chex.assert_trees_all_close(jax.jit(apply)(state, x), expected, atol=2e-5)
    with pytest.raises(ValueError, match="cannot record with axis_name='tokens'"):
        aj.nnx.compile(compiled, [x])


SLICED = aj.Predictor(directions=np.eye(DIM, dtype="float32"), coefficients=np.ones(DIM))
REFUSED = {
    "weights": (dict(return_weights=True), "computes no weights"),
    "dropout": (
        dict(dropout_rate=0.5, deterministic=False, dropout_rng=jax.random.key(0)),
        "computes no weights",
    ),
    "scaling": (dict(implementation="scaling"), "stores the scores of all tokens"),
    "a full mask": (dict(mask=np.ones((1, 1, LENGTH // 2, KEYS // 2), bool)), "takes a mask of"),
    "detached": (dict(detach_key_dual=True), "axis_name='tokens'"),
    "slices": (dict(predictor=SLICED, closures=1), "SlicedPotentials: compile with fit='moments'"),
    "a token bias": (
        dict(predictor=KEY_DUAL.replace(token_bias=np.zeros(KEYS, "float32")), closures=2),
        "a predictor with token_bias",
    ),
    "the first step": (
        dict(predictor=KEY_DUAL.replace(baseline="first_step"), closures=2),
        "baseline='first_step'",
    ),
    "an unknown axis": (dict(axis_name="rows"), "'rows' is not an axis of an enclosing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_all_tokens_on_one_device_is_refused(rng, case):
    options, message = REFUSED[case]
    operator = aj.asap_attention if "predictor" in options else aj.sinkhorn_attention
    options = dict(axis_name="tokens") | options
    attend = lambda q, k, v: operator(q, k, v, spec=EVEN, **options)
    mapped = jax.shard_map(attend, mesh=mesh(), in_specs=TOKENS, out_specs=TOKENS)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, *arrays(rng))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_arrays_that_are_the_same_on_all_devices_are_named(rng, name):
    whole = jax.sharding.PartitionSpec()
    specs = tuple(whole if one == name else TOKENS for one in ("query", "key", "value"))
    attend = functools.partial(aj.sinkhorn_attention, spec=EVEN, axis_name="tokens")
    mapped = jax.shard_map(attend, mesh=mesh(), in_specs=specs, out_specs=TOKENS)
    per_device = {"query": LENGTH // 2, "key": KEYS // 2, "value": KEYS // 2}
    inputs = [
        x[:, :length] if argument == name else x
        for (argument, length), x in zip(per_device.items(), arrays(rng), strict=True)
    ]
    with pytest.raises(ValueError, match=f"{name} of shape .* is the same on all devices"):
        jax.eval_shape(mapped, *inputs)


def test_a_mask_of_other_tokens_than_those_of_a_device_is_refused_with_its_shape(rng):
    mask = np.ones((BATCH, 1, 1, KEYS), bool)  # of all keys, not sharded
    attend = functools.partial(aj.sinkhorn_attention, spec=EVEN, axis_name="tokens", mask=mask)
    mapped = jax.shard_map(attend, mesh=mesh(), in_specs=TOKENS, out_specs=TOKENS)
    with pytest.raises(
        ValueError, match=r"axis_name='tokens' takes a mask of .*\(1, 8\) or \(6, 1\)"
    ):
        jax.eval_shape(mapped, *arrays(rng))


def test_axis_name_outside_of_shard_map_and_of_another_type(rng):
    with pytest.raises(ValueError, match="not an axis of an enclosing jax.shard_map"):
        aj.softmax_attention(*arrays(rng), axis_name="tokens")
    with pytest.raises(TypeError, match="axis_name must be the name of an axis"):
        aj.softmax_attention(*arrays(rng), axis_name=3)
