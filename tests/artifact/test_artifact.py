"""One file a compiled model: what comes back, what is refused, what else takes a compiled model."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import chex
import flax.core
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx

import asap_jax as aj

SPEC = aj.SinkhornSpec(num_steps=4)
BATCH, LENGTH, FEATURES, HEADS, DEPTH, SLICES = 3, 6, 8, 2, 3, 3
PATH = "SinkhornAttention_0"

FIT = aj.PaperFit(num_slices=SLICES)


class Model(nn.Module):
    """Attention layers one after another."""

    spec: aj.SinkhornSpec = SPEC
    depth: int = 2
    heads: int = HEADS
    width: int = FEATURES

    @nn.compact
    def __call__(self, x):
        for i in range(self.depth):
            layer = nn.MultiHeadDotProductAttention(
                self.heads,
                qkv_features=self.width,
                attention_fn=aj.linen.SinkhornAttention(self.spec),
                name=f"layer_{i}",
            )
            x = x + layer(x)
        return x


class Stack(nn.Module):
    """The same layers under `nn.scan`."""

    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            lambda module, x, _: (module(x), None),
            variable_axes={"params": 0, "asap": 0, "asap_capture": 0},
            split_rngs={"params": True},
            length=DEPTH,
        )
        return body(Model(depth=1, name="layers"), x, None)[0]


class Layers(nnx.Module):
    """Attention layers one after another, in nnx."""

    def __init__(self, spec=SPEC, depth=2, heads=HEADS, width=FEATURES, seed=0):
        make = lambda i: nnx.MultiHeadAttention(
            heads, FEATURES, width, decode=False, attention_fn=aj.nnx.SinkhornAttention(spec),
            rngs=nnx.Rngs(100 * seed + i),
        )  # fmt: skip
        self.layers = nnx.List([make(i) for i in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class ScannedLayers(nnx.Module):
    """One attention layer under `nnx.scan`."""

    def __init__(self):
        layers = Layers(depth=DEPTH).layers
        graph, _ = nnx.split(layers[0])
        states = [nnx.split(layer)[1] for layer in layers]
        self.stack = nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))

    def __call__(self, x):
        scan = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.stack, x)


def data(count=3):
    rng = np.random.default_rng(0)
    return [problems.normal(rng, BATCH, LENGTH, FEATURES) for _ in range(count)]


def variables_of(model, seed=0):
    """Random variables, with no zero among them."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 2, FEATURES)))
    return jax.tree.map(lambda p: problems.normal(rng, *p.shape, size=0.4), shapes)


def compile_linen(model, variables, **settings):
    return aj.linen.compile(model, variables, data(), fit=FIT, **settings)


def compile_nnx(model, **settings):
    return aj.nnx.compile(model, data(), fit=FIT, **settings)


@functools.cache
def linen_teacher():
    model = Model()
    variables = variables_of(model)
    return model, variables, compile_linen(model, variables)


@functools.cache
def nnx_teacher():
    model = Layers()
    return model, compile_nnx(model)


def some(*shape):
    """Numbers to be kept, of no meaning."""
    return problems.normal(np.random.default_rng(shape), *shape)


def with_states(result, states):
    """`result` with other states, and nothing compiled."""
    variables = result.variables
    if variables is not None:
        variables = {**variables, "asap": aj.linen.state_tree(states)}
    return dataclasses.replace(result, states=states, variables=variables)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.asap"


@pytest.fixture
def saved(path):
    """(path of the compiled linen model, its teacher's variables)."""
    _, variables, result = linen_teacher()
    aj.save(path, result)
    return path, variables


@pytest.fixture
def saved_nnx(path):
    """(path of the compiled nnx model, its teacher)."""
    model, result = nnx_teacher()
    aj.save(path, result)
    return path, model


# --------------------------------------------------------------------------------- there and back


