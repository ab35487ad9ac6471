"""What fused kernels are asked for by name, and what they refuse."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import asap_jax as aj
from asap_jax.solvers import registry
from asap_jax.solvers.flash import choice, platform, splash

CUDA, TPU = ("gpu", (9, 0)), ("tpu",)
PROBE = platform.name, platform.cuda_capability


def inputs(dtype="bfloat16", *, length=16, dim=8, heads=2):
    x = jax.ShapeDtypeStruct((1, length, heads, dim), jnp.dtype(dtype))
    return x, x, x


def chosen(arrays, *masks, calls=1, implementation="fused"):
    return aj.chosen_implementation(*arrays, *masks, calls=calls, implementation=implementation)


def test_the_kernel_follows_the_platform(pretend):
    pretend(*CUDA)
    assert chosen(inputs()) == "cudnn"
    pretend(*TPU)
    assert chosen(inputs()) == chosen(inputs("float32"), calls=5) == "splash"


def test_auto_takes_no_fused_kernel(pretend):
    for device in (("cpu",), CUDA, TPU):
        pretend(*device)
        assert chosen(inputs(), implementation="auto") == "scaling"
        assert chosen(inputs(length=8192), implementation="auto") == "streaming"
    assert chosen(inputs(), implementation="log") == "log"


@pytest.mark.parametrize(
    ("device", "name", "arrays", "calls", "match"),
    [
        (("cpu",), "fused", {}, 1, "no fused kernel for the platform 'cpu'.*'streaming'"),
        (("cpu",), "cudnn", {}, 1, "needs a CUDA device, the platform is 'cpu'"),
        (("cpu",), "splash", {}, 1, "needs a TPU, the platform is 'cpu'"),
        (("gpu",), "fused", {}, 1, "needs a CUDA device, the platform is 'gpu'"),
        (CUDA, "fused", {}, 2, "one attention call.*this one takes 2"),
        (CUDA, "cudnn", {"dtype": "float32"}, 1, "bfloat16 or float16, the inputs are float32"),
        (CUDA, "cudnn", {"dim": 254}, 1, "at most 256 channels.*head_dim=254.*need 264"),
        (("gpu", (8, 0)), "cudnn", {"dim": 126}, 1, "at most 128 channels.*need 136"),
        (TPU, "fused", {"dtype": "float16"}, 1, "bfloat16 or float32, the inputs are float16"),
    ],
)
def test_a_kernel_that_cannot_run_says_why(pretend, device, name, arrays, calls, match):
    pretend(*device)
    with pytest.raises(ValueError, match=match):
        chosen(inputs(**arrays), calls=calls, implementation=name)


@pytest.mark.parametrize("argument", ["bias", "mask"])
def test_a_row_for_each_query_is_refused_by_name_and_shape(pretend, argument):
    pretend(*TPU)
    x = jnp.zeros((1, 6, 2, 4))
    array = jnp.zeros((1, 1, 6, 6)) if argument == "bias" else jnp.ones((1, 1, 6, 6), bool)
    match = rf"implementation='fused': {argument} of shape \(1, 1, 6, 6\).*\(..., heads, 1, M\)"
    with pytest.raises(ValueError, match=match):
        aj.softmax_attention(x, x, x, **{argument: array}, implementation="fused")


def test_weights_of_a_fused_layer_are_refused_where_the_layer_is(rng):
    q, k, v = problems.attention_inputs(rng)
    with pytest.raises(ValueError, match="no fused kernel for the platform 'cpu'"):
        aj.softmax_attention(q, k, v, implementation="fused", return_weights=True)


def test_the_platform_is_that_of_the_default_device():
    name, capability = PROBE
    assert name() == jax.default_backend()
    for device in ("cpu", jax.local_devices(backend="cpu")[0]):
        with jax.default_device(device):
            assert name() == "cpu"
            assert capability() is None


# ------------------------------------------------- the attention functions on an interpreted kernel


@pytest.fixture
def interpreted(pretend, monkeypatch):
    """Splash attention under Pallas' interpreter, as if on a TPU."""
    pretend(*TPU)
    backend = choice.Backend(functools.partial(splash.kernel, interpret=True), splash.refusal)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "splash", registry._fused(backend))


def predictor(rng, side):
    w = problems.normal(rng, 4, aj.Moments().num_features(4), size=0.05)
    return aj.Predictor((aj.Moments(),), coefficients=w, side=side)


def operators(rng):
    """An operator of each kind: one call, ending on rows with a factor, ending on columns."""
    unit = aj.SinkhornSpec(4, key_mass="unit")
    asap = functools.partial(aj.asap_attention, spec=unit)
    return {
        "softmax": aj.softmax_attention,
        "row ending": functools.partial(
            asap, predictor=predictor(rng, "key"), closures=1, ending="row"
        ),
        "column ending": functools.partial(asap, predictor=predictor(rng, "query"), closures=1),
        "teacher": functools.partial(aj.sinkhorn_attention, spec=aj.SinkhornSpec(3, epsilon=0.7)),
    }


@pytest.mark.parametrize("name", ["softmax", "row ending", "column ending", "teacher"])
def test_fused_layers_equal_the_others_with_grouped_heads_and_padding(rng, interpreted, name):
    attend = operators(rng)[name]
    q, _, _ = problems.attention_inputs(rng, queries=9, keys=6, heads=4)
    _, k, v = problems.attention_inputs(rng, queries=9, keys=6, heads=2)
    keys = jnp.asarray(problems.key_padding([6, 4], 6))
    queries = jnp.swapaxes(jnp.asarray(problems.key_padding([9, 5], 9)), -1, -2)
    bias = jnp.where(keys, problems.normal(rng, 1, 4, 1, 6), -1e9)

    def both(implementation):
        function = functools.partial(attend, bias=bias, mask=queries, implementation=implementation)
        loss = lambda *arrays: (jnp.sum(jnp.sin(out := function(*arrays))), out)
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    (_, out), grads = both("fused")
    (_, expected), exact = both("log")
    chex.assert_trees_all_close(out, expected, atol=5e-6)
    chex.assert_trees_all_close(grads, exact, atol=2e-5)
    assert (np.asarray(out)[1, 5:] == 0).all()
    assert all((np.asarray(x)[1, 4:] == 0).all() for x in grads[1:])
