"""Calibration batches: copies, limits, compiled programs, and the errors of bad ones."""

import contextlib
import functools

import chex
import flax.linen as nn
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import asap_jax as aj
from asap_jax.compiler import batches as batches_
from asap_jax.compiler import fit

SPEC = aj.SinkhornSpec(num_steps=4)
SHAPE = (2, 10, 16)


def linen_layer():
    return nn.MultiHeadDotProductAttention(2, attention_fn=aj.linen.SinkhornAttention(SPEC))


def nnx_layer():
    return nnx.MultiHeadAttention(
        2, SHAPE[-1], decode=False, attention_fn=aj.nnx.SinkhornAttention(SPEC), rngs=nnx.Rngs(0)
    )


@pytest.fixture(scope="module")
def variables():
    return linen_layer().init(jax.random.key(0), jnp.zeros(SHAPE))


def compile_both(variables):
    """Compiles a linen and an nnx layer with the same settings."""
    return {
        "linen": lambda batches, **rest: aj.linen.compile(
            linen_layer(), variables, batches, **rest
        ),
        "nnx": lambda batches, **rest: aj.nnx.compile(nnx_layer(), batches, **rest),
    }


def refilled(count=3):
    """Noise, noise, zeros: all in one buffer."""
    rng, buffer = np.random.default_rng(0), np.empty(SHAPE, np.float32)
    for index in range(count):
        buffer[...] = 0 if index == count - 1 else rng.normal(size=SHAPE)
        yield buffer


# ------------------------------------------------------------------------------- buffers of callers


def figures(result):
    return [layer.rows for layer in result.report.layers.values()]


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("holdout", [0.34, 0.0])
def test_a_buffer_that_is_filled_again_gives_the_result_of_copies(variables, kind, holdout):
    copies = [batch.copy() for batch in refilled()]
    run = compile_both(variables)[kind]
    one, two = (run(batches, holdout=holdout) for batches in (refilled(), copies))
    chex.assert_trees_all_equal(one.states, two.states)
    assert figures(one) == figures(two)


def test_stored_records_do_not_change_with_a_buffer_of_the_caller(variables):
    """A mask goes from the batch to the record without a computation."""
    mask = np.ones((2, 1, 1, 10), bool)

    def batches():
        for index, batch in enumerate(refilled()):
            mask[0, ..., 5 + index :] = False
            yield {"inputs_q": batch, "mask": mask}

    copies = [jax.tree.map(np.copy, batch) for batch in batches()]
    stored = []
    mask[...] = True
    for given in (batches(), copies):
        calibration = aj.linen.Calibration(linen_layer(), aj.Options(fit="auto"))
        for batch in given:
            calibration.add(variables, batch)
        stored.append(calibration.fits["attention_fn"].records)
    chex.assert_trees_all_equal(*stored)


# ----------------------------------------------------------------------------------------- messages


WRONG = {
    "a list in a tuple": lambda x: ([x, x],),
    "a list in a dict": lambda x: {"inputs_q": [x, x]},
    "a list of more arrays than arguments": lambda x: [x] * 5,
    "a list of shapes that do not fit": lambda x: [x, x[:, :3], x[:, :4]],
}


