"""Compiling linen models: under transforms, called in several ways, beside other threads."""

import functools
import threading

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from linen_models import (
    DEPTH,
    PAPER,
    REMEDY,
    SPEC,
    Block,
    Ensemble,
    Loop,
    Scan,
    attention,
    compile_model,
    data,
    initial,
    stacked,
)
from small_models import Model, compile_fit, teacher, variables_of

import asap_jax as aj


class Encoder(nn.Module):
    """Layers made in setup, called by several methods."""

    def setup(self):
        self.first, self.second = attention(), attention()
        self.scale = self.param("scale", nn.initializers.ones, (1, 1, 1))

    def encode(self, x):
        return x + self.first(x)

    def decode(self, x):
        return self.scale * x + self.second(x)

    def __call__(self, x):
        return self.decode(self.encode(x))


class CompactThenMethod(nn.Module):
    """A compact method, after which Flax rewinds the scope, and another one beside it."""

    @nn.compact
    def __call__(self, x):
        return x + attention(name="attention")(x)

    def halve(self, x):
        return x / 2


class Wrapped(nn.Module):
    """A root method that calls a compact one."""

    def __call__(self, x):
        return self.body(x)

    @nn.compact
    def body(self, x):
        return x + attention(name="attention")(x)


WAYS = {
    "a method by name": (Encoder(), "encode"),
    "a function of several methods": (Encoder(), lambda m, x: m.decode(m.encode(x))),
    "a function of a child": (Encoder(), lambda m, x: m.first(x)),
    "a compact method and another": (CompactThenMethod(), lambda m, x: m.halve(m(x))),
    "a method around a compact one": (Wrapped(), None),
}


@pytest.mark.parametrize("mutable", [False, "batch_stats", ["batch_stats"], True], ids=str)
@pytest.mark.parametrize(("model", "method"), WAYS.values(), ids=WAYS)
def test_layers_record_for_every_way_of_calling_the_model(rng, model, method, mutable):
    batches = data(rng)
    variables = variables_of(model, rng)
    settings = {} if method is None else {"method": method}
    plain = model.apply(variables, batches[0], mutable=["asap_capture"], **settings)[1]
    outputs = []

    def forward(variables, x):
        outputs.append(model.apply(variables, x, mutable=mutable, **settings))
        return outputs[-1]

    calibration = aj.linen.Calibration(model, forward=forward)
    recorded = calibration.records(variables, batches[0])
    expected = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(plain["asap_capture"]):
        layer = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        expected.setdefault("/".join(layer[:-1]), []).append(leaf)
    assert set(recorded) == set(expected) != set()
    for path, leaves in expected.items():
        chex.assert_trees_all_close(jax.tree.leaves(recorded[path]), leaves, atol=1e-6)
    if mutable is not False and mutable is not True:  # what it did not ask for it does not get
        assert "asap_capture" not in outputs[0][1]


@pytest.mark.parametrize("transform", [nn.remat, nn.jit], ids=["remat", "jit"])
def test_a_transformed_model_compiles(rng, transform):
    """A forward must then return the records itself, and an error says so."""
    batches, model = data(rng), transform(Model)((SPEC,))
    variables = variables_of(model, rng)
    expected = compile_fit(batches, PAPER, Model((SPEC,)), variables)
    forward = lambda v, x: model.apply(v, x, mutable=["asap_capture"])
    for settings in ({}, {"forward": forward}):
        result = compile_fit(batches, PAPER, model, variables, **settings)
        chex.assert_trees_all_close(result.states, expected.states, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"transform.*mutable=\['asap_capture'\]"):
        compile_fit(batches, PAPER, model, variables, forward=model.apply)


def test_a_bound_model_records(rng):
    batches, (model, _) = data(rng), teacher()
    forward = lambda variables, x: model.bind(variables)(x, train=False)
    result = compile_fit(batches, PAPER, forward=forward)
    expected = compile_fit(batches, PAPER, apply_kwargs={"train": False})
    chex.assert_trees_all_equal(result.states, expected.states)


def test_an_error_in_forward_leaves_no_recording_state(rng):
    batches, (model, variables) = data(rng), teacher()

    class Failing(nn.Module):
        @nn.compact
        def __call__(self, x):
            Model((SPEC,))(x)
            raise RuntimeError("on purpose")

    failing = Failing()
    bound = failing.bind({"params": {"Model_0": variables_of(Model((SPEC,)), rng)["params"]}})
    before = bound.scope.mutable
    with pytest.raises(RuntimeError, match="on purpose"):
        compile_fit(batches, PAPER, failing, {}, forward=lambda v, x: bound(x))
    assert bound.scope.mutable == before
    _, state = model.apply(variables, batches[0], mutable=["intermediates"])
    assert "asap_capture" not in state


