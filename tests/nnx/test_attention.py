"""Sinkhorn attention as `attention_fn` of stock nnx attention: drop-in, recording, transforms."""

import functools
import inspect

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx

import asap_jax as aj

SPEC = aj.SinkhornSpec(num_steps=4)
BATCH, LENGTH, FEATURES, HEADS, DEPTH, SLICES = 3, 6, 8, 2, 3, 3
PAPER = aj.PaperFit(num_slices=SLICES)
State, Capture = aj.nnx.AsapState, aj.nnx.AsapCapture


def attention(attention_fn=None, *, seed=0, **settings):
    attention_fn = attention_fn or aj.nnx.SinkhornAttention(SPEC)
    settings = {"decode": False, "rngs": nnx.Rngs(seed), **settings}
    return nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=attention_fn, **settings)


def data(rng, count=3):
    return [problems.normal(rng, BATCH, LENGTH, FEATURES) for _ in range(count)]


def shake(rng, model):
    """The model with no parameter left at zero, so that a forgotten bias shows."""
    shaken = jax.tree.map(
        lambda p: p + problems.normal(rng, *p.shape, size=0.3), nnx.state(model, nnx.Param)
    )
    nnx.update(model, shaken)
    return model


def project(layer, x):
    """The head projections of stock attention, by hand."""

    def dense(p, norm):
        y = jnp.einsum("bnf,fhd->bnhd", x, p.kernel.get_value()) + p.bias.get_value()[None, None]
        return y if norm is None else norm(y)

    return (
        dense(layer.query, layer.query_ln), dense(layer.key, layer.key_ln), dense(layer.value, None)
    )  # fmt: skip


def output(layer, heads):
    kernel, bias = layer.out.kernel.get_value(), layer.out.bias.get_value()
    return jnp.einsum("bnhd,hdf->bnf", heads, kernel) + bias[None, None]


class Block(nnx.Module):
    """A residual attention layer."""

    def __init__(self, seed=0, **settings):
        self.attention = attention(seed=seed, **settings)

    def __call__(self, x, mask=None):
        return x + self.attention(x, mask=mask)


class Loop(nnx.Module):
    """Layers one after another."""

    def __init__(self, depth=DEPTH, **settings):
        self.layers = nnx.List([Block(i, **settings) for i in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Transformed(nnx.Module):
    """One layer called inside `transform`."""

    def __init__(self, transform):
        self.layer = Block()
        self.transform = transform

    def __call__(self, x):
        return self.transform(lambda layer, x: layer(x))(self.layer, x)


def stack_layers(layers):
    """The layers as one module whose variables have a leading axis."""
    graph, _ = nnx.split(layers[0])
    states = [nnx.split(layer)[1] for layer in layers]
    return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


class Scan(nnx.Module):
    """The layers of a loop under `nnx.scan`, after one layer that is not if `outside`."""

    def __init__(self, loop, axes=0, *, remat=False, outside=False):
        self.layers = stack_layers(loop.layers)
        self.axes, self.remat = axes, remat
        self.first = Block(7) if outside else nnx.data(None)

    def __call__(self, x):
        if self.first is not None:
            x = self.first(x)
        body = lambda layer, x: layer(x)
        body = nnx.remat(body) if self.remat else body
        scan = nnx.scan(body, in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x)


class Ensemble(nnx.Module):
    """The layers of a loop side by side under `nnx.vmap`."""

    def __init__(self, loop):
        self.layers = stack_layers(loop.layers)

    def __call__(self, x):
        x = jnp.stack([x, 2 * x, 3 * x])
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, 0), out_axes=0)(self.layers, x).sum(
            0
        )


class Unrolled(nnx.Module):
    """`Ensemble` without `nnx.vmap`."""

    def __init__(self, loop):
        self.layers = nnx.List(loop.layers)

    def __call__(self, x):
        outs = [layer((i + 1) * x) for i, layer in enumerate(self.layers)]
        return functools.reduce(jnp.add, outs)


AXES = nnx.StateAxes({nnx.Param: 0, State: 0, Capture: 0, ...: None})
STACKS = {
    "scan": (Scan, lambda loop: loop),
    "scan of named types": (functools.partial(Scan, axes=AXES), lambda loop: loop),
    "remat and scan": (functools.partial(Scan, remat=True), lambda loop: loop),
    "vmap": (Ensemble, Unrolled),
}


def record(model, x):
    _, captured = nnx.capture(lambda model, x: model(x), Capture)(model, x)
    flat = nnx.to_flat_state(captured)
    return {"/".join(map(str, path[:-1])): leaf.get_value() for path, leaf in flat}


