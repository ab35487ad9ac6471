"""Compiling nnx models: under transforms, whatever else they hold, and what must not be silent."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_models import (
    AXES,
    DEPTH,
    FEATURES,
    SLICES,
    SPEC,
    Block,
    Capture,
    Loop,
    Scan,
    State,
    Transformed,
    attention,
    compile_model,
    data,
    stacked,
)

import asap_jax as aj


def test_a_scanned_stack_compiles_to_the_states_of_its_unrolled_layers(rng):
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


def test_a_scanned_block_with_a_sequential_compiles(rng):
    class Blocks(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([WithSequential(i) for i in range(DEPTH)])

    batches = data(rng)
    result = compile_model(Scan(Blocks()), batches)
    (state,) = result.states.values()
    chex.assert_shape(state.predictor.coefficients, (DEPTH, SLICES))
    chex.assert_tree_all_finite(state)


@pytest.mark.usefixtures("unmeasured")
def test_compiling_twice_with_a_jitted_forward_gives_the_same_states(rng):
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


def test_compiling_does_not_change_the_model(rng):
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


def test_compiling_a_compiled_model_gives_the_same_states(rng):
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
@pytest.mark.usefixtures("unmeasured")
def test_dropout_is_off_during_calibration(rng, argument):
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


def test_a_model_with_plain_containers_compiles(rng):
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


def test_compiling_keeps_other_variables_of_the_model(rng):
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


def test_objects_that_are_not_models_are_refused(rng):
    with pytest.raises(TypeError, match=r"model must be an nnx\.Module, got function"):
        aj.nnx.compile(lambda x: x, data(rng))
    with pytest.raises(ValueError, match="no SinkhornAttention layer ran"):
        aj.nnx.compile(nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(0)), data(rng))


def test_layers_are_selected_by_their_paths(rng):
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
def test_sharing_one_instance_is_an_error_that_names_the_remedy(rng, model):
    batches = data(rng)
    model = model()
    model(batches[0])
    with pytest.raises(ValueError, match="Build one SinkhornAttention per layer"):
        compile_model(model, batches)


@pytest.mark.parametrize("outside", [False, True], ids=["scan", "scan after a plain layer"])
@pytest.mark.parametrize(
    "types", [(), (State,), (Capture,)], ids=["neither", "AsapState", "AsapCapture"]
)
def test_a_scan_that_drops_a_variable_type_is_an_error_that_names_the_remedy(rng, types, outside):
    axes = nnx.StateAxes({nnx.Param: 0, **dict.fromkeys(types, 0), ...: None})
    model = Scan(Loop(), axes, outside=outside)
    batches = data(rng)
    model(batches[0])
    with pytest.raises(ValueError, match=r"AsapState.*AsapCapture") as error:
        compile_model(model, batches)
    assert "layers/attention/attention_fn" in str(error.value)


def test_a_scan_that_slices_both_variable_types_compiles(rng):
    model = Scan(Loop(), AXES, outside=True)
    result = compile_model(model, data(rng))
    assert list(result.states) == [
        "first/attention/attention_fn", "layers/attention/attention_fn"
    ]  # fmt: skip


def test_a_forward_that_runs_another_model_is_an_error(rng):
    other = attention()
    with pytest.raises(ValueError, match="no SinkhornAttention layer ran|forward"):
        compile_model(attention(), data(rng), forward=lambda model, batch: other(batch))