def test_threads_can_train_while_other_threads_calibrate(rng):
    """Plain calls of other threads never record, and every calibration gets its own records."""
    (x,), (model, variables) = data(rng, 1), teacher()
    apply = nn.Module.apply
    expected = jax.tree.leaves(aj.linen.Calibration(model).records(variables, x))
    stop, faults = threading.Event(), []

    def train():
        loss = lambda v: jnp.sum(model.apply(v, x, train=False) ** 2)
        while not stop.is_set():
            _, state = model.apply(variables, x, mutable=["batch_stats"])
            assert not state, f"a plain call recorded {list(state)}"
            assert isinstance(model.apply(variables, x), jax.Array)
            assert nn.Module.apply is apply
            jax.eval_shape(jax.grad(loss), variables)

    def calibrate():
        for scale in (1.0, 2.0, 3.0):
            records = aj.linen.Calibration(model).records(variables, scale * x)
            (query, *_) = jax.tree.leaves(records)
            assert len(jax.tree.leaves(records)) == len(expected)
            if scale == 1.0:
                chex.assert_trees_all_close(query, expected[0], atol=1e-6)

    def guarded(work):
        try:
            work()
        except BaseException as error:
            faults.append(error)
            stop.set()

    trainers = [threading.Thread(target=guarded, args=(train,)) for _ in range(2)]
    calibrators = [threading.Thread(target=guarded, args=(calibrate,)) for _ in range(3)]
    for thread in trainers + calibrators:
        thread.start()
    for thread in calibrators:
        thread.join()
    stop.set()
    for thread in trainers:
        thread.join()
    assert not faults, faults[0]


# ------------------------------------------------------------------------------ under transforms


def test_a_scanned_stack_compiles_to_the_states_of_its_unrolled_layers(rng):
    stack, stack_variables, loop, loop_variables = stacked(rng, "scan")
    batches = data(rng)
    together = compile_model(stack, stack_variables, batches)
    single = compile_model(loop, loop_variables, batches)
    path = "layers/SinkhornAttention_0"
    assert list(together.states) == [path]
    assert list(together.report.layers) == [f"{path}[{i}]" for i in range(DEPTH)]
    for i, (layer, state) in enumerate(single.states.items()):
        found = jax.tree.map(lambda leaf, i=i: leaf[i], together.states[path])
        chex.assert_trees_all_close(found, state, rtol=1e-4, atol=1e-5)
        for operator, row in single.report.layers[layer].rows.items():
            figures = together.report.layers[f"{path}[{i}]"].rows[operator]
            chex.assert_trees_all_close(figures, row, rtol=1e-3, atol=1e-5)
    x = batches[0]
    outs = jax.jit(stack.apply)(together.variables, x), jax.jit(loop.apply)(single.variables, x)
    chex.assert_trees_all_close(*outs, atol=1e-4)
    assert jnp.abs(outs[0] - stack.apply(stack_variables, x)).max() > 1e-3


@pytest.mark.parametrize("block", [nn.remat(Block), nn.jit(Block)], ids=["remat", "jit"])
def test_layers_inside_lifted_transforms_compile(rng, block):
    batches = data(rng)
    model, plain = Loop(block, depth=1), Loop(depth=1)
    variables = initial(rng, plain)
    result = compile_model(model, variables, batches)
    expected = compile_model(plain, variables, batches)
    assert list(result.states) == list(expected.states)
    chex.assert_trees_all_close(result.states, expected.states, rtol=1e-4, atol=1e-5)


def test_compiling_twice_with_a_jitted_layer_gives_the_same_states(rng):
    """The second time its trace comes from a cache."""
    batches = data(rng)
    model = Loop(nn.jit(Block), depth=1)
    variables = initial(rng, model)
    first, second = (compile_model(model, variables, batches) for _ in range(2))
    chex.assert_trees_all_equal(second.states, first.states)


# ------------------------------------------------------------------- traps that must not be silent


class SharedAttribute(nn.Module):
    """Two layers that were given one instance."""

    @nn.compact
    def __call__(self, x):
        attention_fn = aj.linen.SinkhornAttention(SPEC)
        for _ in range(2):
            x = x + attention(attention_fn)(x)
        return x