DIRECTIONS = some(SLICES, FEATURES // HEADS)
PAPER = aj.Predictor(directions=DIRECTIONS, coefficients=some(SLICES))
KEY_SIDE = aj.Predictor(directions=DIRECTIONS, coefficients=some(SLICES), side="key")
STATES = {
    "two-sided": aj.CompiledState(PAPER, SPEC),
    "one-sided": aj.CompiledState(PAPER, SPEC, "one_sided"),
    "two closures": aj.CompiledState(KEY_SIDE, SPEC, 2),
    "another spec": aj.CompiledState(PAPER, aj.SinkhornSpec(6, 0.5, "unit", "none", 0.3)),
    "per head": aj.CompiledState(PAPER.replace(head=aj.LinearHead(some(HEADS, SLICES))), SPEC),
    "token bias": aj.CompiledState(PAPER.replace(token_bias=some(LENGTH)), SPEC),
    "residual": aj.CompiledState(PAPER.replace(baseline="first_step"), SPEC),
    "statistics": aj.CompiledState(PAPER.replace(statistics={"mean": some(2)}), SPEC),
    "two families": aj.CompiledState(
        PAPER.replace(
            features=(
                aj.SlicedPotentials(DIRECTIONS, outside="zero"), aj.RawProjections(DIRECTIONS)
            ),
            head=aj.LinearHead(some(2 * SLICES)),
        ),
        SPEC,
    ),
    "both duals": aj.CompiledState(aj.DualPair(PAPER, KEY_SIDE, some()), SPEC, "none"),
    "bfloat16": aj.CompiledState(jax.tree.map(lambda x: x.astype(jnp.bfloat16), PAPER), SPEC),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_load_returns_what_was_saved(path, state):
    _, variables, result = linen_teacher()
    result = with_states(result, {PATH: state})
    aj.save(path, result)
    loaded = aj.load(path, like=variables)
    assert jax.tree.structure(loaded) == jax.tree.structure(result.variables)
    chex.assert_trees_all_equal(loaded, result.variables)
    chex.assert_trees_all_equal_dtypes(loaded, result.variables)


def test_a_loaded_linen_model_gives_the_same_outputs(saved):
    path, variables = saved
    model, _, result = linen_teacher()
    (x,) = data(1)
    apply = jax.jit(model.apply)
    for like in (variables, flax.core.freeze(variables), result.variables):
        out = apply(aj.load(path, like=like), x)
        np.testing.assert_array_equal(out, apply(result.variables, x))
    assert jnp.abs(out - apply(variables, x)).max() > 1e-3


def test_a_loaded_nnx_model_gives_the_same_outputs(saved_nnx):
    path, model = saved_nnx
    _, result = nnx_teacher()
    (x,) = data(1)
    apply = nnx.jit(lambda model, x: model(x))
    for like in (model, result.model):
        out = apply(aj.load(path, like=like), x)
        np.testing.assert_array_equal(out, apply(result.model, x))
    assert jnp.abs(out - apply(model, x)).max() > 1e-3
    assert all(layer.attention_fn.asap is None for layer in model.layers)


def test_scanned_stacks_can_be_saved_and_loaded(path):
    (x,) = data(1)
    stacked = aj.Predictor(
        directions=some(DEPTH, SLICES, FEATURES // HEADS), coefficients=some(DEPTH, SLICES)
    )
    state = aj.CompiledState(stacked, SPEC)
    model = Stack()
    variables = variables_of(model)
    result = with_states(
        dataclasses.replace(linen_teacher()[2], variables=variables), {f"layers/{PATH}": state}
    )
    aj.save(path, result)
    loaded, apply = aj.load(path, like=variables), jax.jit(model.apply)
    chex.assert_trees_all_equal(loaded, result.variables)
    np.testing.assert_array_equal(apply(loaded, x), apply(result.variables, x))

    model = ScannedLayers()
    compiled = nnx.clone(model)
    compiled.stack.attention_fn.asap = aj.nnx.AsapState(state)
    result = dataclasses.replace(
        nnx_teacher()[1], states={"stack/attention_fn": state}, model=compiled
    )
    aj.save(path, result)
    apply = nnx.jit(lambda model, x: model(x))
    out = apply(aj.load(path, like=model), x)
    np.testing.assert_array_equal(out, apply(compiled, x))


# ------------------------------------------------------------------------------- with the weights


class Normed(nn.Module):
    """An attention layer between other collections: statistics, half precision, a mask of -inf."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(x)
        self.variable("constants", "half", lambda: jnp.asarray([1.5, -jnp.inf], jnp.bfloat16))
        attention_fn = aj.linen.SinkhornAttention(SPEC)
        return nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)(x)


def test_a_file_with_weights_needs_no_variables_of_linen(path):
    model = Normed()
    variables = model.init(jax.random.key(0), data(1)[0])
    state = {f"MultiHeadDotProductAttention_0/{PATH}": STATES["per head"]}
    variables |= {"asap": aj.linen.state_tree(state)}
    result = dataclasses.replace(linen_teacher()[2], states=state, variables=variables)
    aj.save(path, result, weights=True)
    like = {**model.init(jax.random.key(1), data(1)[0])}
    for loaded in (aj.load(path), aj.load(path, like=like)):
        assert jax.tree.structure(loaded) == jax.tree.structure(variables)
        chex.assert_trees_all_equal(loaded, variables)
        chex.assert_trees_all_equal_dtypes(loaded, variables)
    del like["constants"]
    with pytest.raises(
        ValueError, match=r"weights/constants/half: the file has bf.*\[2\], .*no such"
    ):
        aj.load(path, like=like)


def test_a_file_with_weights_needs_only_the_shapes_of_an_nnx_model(path):
    _, result = nnx_teacher()
    aj.save(path, result, weights=True)
    like = Layers(seed=1)
    (x,) = data(1)
    before = like(x)
    np.testing.assert_array_equal(aj.load(path, like=like)(x), result.model(x))
    np.testing.assert_array_equal(like(x), before)
    with pytest.raises(
        ValueError, match=r"weights/layers/0/key/bias: .* float32\[2, 4\], .*\[4, 2\]"
    ):
        aj.load(path, like=Layers(heads=4))
    with pytest.raises(ValueError, match="compiled from an nnx model: give like"):
        aj.load(path)
    with pytest.raises(ValueError, match="compiled from an nnx model, like is linen"):
        aj.load(path, like=linen_teacher()[1])


def test_a_file_without_weights_needs_the_teacher(saved):
    with pytest.raises(ValueError, match=r"holds no weights .*weights=True.*give like"):
        aj.load(saved[0])


def test_weights_that_a_file_cannot_hold_are_refused(path):
    _, _, result = linen_teacher()
    for more, error, message in (
        ({"keys": {"dropout": jax.random.key(0)}}, TypeError, "weights/keys/dropout: a random key"),
        ({"a/b": {"c": some(1)}}, ValueError, "'a/b/c' of a weight has a '/' in a name"),
    ):
        changed = dataclasses.replace(result, variables={**result.variables, **more})
        with pytest.raises(error, match=message):
            aj.save(path, changed, weights=True)
    assert not path.exists()


FRESH = """
import pathlib, sys
import flax.linen as nn, jax, numpy as np
from flax import nnx
import asap_jax as aj

jax.config.update("jax_num_cpu_devices", 2)
spec, folder = aj.SinkhornSpec(num_steps=4), pathlib.Path(sys.argv[1])
x = np.load(folder / "x.npy")
layer = nn.MultiHeadDotProductAttention(2, attention_fn=aj.linen.SinkhornAttention(spec))
variables = aj.load(folder / "linen", like=layer.init(jax.random.key(0), x))
np.save(folder / "linen.npy", jax.jit(layer.apply)(variables, x))
layer = nnx.MultiHeadAttention(
    2, 8, decode=False, attention_fn=aj.nnx.SinkhornAttention(spec), rngs=nnx.Rngs(0))
model = aj.load(folder / "nnx", like=layer)
np.save(folder / "nnx.npy", nnx.jit(lambda model, x: model(x))(model, x))
"""


def test_a_fresh_process_gives_the_same_outputs(tmp_path):
    (x,) = data(1)
    np.save(tmp_path / "x.npy", x)
    layer = nn.MultiHeadDotProductAttention(2, attention_fn=aj.linen.SinkhornAttention(SPEC))
    result = compile_linen(layer, layer.init(jax.random.key(0), x))
    aj.save(tmp_path / "linen", result)
    expected = {"linen": jax.jit(layer.apply)(result.variables, x)}
    layer = nnx.MultiHeadAttention(
        2, 8, decode=False, attention_fn=aj.nnx.SinkhornAttention(SPEC), rngs=nnx.Rngs(0)
    )
    result = compile_nnx(layer)
    aj.save(tmp_path / "nnx", result)
    expected["nnx"] = nnx.jit(lambda model, x: model(x))(result.model, x)
    root = pathlib.Path(aj.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(root), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        timeout=300,
    )
    for name, out in expected.items():
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), out, err_msg=name)


def test_the_header_says_what_the_file_holds(saved):
    path, _ = saved
    header = json.loads(bytes(np.load(path)["header"]))
    assert header["framework"] == "linen"
    assert header["versions"]["jax"] == jax.__version__
    fields = header["layers"][PATH]["fields"]
    assert fields["spec"]["fields"] == {
        "num_steps": 4, "epsilon": 1.0, "key_mass": "balanced", "padding": "self", "scale": None
    }  # fmt: skip
    assert fields["closures"] == "two_sided"
    shape, dtype, _ = header["teacher"]["layer_0/query/kernel"]
    assert (shape, dtype) == ([FEATURES, HEADS, FEATURES // HEADS], "float32")


# ------------------------------------------------------------------------------ for another teacher


OTHER_MODELS = {
    "other values": ({}, r"layer_0/key/.*same shape \[.*other values"),
    "another head_dim": ({"width": 16}, r"key/kernel: saved float32\[8, 2, 4\], .*\[8, 2, 8\]"),
    "other heads": ({"heads": 4}, r"key/kernel: saved float32\[8, 2, 4\], .*\[8, 4, 2\]"),
    "more layers": ({"depth": 3}, r"layer_2/key/.*not in the file"),
    "fewer layers": ({"depth": 1}, r"layer_1/key/.*missing in the model"),
}


@pytest.mark.parametrize(("settings", "message"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_load_refuses_another_linen_teacher(saved, settings, message):
    path, _ = saved
    with pytest.raises(ValueError, match="(?s)another teacher.*" + message):
        aj.load(path, like=variables_of(Model(**settings), seed=int(not settings)))


@pytest.mark.parametrize(("settings", "message"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_load_refuses_another_nnx_teacher(saved_nnx, settings, message):
    path, _ = saved_nnx
    message = message.replace("layer_", "layers/").replace("key/.*", "key/kernel.*")
    with pytest.raises(ValueError, match="(?s)another teacher.*" + message):
        aj.load(path, like=Layers(**settings, seed=int(not settings)))


def test_load_refuses_another_dtype(saved):
    path, variables = saved
    like = jax.tree.map(lambda p: p.astype(jnp.bfloat16), variables)
    with pytest.raises(ValueError, match=r"saved float32\[.*model bfloat16\["):
        aj.load(path, like=like)


def test_float64_coefficients_are_not_rounded_silently(path):
    """A file written with 64-bit types, read without them."""
    _, variables, result = linen_teacher()
    with jax.enable_x64(True):
        state = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), STATES["two-sided"])
        aj.save(path, with_states(result, {PATH: state}))
        loaded = aj.load(path, like=variables)["asap"][PATH]["state"]
        chex.assert_type(loaded.predictor.coefficients, jnp.float64)
    with pytest.raises(ValueError, match="float64"):
        aj.load(path, like=variables)


OTHER_STATES = {
    "directions": (
        aj.CompiledState(
            aj.Predictor(directions=some(5, FEATURES // HEADS), coefficients=some(SLICES)), SPEC
        ),
        r".*float32\[3, 4\], like has float32\[5, 4\]",
    ),
    "coefficients": (STATES["per head"], r".*saved float32\[3\], like has float32\[2, 3\]"),
    "dtype": (STATES["bfloat16"], r".*saved float32\[3, 4\], like has bfloat16\[3, 4\]"),
    "closures": (STATES["one-sided"], " closures: saved 'two_sided', like has 'one_sided'"),
    "spec": (STATES["another spec"], r" spec: saved .*num_steps=4.*like has .*num_steps=6"),
}


@pytest.mark.parametrize(("state", "message"), OTHER_STATES.values(), ids=OTHER_STATES)
def test_a_state_already_in_like_must_equal_the_one_in_the_file(path, state, message):
    """A column-ending teacher is never swapped for another one by loading."""
    _, variables, result = linen_teacher()
    aj.save(path, with_states(result, {PATH: STATES["two-sided"]}))
    like = {**variables, "asap": aj.linen.state_tree({PATH: state})}
    with pytest.raises(ValueError, match=f"layer '{PATH}'" + message):
        aj.load(path, like=like)


def test_a_layer_already_compiled_in_like_must_be_in_the_file(path):
    _, _, result = linen_teacher()
    aj.save(path, with_states(result, {PATH: STATES["two-sided"]}))
    with pytest.raises(ValueError, match="no state for layer 'SinkhornAttention_1'"):
        aj.load(path, like=result.variables)


def test_a_state_already_in_an_nnx_model_must_equal_the_one_in_the_file(saved_nnx):
    path, model = saved_nnx
    other = nnx.clone(model)
    other.layers[0].attention_fn.asap = aj.nnx.AsapState(OTHER_STATES["directions"][0])
    layer = "layers/0/attention_fn"
    with pytest.raises(ValueError, match=rf"'{layer}'.*float32\[3, 4\], like has float32\[5, 4\]"):
        aj.load(path, like=other)


def test_load_refuses_an_nnx_model_with_another_spec(saved_nnx):
    path, _ = saved_nnx
    layer = "layers/0/attention_fn"
    with pytest.raises(ValueError, match=rf"'{layer}' was compiled for .*steps=4.*has .*steps=6"):
        aj.load(path, like=Layers(aj.SinkhornSpec(6)))


def test_a_linen_model_with_another_spec_raises_when_it_runs(saved):
    path, variables = saved
    loaded = aj.load(path, like=variables)
    with pytest.raises(ValueError, match=rf"'{PATH}' has .*num_steps=6.*num_steps=4"):
        Model(aj.SinkhornSpec(6)).apply(loaded, data(1)[0])


def test_load_refuses_a_model_of_the_other_framework(saved, tmp_path):
    path, variables = saved
    with pytest.raises(ValueError, match="compiled from a linen model, like is nnx"):
        aj.load(path, like=Layers())
    aj.save(tmp_path / "nnx", nnx_teacher()[1])
    with pytest.raises(ValueError, match="compiled from an nnx model, like is linen"):
        aj.load(tmp_path / "nnx", like=variables)


@pytest.mark.parametrize("like", [[], "model", Model()], ids=str)
def test_load_refuses_objects_that_are_not_a_teacher(saved, like):
    with pytest.raises(TypeError, match="like must be linen variables or an nnx.Module"):
        aj.load(saved[0], like=like)


def test_load_refuses_an_nnx_state_by_name(saved):
    with pytest.raises(TypeError, match="like must be an nnx.Module.* got an nnx.State"):
        aj.load(saved[0], like=nnx.state(Layers()))


def test_save_accepts_only_compile_results(path):
    with pytest.raises(TypeError, match="result must be a CompileResult, got dict"):
        aj.save(path, linen_teacher()[1])
    assert not path.exists()


# ------------------------------------------------------------------------------- what else takes it


def test_msgpack_stores_predictors_and_variables():
    _, _, result = linen_teacher()
    for tree in (result.states[PATH].predictor, result.states[PATH], result.variables):
        empty = jax.tree.map(jnp.zeros_like, tree)
        restored = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(tree))
        chex.assert_trees_all_equal(restored, tree)


def test_orbax_stores_predictors_variables_and_nnx_states(tmp_path):
    ocp = pytest.importorskip(
        "orbax.checkpoint", reason="orbax-checkpoint comes with the train extra"
    )
    _, _, result = linen_teacher()
    trees = {
        "predictor": result.states[PATH].predictor,
        "variables": result.variables,
        "nnx": nnx.split(nnx_teacher()[1].model)[1],
    }
    with ocp.StandardCheckpointer() as checkpointer:
        for name, tree in trees.items():
            checkpointer.save(tmp_path / name, tree)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / name, jax.tree.map(jnp.zeros_like, tree))
            chex.assert_trees_all_equal(restored, tree)


def test_a_linen_collection_can_hold_a_predictor():
    predictor = linen_teacher()[2].states[PATH].predictor

    class Holder(nn.Module):
        @nn.compact
        def __call__(self, q, k):
            return aj.predict(self.variable("duals", "predictor", lambda: predictor).value, q, k)

    q, k = problems.per_head(np.random.default_rng(0))
    out, variables = jax.jit(Holder().init_with_output)(jax.random.key(0), q, k)
    chex.assert_trees_all_equal(variables["duals"]["predictor"], predictor)
    chex.assert_trees_all_close(out, jax.jit(aj.predict)(predictor, q, k), atol=1e-6)