def compile_model(model, batches, **settings):
    return aj.nnx.compile(model, batches, fit=PAPER, **settings)


# ------------------------------------------------------------------------------- a drop-in layer


@pytest.mark.parametrize("normalize_qk", [False, True])
def test_state_is_that_of_stock_attention(normalize_qk):
    ours = attention(normalize_qk=normalize_qk)
    stock = attention(nnx.dot_product_attention, normalize_qk=normalize_qk)
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(stock))
    )


@pytest.mark.parametrize("normalize_qk", [False, True])
def test_output_is_sinkhorn_attention_on_the_projections(rng, normalize_qk):
    layer = shake(rng, attention(normalize_qk=normalize_qk))
    (x,) = data(rng, 1)
    expected = output(layer, aj.sinkhorn_attention(*project(layer, x), spec=SPEC))
    chex.assert_trees_all_close(layer(x), expected, atol=2e-6)
    chex.assert_trees_all_close(nnx.jit(lambda m, x: m(x))(layer, x), expected, atol=2e-6)


@pytest.mark.skipif(
    "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters,
    reason="nnx.MultiHeadAttention has no grouped heads before flax 0.12.6",
)
def test_grouped_heads_are_shared_by_their_queries(rng):
    layer = shake(rng, attention(num_kv_heads=1))
    (x,) = data(rng, 1)
    q, k, v = project(layer, x)
    chex.assert_shape([k, v], (BATCH, LENGTH, 1, FEATURES // HEADS))
    heads = aj.sinkhorn_attention(q, *(jnp.repeat(z, HEADS, axis=2) for z in (k, v)), spec=SPEC)
    chex.assert_trees_all_close(layer(x), output(layer, heads), atol=2e-6)
    predictor = aj.Predictor(
        directions=aj.slice_directions(0, SLICES, FEATURES // HEADS),
        coefficients=jnp.full(SLICES, 0.5),
    )
    layer.attention_fn.asap = State(aj.CompiledState(predictor, spec=SPEC))
    heads = aj.asap_attention(q, k, v, spec=SPEC, predictor=predictor)
    chex.assert_trees_all_close(layer(x), output(layer, heads), atol=1e-5)


VALID = np.arange(LENGTH) < np.array([LENGTH, 4, 5])[:, None]
MASKS = {
    "tokens, float32": nn.make_attention_mask(VALID, VALID),
    "keys, bool": VALID[:, None, None, :],
    "keys of one example": VALID[1][None, None, None, :],
    "entry by entry": problems.random_mask(np.random.default_rng(1), BATCH, HEADS, LENGTH, LENGTH),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_reach_the_operator(rng, mask):
    layer, mask = shake(rng, attention()), jnp.asarray(mask)
    (x,) = data(rng, 1)
    heads = aj.sinkhorn_attention(*project(layer, x), mask=mask, spec=SPEC)
    chex.assert_trees_all_close(layer(x, mask=mask), output(layer, heads), atol=2e-6)
    assert jnp.abs(layer(x, mask=mask) - layer(x)).max() > 1e-2


def test_sow_weights_sows_what_return_weights_returns(rng):
    layer, mask = attention(), jnp.asarray(MASKS["keys, bool"])
    (x,) = data(rng, 1)
    sowing = nnx.capture(lambda m, x: m(x, mask=mask, sow_weights=True), nnx.Intermediate)
    out, state = sowing(layer, x)
    (sown,) = state["attention_weights"].get_value()
    heads, weights = aj.sinkhorn_attention(
        *project(layer, x), mask=mask, spec=SPEC, return_weights=True
    )
    chex.assert_trees_all_close(sown, weights, atol=1e-6)
    np.testing.assert_array_equal(sown[1, :, :, 4:], 0)
    chex.assert_trees_all_close(out, output(layer, heads), atol=2e-6)


def test_plain_functions_serve_as_attention_fn(rng):
    batches = data(rng)
    layer = attention()
    plain = attention(functools.partial(aj.sinkhorn_attention, spec=SPEC))
    chex.assert_trees_all_close(plain(batches[0]), layer(batches[0]), atol=1e-6)
    model = compile_model(layer, batches).model
    state = model.attention_fn.asap.get_value()
    mask = jnp.asarray(MASKS["tokens, float32"])
    for closures in ("two_sided", "one_sided"):
        asap = functools.partial(
            aj.asap_attention, predictor=state.predictor, spec=SPEC, closures=closures
        )
        model.attention_fn.asap = State(state.replace(closures=closures))
        compiled = model(batches[0], mask=mask)
        chex.assert_trees_all_close(attention(asap)(batches[0], mask=mask), compiled, atol=1e-6)
        assert jnp.abs(compiled - layer(batches[0], mask=mask)).max() > 1e-4


def test_bfloat16_layers_stay_close_to_float32(rng):
    (x,) = data(rng, 1)
    layer = attention(dtype=jnp.bfloat16)
    out, captured = nnx.capture(lambda m, x: m(x), Capture)(layer, x)
    chex.assert_type(out, jnp.bfloat16)
    found = captured["attention_fn"]["record"].get_value()
    wide = [z.astype(jnp.float32) for z in (found.query, found.key, found.value)]
    exact = output(layer, aj.sinkhorn_attention(*wide, spec=SPEC))
    chex.assert_trees_all_close(out.astype(jnp.float32), exact, atol=2e-2)


# ------------------------------------------------------------------------------ dropout, refusals


def test_deterministic_dropout_is_no_dropout(rng):
    (x,) = data(rng, 1)
    layer = attention(dropout_rate=0.5)
    out = layer(x, deterministic=True)
    chex.assert_trees_all_equal(out, layer(x, deterministic=True))
    chex.assert_trees_all_equal(out, attention()(x))


def test_dropout_follows_its_rng(rng):
    (x,) = data(rng, 1)
    layer = attention(dropout_rate=0.5, deterministic=False)
    one, again, other = (layer(x, rngs=nnx.Rngs(dropout=seed)) for seed in (1, 1, 2))
    chex.assert_trees_all_equal(one, again)
    assert jnp.abs(one - other).max() > 1e-3
    assert jnp.abs(one - attention()(x)).max() > 1e-3


def test_dropout_without_an_rng_is_refused(rng):
    (x,) = data(rng, 1)
    layer = attention(dropout_rate=0.5, keep_rngs=False)
    with pytest.raises(ValueError, match="rngs"):
        layer(x, deterministic=False)
    with pytest.raises(ValueError, match="dropout_rng"):
        layer.attention_fn(*project(layer, x), dropout_rate=0.5, deterministic=False)


def test_causal_attention_is_refused(rng):
    with pytest.raises(ValueError, match="is_causal=True is refused"):
        attention()(data(rng, 1)[0], is_causal=True)


def test_a_state_of_another_spec_is_refused(rng):
    batches = data(rng)
    model = compile_model(attention(), batches).model
    model.attention_fn.spec = aj.SinkhornSpec(num_steps=6)
    with pytest.raises(ValueError, match=r"'attention_fn' has .*num_steps=6.*num_steps=4"):
        model(batches[0])


# -------------------------------------------------------------------------------------- recording


def test_the_record_holds_the_inputs_of_the_call(rng):
    (x,) = data(rng, 1)
    layer, mask = shake(rng, attention()), jnp.asarray(MASKS["tokens, float32"])
    recording = nnx.capture(lambda m, x: m(x, mask=mask), Capture)
    out, captured = recording(layer, x)
    found = captured["attention_fn"]["record"].get_value()
    chex.assert_trees_all_close((found.query, found.key, found.value), project(layer, x))
    chex.assert_trees_all_equal(found.mask, mask)
    assert (found.bias, found.spec, found.stack) == (None, SPEC, ())
    chex.assert_trees_all_close(out, layer(x, mask=mask), atol=1e-6)


def test_recording_leaves_nothing_behind(rng):
    (x,) = data(rng, 1)
    layer = attention()
    before = jax.tree.structure(nnx.state(layer))
    record(layer, x)
    layer(x)
    assert jax.tree.structure(nnx.state(layer)) == before


def test_dropout_is_off_while_recording(rng):
    (x,) = data(rng, 1)
    layer = attention(dropout_rate=0.5, deterministic=False)
    out, _ = nnx.capture(lambda m, x: m(x), Capture)(layer, x)
    chex.assert_trees_all_close(out, attention()(x), atol=1e-6)


def stacked(rng, kind):
    loop = shake(rng, Loop())
    make, unroll = STACKS[kind]
    return make(loop), unroll(loop)


@pytest.mark.parametrize("kind", STACKS)
def test_a_stack_records_layer_by_layer(rng, kind):
    stack, loop = stacked(rng, kind)
    (x,) = data(rng, 1)
    together = record(stack, x)["layers/attention/attention_fn"]
    assert together.stack == (DEPTH,)
    for i, single in enumerate(record(loop, x).values()):
        arrays = lambda r: (r.query, r.key, r.value)
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], arrays(together))
        chex.assert_trees_all_close(layer, arrays(single), atol=1e-5)


def test_a_stack_compiles_to_the_states_of_its_layers_unrolled(rng):
    stack, loop = stacked(rng, "scan")
    batches = data(rng)
    together, single = compile_model(stack, batches), compile_model(loop, batches)
    path = "layers/attention/attention_fn"
    assert list(together.states) == [path]
    assert list(together.report.layers) == [f"{path}[{i}]" for i in range(DEPTH)]
    for i, state in enumerate(single.states.values()):
        found = jax.tree.map(lambda leaf, i=i: leaf[i], together.states[path])
        chex.assert_trees_all_close(found, state, rtol=1e-4, atol=1e-5)
    x = batches[0]
    apply = nnx.jit(lambda model, x: model(x))
    outs = apply(together.model, x), apply(single.model, x)
    chex.assert_trees_all_close(*outs, atol=1e-4)
    assert jnp.abs(outs[0] - stack(x)).max() > 1e-3


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_layers_inside_transforms_compile(rng, transform):
    batches = data(rng)
    result = compile_model(Transformed(transform), batches)
    expected = compile_model(Transformed(lambda f: f), batches)
    assert list(result.states) == ["layer/attention/attention_fn"]
    chex.assert_trees_all_close(result.states, expected.states, rtol=1e-4, atol=1e-5)


class WithSequential(nnx.Module):
    """A layer whose residual branch is an `nnx.Sequential`, which holds an `nnx.List`."""

    def __init__(self, seed):
        self.attention = attention(seed=seed)
        linear = nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(seed))
        self.mlp = nnx.Sequential(linear, nnx.relu)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def test_a_scanned_block_may_hold_a_sequential(rng):
    class Blocks(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([WithSequential(i) for i in range(DEPTH)])

    batches = data(rng)
    result = compile_model(Scan(Blocks()), batches)
    (state,) = result.states.values()
    chex.assert_shape(state.predictor.coefficients, (DEPTH, SLICES))
    chex.assert_tree_all_finite(state)


def test_a_jitted_forward_compiles_again(rng):
    """The second time its trace comes from a cache."""
    batches = data(rng)
    model = attention()
    forward = nnx.jit(lambda model, batch: model(batch))
    first, second = (compile_model(model, batches, forward=forward) for _ in range(2))
    chex.assert_trees_all_equal(second.states, first.states)
    chex.assert_trees_all_close(
        first.states, compile_model(model, batches).states, rtol=1e-4, atol=1e-5
    )


# -------------------------------------------------------------------------------- the given model


def test_compiling_leaves_the_model_as_it_was(rng):
    batches = data(rng)
    model = Loop(dropout_rate=0.5)
    model.train()
    before = jax.tree.map(jnp.array, nnx.split(model)[1])
    graph = nnx.graphdef(model)
    result = compile_model(model, batches)
    assert nnx.graphdef(model) == graph
    chex.assert_trees_all_equal(nnx.split(model)[1], before)
    assert result.model is not model
    assert [layer.attention.deterministic for layer in result.model.layers] == [False] * DEPTH
    assert all(layer.attention.attention_fn.asap is None for layer in model.layers)


def test_a_compiled_model_compiles_again_from_its_teacher(rng):
    batches = data(rng)
    first = compile_model(Loop(), batches)
    again = compile_model(first.model, batches)
    chex.assert_trees_all_equal(again.states, first.states)


class Dropping(nnx.Module):
    """Dropout before and inside the attention, on by default or by argument."""

    def __init__(self, rate=0.5, deterministic=None):
        self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(3))
        self.attention = attention(dropout_rate=rate, deterministic=False)
        self.argument = deterministic

    def __call__(self, x):
        x = self.dropout(x, deterministic=self.argument)
        return self.attention(x, deterministic=self.argument)


@pytest.mark.parametrize("argument", [None, False], ids=["by default", "by argument"])
def test_dropout_is_off_while_calibrating(rng, argument):
    batches = data(rng)
    model = Dropping(deterministic=argument)
    first = compile_model(model, batches)
    model(batches[0])  # moves the rng on
    chex.assert_trees_all_equal(compile_model(model, batches).states, first.states)
    plain = compile_model(Dropping(rate=0.0), batches)
    chex.assert_trees_all_close(first.states, plain.states, rtol=1e-4, atol=1e-5)


class Configured(nnx.Module):
    """Keeps its settings in plain, unhashable Python containers."""

    def __init__(self):
        self.settings = {"sow_weights": False}
        self.attention = attention()

    def __call__(self, x):
        return self.attention(x, **self.settings)


def test_a_model_may_hold_plain_containers(rng):
    batches = data(rng)
    states = compile_model(Configured(), batches).states
    expected = compile_model(attention(), batches).states
    chex.assert_trees_all_equal(states["attention/attention_fn"], expected["attention_fn"])


class Counting(nnx.Module):
    """Holds more than parameters: running statistics and a call counter."""

    def __init__(self):
        self.norm = nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(0))
        self.attention = attention()
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.attention(self.norm(x))