class SharedLayer(nn.Module):
    """One whole layer called twice."""

    def setup(self):
        self.attention = attention()

    def __call__(self, x):
        return self.attention(self.attention(x))


@pytest.mark.parametrize("model", [SharedAttribute(), SharedLayer()], ids=["instance", "layer"])
def test_sharing_one_instance_is_an_error_that_names_the_remedy(rng, model):
    batches = data(rng)
    variables = initial(rng, model)
    model.apply(variables, batches[0])
    with pytest.raises(ValueError, match="Build one SinkhornAttention per layer") as error:
        compile_model(model, variables, batches)
    path = {SharedAttribute: "SinkhornAttention_0", SharedLayer: "attention/attention_fn"}
    assert path[type(model)] in str(error.value)


@pytest.mark.parametrize("axes", [{}, {"asap": 0}, {"asap_capture": 0}], ids=str)
@pytest.mark.parametrize("make", [Scan, functools.partial(Scan, outside=1), Ensemble],
                         ids=["scan", "scan after a plain layer", "vmap"])  # fmt: skip
def test_a_transform_that_drops_a_collection_is_an_error_that_names_the_remedy(rng, make, axes):
    batches = data(rng)
    model = make(axes=tuple(axes.items()))
    variables = initial(rng, model)
    with pytest.raises(ValueError, match=REMEDY) as error:
        compile_model(model, variables, batches)
    assert "'layers/SinkhornAttention_0'" in str(error.value)


def test_a_transform_that_names_both_collections_compiles(rng):
    batches = data(rng)
    model = Scan(outside=1)
    variables = initial(rng, model)
    result = compile_model(model, variables, batches)
    assert list(result.states) == ["layer_0/SinkhornAttention_0", "layers/SinkhornAttention_0"]


def test_a_collection_scanned_over_another_axis_is_an_error(rng):
    """With as many slices as layers, as here, the shapes would fit."""
    batches = data(rng)
    model = Scan(axes=(("asap", 1), ("asap_capture", 0)))
    variables = initial(rng, model)
    with pytest.raises(ValueError, match="asap"):
        compile_model(model, variables, batches)


def test_a_record_scanned_over_another_axis_is_an_error(rng):
    """With as many examples as layers, as here, the shapes would fit."""
    batches = data(rng)
    model = Scan(axes=(("asap", 0), ("asap_capture", 1)))
    variables = initial(rng, model)
    with pytest.raises(ValueError, match="asap_capture"):
        compile_model(model, variables, batches)


def test_mapping_one_layer_over_examples_is_an_error_that_names_the_remedy(rng):
    """Records then have an axis of examples, which is no axis of layers."""

    class OverExamples(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": None, "asap": None, "asap_capture": 0}
            block = nn.vmap(Block, variable_axes=axes, split_rngs={"params": False})
            return block(name="block")(x)[0]

    batches = data(rng)
    model = OverExamples()
    variables = initial(rng, model)
    with pytest.raises(ValueError, match="variable_axes"):
        compile_model(model, variables, batches)


# -------------------------------------------------------------------------- first mistakes


def test_parameters_without_their_collection_are_an_error_that_says_so(rng):
    model = Loop()
    variables = initial(rng, model)
    for given in (variables["params"], {}, {"scale": jnp.ones(2)}):
        with pytest.raises(ValueError, match=r"no collection 'params'.*\{'params': params\}"):
            aj.linen.compile(model, given, data(rng))


def test_compile_under_jit_is_refused(rng):
    model = Loop()
    variables = initial(rng, model)
    with pytest.raises(TypeError, match="calibration batch 0 is traced.*outside jax.jit"):
        jax.jit(lambda x: aj.linen.compile(model, variables, [x]))(data(rng, 1)[0])


def test_the_class_in_place_of_an_instance_and_an_nnx_model_are_refused_by_name(rng):
    x = data(rng, 1)[0]
    stock = nn.MultiHeadDotProductAttention(2, attention_fn=aj.linen.SinkhornAttention)
    with pytest.raises(TypeError, match=r"spec must be a SinkhornSpec, as in SinkhornAttention\("):
        stock.init(jax.random.key(0), x)
    layer = aj.linen.SinkhornAttention(aj.SinkhornSpec(4))
    settings = dict(attention_fn=layer, decode=False, rngs=nnx.Rngs(0))
    nnx_stock = nnx.MultiHeadAttention(2, x.shape[-1], **settings)
    with pytest.raises(ValueError, match="in an nnx model use asap_jax.nnx.SinkhornAttention"):
        nnx_stock(x)
