"""Training an nnx model through compiled layers: as in linen, and on nnx's own terms."""

import chex
import jax
import jax.numpy as jnp
import linen_models
import numpy as np
import pytest
from flax import nnx
from nnx_models import AXES, DEPTH, Loop, Scan, State, data, shake, stacked

import asap_jax as aj

PATH = "layers/0/attention/attention_fn"


def linen_twin(model):
    """The linen model with the parameters of a loop of one layer, and its variables."""
    attention = model.layers[0].attention
    dense = lambda p: {"kernel": p.kernel.get_value(), "bias": p.bias.get_value()}
    names = ("query", "key", "value", "out")
    params = {"attention": {name: dense(getattr(attention, name)) for name in names}}
    return linen_models.Loop(depth=1), {"params": {"layer_0": params}}


@pytest.mark.parametrize("settings", [{}, {"ending": "row", "fit": "moments, row mass"}], ids=str)
def test_a_state_is_that_of_the_linen_model(rng, settings):
    batches, model = data(rng, 2), shake(rng, Loop(depth=1))
    twin, variables = linen_twin(model)
    own = aj.nnx.AmortizedTraining(decay=0.7, **settings)
    other = aj.linen.AmortizedTraining(twin, decay=0.7, **settings)
    state = nnx.jit(own.refresh)(own.init(model, batches[0]), model, batches[1])
    expected = other.refresh(other.init(variables, batches[0]), variables, batches[1])
    for name in ("sums", "rel_l2", "rel_l2_before", "layers"):
        (found,), (same,) = (getattr(s, name).values() for s in (state, expected))
        chex.assert_trees_all_close(found, same, rtol=1e-2, atol=1e-3)
    outs = (
        own.model(state, model)(batches[1]),
        twin.apply(other.variables(expected, variables), batches[1]),
    )
    chex.assert_trees_all_close(*outs, atol=1e-3)


def test_a_loss_differentiates_through_the_layers_and_leaves_the_model_alone(rng):
    x, model = data(rng, 1)[0], shake(rng, Loop(depth=1))
    amortized = aj.nnx.AmortizedTraining()
    state = amortized.init(model, x)

    @nnx.jit
    def gradient(model, state, x):
        loss = lambda model: jnp.square(amortized.model(state, model)(x)).mean()
        return nnx.grad(loss)(model)

    found = gradient(model, state, x)
    assert model.layers[0].attention.attention_fn.asap is None
    twin, variables = linen_twin(model)
    other = aj.linen.AmortizedTraining(twin)
    same = other.init(variables, x)
    loss = lambda params: jnp.square(
        twin.apply(other.variables(same, {"params": params}), x)
    ).mean()
    expected = jax.grad(loss)(variables["params"])["layer_0"]["attention"]
    for name in ("query", "key"):
        kernel = found["layers"][0]["attention"][name]["kernel"].get_value()
        np.testing.assert_allclose(kernel, expected[name]["kernel"], rtol=1e-2, atol=1e-4)


def test_layers_written_into_the_model_are_the_same_layers(rng):
    x, model = data(rng, 1)[0], shake(rng, Loop())
    amortized = aj.nnx.AmortizedTraining()
    state = amortized.init(model, x)
    expected = amortized.model(state, model)(x)
    params = nnx.state(model, nnx.Param)
    aj.nnx.attach(model, state.layers)
    chex.assert_trees_all_close(model(x), expected, atol=1e-6)
    chex.assert_trees_all_equal(nnx.state(model, nnx.Param), params)
    assert len(jax.tree.leaves(nnx.state(model, State), is_leaf=lambda v: isinstance(v, State)))
    # The teacher is what a refresh runs, also then.
    chex.assert_trees_all_close(amortized.init(model, x), state, rtol=1e-5, atol=1e-6)


def test_a_scanned_stack_has_the_state_of_its_unrolled_layers(rng):
    stack, loop = stacked(rng, "scan of named types")
    x = data(rng, 1)[0]
    amortized = aj.nnx.AmortizedTraining()
    together, apart = amortized.init(stack, x), amortized.init(loop, x)
    (path,) = together.layers
    for i, single in enumerate(apart.sums):
        found = jax.tree.map(lambda leaf, i=i: leaf[i], together.sums[path])
        chex.assert_trees_all_close(found, apart.sums[single], rtol=1e-3, atol=1e-4)
    chex.assert_shape(together.rel_l2[path], (DEPTH,))


def test_a_scan_that_drops_the_state_is_refused(rng):
    axes = nnx.StateAxes({nnx.Param: 0, aj.nnx.AsapCapture: 0, ...: None})
    assert axes != AXES
    with pytest.raises(ValueError, match="AsapState: 0"):
        aj.nnx.AmortizedTraining().init(Scan(shake(rng, Loop()), axes=axes), data(rng, 1)[0])


def test_a_linen_model_is_refused(rng):
    with pytest.raises(TypeError, match="model must be an nnx.Module"):
        aj.nnx.AmortizedTraining().init(linen_models.Loop(), data(rng, 1)[0])