def test_other_variables_of_the_model_are_kept(rng):
    batches = data(rng)
    model = Counting()
    model(batches[0])
    mean = jnp.array(model.norm.mean.get_value())
    assert jnp.abs(mean).max() > 0
    result = compile_model(model, batches)
    for found in (model, result.model):
        chex.assert_trees_all_equal(found.norm.mean.get_value(), mean)
        assert float(found.calls.get_value()) == 1


def test_a_compiled_model_trains_only_its_parameters(rng):
    batches = data(rng)
    model = compile_model(attention(), batches).model
    grads = nnx.jit(nnx.grad(lambda m, x: jnp.square(m(x)).sum()))(model, batches[0])
    chex.assert_tree_all_finite(grads)
    assert set(grads) == {"query", "key", "value", "out"}
    assert jnp.abs(grads["query"]["kernel"].get_value()).max() > 0


def test_other_objects_than_models_are_refused(rng):
    with pytest.raises(TypeError, match=r"model must be an nnx\.Module, got function"):
        aj.nnx.compile(lambda x: x, data(rng))
    with pytest.raises(ValueError, match="no SinkhornAttention layer ran"):
        aj.nnx.compile(nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(0)), data(rng))


def test_layers_are_addressed_by_their_paths(rng):
    batches = data(rng)
    path = "layers/1/attention/attention_fn"
    result = compile_model(Loop(), batches, layers=[path])
    assert list(result.states) == list(result.report.layers) == [path]
    compiled = [layer.attention.attention_fn.asap is not None for layer in result.model.layers]
    assert compiled == [False, True, False]
    with pytest.raises(ValueError, match=r"\['layers/1'\] are not in the model.*" + path):
        compile_model(Loop(), batches, layers=["layers/1"])