@pytest.mark.parametrize("form", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("index", [0, 1])
def test_a_list_where_the_model_needs_an_array_is_named(variables, form, index):
    given = [np.ones(SHAPE, np.float32)] * 3
    given[index] = form(given[0])
    message = rf"does not take calibration batch {index}, a .*list of .*float32\[2, 10, 16\]"
    with pytest.raises(TypeError, match=message + r".*stack the arrays"):
        aj.linen.compile(linen_layer(), variables, given, holdout=0.4)


def test_errors_of_a_model_on_other_batches_are_left_alone(variables):
    def forward(variables, x):
        raise AttributeError("mine")

    with pytest.raises(AttributeError, match="^mine"):
        aj.linen.compile(linen_layer(), variables, [np.ones(SHAPE)], forward=forward)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_an_error_of_the_model_is_shown_with_the_batch(variables, kind):
    """The likeliest mistake: labels, which the model does not take."""
    x, labels = np.ones(SHAPE, np.float32), np.ones(2, np.int32)
    compile_ = compile_both(variables)[kind]
    with pytest.raises(Exception, match=r"calibration batch 0, a tuple of 5.*leave labels out"):
        compile_([(x, x, x, None, labels)])


def test_a_traced_model_is_refused(variables):
    batches = [np.ones(SHAPE, np.float32)]
    linen = jax.jit(lambda v: aj.linen.compile(linen_layer(), v, batches).variables)
    with pytest.raises(TypeError, match="the model is traced: .* outside jax.jit"):
        linen(variables)
    with pytest.raises(TypeError, match="the model is traced: .* outside jax.jit"):
        nnx.jit(lambda model: aj.nnx.compile(model, batches).model)(nnx_layer())


def test_batches_are_described_by_their_parts():
    x = np.ones((2, 3), np.float32)
    assert batches_.describe_batch({"a": (x, 1.5)}) == (
        "a dict of {'a': a tuple of 2: [float32[2, 3], float[]]}"
    )


# ---------------------------------------------------------------------- what many batches take up


def test_at_most_a_fixed_number_of_batches_is_held_out():
    held_out = [i for i in range(10_000) if fit.is_reported(i, 0.2)]
    assert held_out == [i for i in range(10_000) if fit.is_held_out(i, 0.2)][: fit.MOST_REPORTED]
    assert not any(fit.is_reported(i, 0.0) for i in range(100))


def test_further_batches_go_to_the_fit(variables, monkeypatch):
    monkeypatch.setattr(fit, "MOST_REPORTED", 1)
    result = compile_both(variables)["linen"](refilled(5), holdout=0.5)
    assert (result.report.num_fit_batches, result.report.num_report_batches) == (4, 1)


STORING = {
    "records": aj.Candidate("c", rounds=1, num_centres=2, memory_limit=1e-5),
    "auto": aj.AutoFit((aj.Candidate("m"),), memory_limit=1e-5),
    "kl": aj.PaperFit(objective="kl", memory_limit=2e-5),
}


@pytest.mark.parametrize("settings", STORING.values(), ids=STORING)
def test_activations_beyond_the_limit_are_refused_with_the_numbers(variables, settings):
    """A record here has 3 x 2 x 10 x 16 numbers, 3.6e-6 GiB: the third is too much."""
    batches = [np.array(batch) for batch in refilled()]
    message = rf"stores activations .* with calibration batch 2: .*limit={settings.memory_limit}"
    with pytest.raises(ValueError, match=message):
        aj.linen.compile(linen_layer(), variables, batches, fit=settings, holdout=0.0)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_limit_must_be_positive(limit):
    for kind in (aj.PaperFit, aj.AutoFit, functools.partial(aj.Candidate, "c")):
        with pytest.raises(ValueError, match="memory_limit must be > 0"):
            kind(memory_limit=limit)


# ------------------------------------------------------------------------------- compiled only once


@contextlib.contextmanager
def counted():
    """The programs that XLA compiles in the block, by name."""
    names = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_compiling_an_equal_model_again_compiles_no_program(variables, kind):
    batches = [np.array(batch) for batch in refilled()]
    jax.clear_caches()
    with counted() as first:
        compile_both(variables)[kind](batches)
    with counted() as again:
        compile_both(variables)[kind](batches)
    assert "jit(_record)" in first
    assert again == []


def test_a_forward_is_read_again_on_every_compile(variables):
    """It may use values that have changed since."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linen_layer()(x)

    model, factor = Block(), [1.0]
    inside = {"params": {"MultiHeadDotProductAttention_0": variables["params"]}}
    forward = lambda variables, x: model.apply(variables, factor[0] * x)
    queries = []
    for value in (1.0, 3.0):
        factor[0] = value
        calibration = aj.linen.Calibration(model, forward=forward)
        (record,) = calibration.records(inside, np.ones(SHAPE, np.float32)).values()
        queries.append(record.query)
    assert jnp.abs(queries[0] - queries[1]).max() > 0.1


def test_a_dropped_record_is_an_error_on_every_compile():
    """Also where the first, failed attempt left traces in caches."""

    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.vmap(
                nn.MultiHeadDotProductAttention,
                variable_axes={"params": None},
                split_rngs={"params": False},
            )
            attention = aj.linen.SinkhornAttention(SPEC, parent=None)
            return layer(2, attention_fn=attention)(x[:, None])[:, 0]

    model, x = Dropping(), np.ones(SHAPE, np.float32)
    variables = model.init(jax.random.key(0), x)
    for _ in range(2):
        with pytest.raises(ValueError, match="could not record: a transform"):
            aj.linen.compile(model, variables, [x])


# ---------------------------------------------------------------------------- paths and checkpoints


class Inside(nn.Module):
    """An attention layer in a module of its own."""

    @nn.compact
    def __call__(self, x):
        return linen_layer()(x)


class Named(nn.Module):
    """Such a layer under a name."""

    @nn.compact
    def __call__(self, x):
        return Inside(name="enc/0")(x)


class Pair(nnx.Module):
    """Two layers, on the way to which a name has a slash."""

    def __init__(self):
        self.layers = nnx.Dict({"a/b": nnx_layer(), "a": nnx.Dict({"b": nnx_layer()})})

    def __call__(self, x):
        return self.layers["a"]["b"](self.layers["a/b"](x))


def test_a_name_with_a_slash_on_the_way_to_a_layer_is_named():
    x = np.ones(SHAPE, np.float32)
    model = Named()
    with pytest.raises(ValueError, match="the name 'enc/0' on the way to .* rename it"):
        aj.linen.compile(model, model.init(jax.random.key(0), x), [x])
    with pytest.raises(ValueError, match="the name 'a/b' on the way to .* rename it"):
        aj.nnx.compile(Pair(), [x])


def test_two_layers_of_one_path_are_an_error(monkeypatch):
    """A number and a string that look the same."""
    layer = aj.nnx.SinkhornAttention(SPEC)
    monkeypatch.setattr(nnx, "iter_modules", lambda model: [((0,), layer), (("0",), layer)])
    with pytest.raises(ValueError, match="two SinkhornAttention layers have the path '0'"):
        aj.nnx.sinkhorn_layers(layer)


def test_states_restored_as_dicts_are_an_error_that_says_how_to_restore(variables):
    x = np.ones(SHAPE, np.float32)
    state = {"predictor": {}, "mark": np.zeros(())}
    message = "state of layer .* must be a CompiledState, got dict.*restore.directory, target"
    with pytest.raises(TypeError, match=message):
        linen_layer().apply({**variables, "asap": {"attention_fn": {"state": state}}}, x)
    model = nnx_layer()
    model.attention_fn.asap = aj.nnx.AsapState(state)
    with pytest.raises(TypeError, match=message):
        model(x)
