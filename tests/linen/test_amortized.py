"""Training a linen model through compiled layers: gradients, stacks, devices, a whole loop."""

import chex
import flax.core
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from linen_models import DEPTH, REMEDY, Scan, data, initial, stacked
from small_models import SPEC, Model, teacher, variables_of

import asap_jax as aj


def test_the_gradient_passes_through_the_prediction_and_not_to_the_coefficients(rng, x64):
    """Against finite differences in the query projection of a layer, prediction included."""
    model = Model((SPEC,), attention_settings=flax.core.FrozenDict(param_dtype=jnp.float64))
    variables = jax.tree.map(lambda p: p.astype(jnp.float64), variables_of(model, rng))
    x = data(rng, 1)[0].astype(jnp.float64)
    amortized = aj.linen.AmortizedTraining(model, ending="row")
    state = amortized.init(variables, x)

    def loss(kernel, state=state):
        params = jax.tree.map(lambda p: p, variables["params"])
        params["layer_0"]["query"]["kernel"] = kernel
        return jnp.square(model.apply(amortized.variables(state, {"params": params}), x)).mean()

    kernel = variables["params"]["layer_0"]["query"]["kernel"]
    exact, numeric = problems.slope(loss, [kernel], rng)
    np.testing.assert_allclose(exact, numeric, rtol=1e-6)
    gradient = jax.grad(lambda state: loss(kernel, state))(state)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


def test_compiled_layers_run_and_the_variables_are_unchanged(rng):
    batches, (model, variables) = data(rng, 2), teacher()
    amortized = aj.linen.AmortizedTraining(model)
    state = amortized.init(variables, batches[0])
    trained = amortized.variables(state, {"params": variables["params"]})
    compiled = aj.linen.compile(model, variables, batches[:1], holdout=0).variables
    outs = [model.apply(v, batches[1]) for v in (trained, compiled, variables)]
    chex.assert_trees_all_close(*outs[:2], atol=1e-5)
    assert jnp.abs(outs[0] - outs[2]).max() > 1e-3
    assert set(variables) == {"params"}
    # A refresh runs the teacher, whatever compiled layers its variables hold.
    again = [amortized.refresh(state, v, batches[1]) for v in (variables, trained)]
    chex.assert_trees_all_equal(*again)


@pytest.mark.usefixtures("unmeasured")
def test_a_scanned_stack_has_the_state_of_its_unrolled_layers(rng):
    stack, variables, loop, unrolled = stacked(rng, "remat and scan")
    batches = data(rng, 2)
    states = []
    for model, own in ((stack, variables), (loop, unrolled)):
        amortized = aj.linen.AmortizedTraining(model)
        state = jax.jit(amortized.init)(own, batches[0])
        states.append(jax.jit(amortized.refresh)(state, own, batches[1]))
    (path,) = states[0].layers
    chex.assert_shape(states[0].rel_l2[path], (DEPTH,))
    for i, single in enumerate(states[1].layers):
        for name in ("sums", "rel_l2", "rel_l2_before"):
            together, apart = (getattr(state, name) for state in states)
            found = jax.tree.map(lambda leaf, i=i: leaf[i], together[path])
            chex.assert_trees_all_close(found, apart[single], rtol=1e-3, atol=1e-4)


def test_a_scan_that_drops_the_state_is_refused(rng):
    model = Scan(axes=(("asap_capture", 0),))
    variables = initial(rng, model)
    with pytest.raises(ValueError, match=REMEDY):
        aj.linen.AmortizedTraining(model).init(variables, data(rng, 1)[0])


def test_over_a_mapped_axis_the_sums_are_those_of_the_whole_batch(rng):
    model, variables = Model((SPEC,)), variables_of(Model((SPEC,)), rng)
    first, second = (problems.normal(rng, 4, 6, 8) for _ in range(2))
    amortized = aj.linen.AmortizedTraining(model)
    state = amortized.init(variables, first)
    whole = amortized.refresh(state, variables, second)
    parts = jax.pmap(
        lambda part: amortized.refresh(state, variables, part, axis_name="batch"), axis_name="batch"
    )(second.reshape(2, 2, 6, 8))
    for leaf in jax.tree.leaves(parts.sums):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    chex.assert_trees_all_close(
        jax.tree.map(lambda leaf: leaf[0], parts.sums), whole.sums, rtol=1e-4, atol=1e-4
    )


@flax.struct.dataclass
class TrainState:
    params: dict
    optimiser: optax.OptState
    amortized: aj.AmortizedState


def test_a_loop_inside_a_train_state_resumes_to_the_same_bits(rng):
    """Refreshed every other step, in one jitted step; stored as bytes in between."""
    batches, model = data(rng, 6), Model((SPEC,))
    variables, tx = variables_of(model, rng), optax.sgd(1e-2)
    amortized = aj.linen.AmortizedTraining(model)

    def loss(params, state, x):
        y = model.apply(amortized.variables(state, {"params": params}), x)
        return jnp.square(y - 1.0).mean()

    @jax.jit
    def step(state, x, again):
        refreshed = lambda: amortized.refresh(state.amortized, {"params": state.params}, x)
        layers = jax.lax.cond(again, refreshed, lambda: state.amortized)
        value, gradient = jax.value_and_grad(loss)(state.params, layers, x)
        updates, optimiser = tx.update(gradient, state.optimiser)
        return TrainState(optax.apply_updates(state.params, updates), optimiser, layers), value

    params = variables["params"]
    state = TrainState(params, tx.init(params), amortized.empty(variables, batches[0]))
    blank, losses = state, []
    for index, x in enumerate(batches):
        state, value = step(state, x, index % 2 == 0)
        losses.append(float(value))
        if index == 2:
            stored = flax.serialization.to_bytes(state)
    assert losses[-1] < losses[0]
    resumed = flax.serialization.from_bytes(blank, stored)
    for index in (3, 4, 5):
        resumed, _ = step(resumed, batches[index], index % 2 == 0)
    chex.assert_trees_all_equal(resumed, state)