# ------------------------------------------------------------------- traps that must not be silent


class SharedInstance(nnx.Module):
    """Two layers that were given one instance."""

    def __init__(self):
        attention_fn = aj.nnx.SinkhornAttention(SPEC)
        self.layers = nnx.List([attention(attention_fn, seed=i) for i in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class SharedLayer(nnx.Module):
    """One whole layer called twice."""

    def __init__(self):
        self.layer = Block()

    def __call__(self, x):
        return self.layer(self.layer(x))


@pytest.mark.parametrize("model", [SharedInstance, SharedLayer])
def test_sharing_one_instance_is_an_error_with_the_remedy(rng, model):
    batches = data(rng)
    model = model()
    model(batches[0])
    with pytest.raises(ValueError, match="Build one SinkhornAttention per layer"):
        compile_model(model, batches)


@pytest.mark.parametrize("outside", [False, True], ids=["scan", "scan after a plain layer"])
@pytest.mark.parametrize(
    "types", [(), (State,), (Capture,)], ids=["neither", "AsapState", "AsapCapture"]
)
def test_a_scan_that_drops_a_variable_type_is_an_error_with_the_remedy(rng, types, outside):
    axes = nnx.StateAxes({nnx.Param: 0, **dict.fromkeys(types, 0), ...: None})
    model = Scan(Loop(), axes, outside=outside)
    batches = data(rng)
    model(batches[0])
    with pytest.raises(ValueError, match=r"AsapState.*AsapCapture") as error:
        compile_model(model, batches)
    assert "layers/attention/attention_fn" in str(error.value)


def test_slicing_both_variable_types_compiles(rng):
    model = Scan(Loop(), AXES, outside=True)
    result = compile_model(model, data(rng))
    assert list(result.states) == [
        "first/attention/attention_fn", "layers/attention/attention_fn"
    ]  # fmt: skip


def test_a_forward_that_runs_another_model_is_an_error(rng):
    other = attention()
    with pytest.raises(ValueError, match="no SinkhornAttention layer ran|forward"):
        compile_model(attention(), data(rng), forward=lambda model, batch: other(batch))
