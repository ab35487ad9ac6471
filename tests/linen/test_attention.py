"""Sinkhorn attention as `attention_fn` of stock linen attention: drop-in and recording."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from linen_models import (
    BATCH,
    DEPTH,
    FEATURES,
    HEADS,
    LENGTH,
    SLICES,
    SPEC,
    STACKS,
    Loop,
    Scan,
    attention,
    compile_model,
    data,
    initial,
    output,
    project,
    stacked,
)

import asap_jax as aj

# ------------------------------------------------------------------------------- a drop-in layer


def test_init_leaves_parameters_only():
    x = jnp.ones((BATCH, LENGTH, FEATURES))
    for model in (attention(), Loop(), Scan()):
        assert set(jax.eval_shape(model.init, jax.random.key(0), x)) == {"params"}


@pytest.mark.parametrize("normalize_qk", [False, True])
def test_output_is_sinkhorn_attention_on_the_projections(rng, normalize_qk):
    layer = attention(normalize_qk=normalize_qk)
    (x,) = data(rng, 1)
    params = initial(rng, layer)["params"]
    q, k, v = project(params, x)
    expected = output(params["out"], aj.sinkhorn_attention(q, k, v, spec=SPEC))
    chex.assert_trees_all_close(layer.apply({"params": params}, x), expected, atol=2e-6)


def test_cross_attention_of_other_lengths(rng):
    layer = attention()
    x, y = problems.normal(rng, 3, 6, FEATURES), problems.normal(rng, 3, 9, FEATURES)
    params = initial(rng, layer, x, y)["params"]
    (q, _, _), (_, k, v) = project(params, x), project(params, y)
    expected = output(params["out"], aj.sinkhorn_attention(q, k, v, spec=SPEC))
    chex.assert_trees_all_close(layer.apply({"params": params}, x, y), expected, atol=2e-6)


VALID = np.arange(LENGTH) < np.array([LENGTH, 4, 5])[:, None]
MASKS = {
    "tokens, float32": nn.make_attention_mask(VALID, VALID),
    "keys, bool": VALID[:, None, None, :],
    "keys of one example": VALID[1][None, None, None, :],
    "entry by entry": problems.random_mask(np.random.default_rng(1), BATCH, HEADS, LENGTH, LENGTH),
}


def test_the_compiled_layer_is_asap_attention(rng):
    batches = data(rng)
    layer = attention()
    variables = initial(rng, layer)
    state = compile_model(layer, variables, batches).states["attention_fn"]
    mask = problems.array(MASKS["tokens, float32"])
    teacher = layer.apply(variables, batches[0], mask=mask)
    for closures in ("two_sided", "one_sided"):
        plain = attention(
            functools.partial(
                aj.asap_attention, predictor=state.predictor, spec=SPEC, closures=closures
            )
        )
        expected = jax.jit(plain.apply)(variables, batches[0], mask=mask)
        asap = {"attention_fn": {"state": state.replace(closures=closures)}}
        compiled = jax.jit(layer.apply)({**variables, "asap": asap}, batches[0], mask=mask)
        chex.assert_trees_all_close(compiled, expected, atol=1e-6)
        assert jnp.abs(compiled - teacher).max() > 1e-4


@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_layers_stay_close_to_float32(rng, compiled):
    batches = data(rng)
    layer = attention(dtype=jnp.bfloat16)
    variables = initial(rng, layer)
    predictor = aj.Predictor(
        directions=aj.slice_directions(0, SLICES, FEATURES // HEADS),
        coefficients=jnp.full(SLICES, 0.5),
    )
    operator = functools.partial(aj.sinkhorn_attention, spec=SPEC)
    if compiled:
        state = aj.CompiledState(predictor, spec=SPEC)
        variables = {**variables, "asap": {"attention_fn": {"state": state}}}
        operator = functools.partial(aj.asap_attention, predictor=predictor, spec=SPEC)
    out, state = layer.apply(variables, batches[0], mutable=["asap_capture"])
    chex.assert_type(out, jnp.bfloat16)
    record = state["asap_capture"]["attention_fn"]["record"]
    chex.assert_type([record.query, record.key, record.value], jnp.bfloat16)
    wide = operator(*(x.astype(jnp.float32) for x in (record.query, record.key, record.value)))
    exact = output(jax.tree.map(jnp.asarray, variables["params"]["out"]), wide)
    chex.assert_trees_all_close(out.astype(jnp.float32), exact, atol=2e-2)


# ------------------------------------------------------------------------------ dropout, refusals


def test_dropout_survives_when_every_collection_is_mutable(rng):
    (x,) = data(rng, 1)
    layer = attention(dropout_rate=0.5, deterministic=False)
    variables = initial(rng, attention())
    step = functools.partial(layer.apply, variables, x, rngs={"dropout": jax.random.key(1)})
    out, _ = step(mutable=True)
    chex.assert_trees_all_equal(out, step(mutable=["batch_stats"])[0])


def test_decoding_one_query_at_a_time_is_refused(rng):
    (x,) = data(rng, 1)
    layer = attention(decode=True)

    def decode_first_token():
        variables = layer.init(jax.random.key(0), x)
        layer.apply(variables, x[:, :1], mutable=["cache"])

    with pytest.raises(ValueError, match="decode"):
        decode_first_token()


def test_a_state_of_another_spec_is_refused(rng):
    batches = data(rng)
    layer = attention()
    variables = compile_model(layer, initial(rng, layer), batches).variables
    other = attention(aj.linen.SinkhornAttention(aj.SinkhornSpec(num_steps=6)))
    with pytest.raises(ValueError, match=r"'attention_fn' has .*num_steps=6.*num_steps=4"):
        other.apply(variables, batches[0])


# -------------------------------------------------------------------------------------- recording


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_record_holds_the_inputs_of_the_call(rng, transform):
    (x,) = data(rng, 1)
    layer = attention()
    params = initial(rng, layer)["params"]
    mask = problems.array(MASKS["tokens, float32"])
    run = transform(lambda p, x: layer.apply({"params": p}, x, mask=mask, mutable="asap_capture"))
    out, state = run(params, x)
    record = state["asap_capture"]["attention_fn"]["record"]
    chex.assert_trees_all_close((record.query, record.key, record.value), project(params, x))
    chex.assert_trees_all_equal(record.mask, mask)
    assert (record.bias, record.spec, record.stack) == (None, SPEC, ())
    chex.assert_trees_all_close(out, layer.apply({"params": params}, x, mask=mask), atol=1e-6)


def test_nothing_is_recorded_unless_asked(rng):
    (x,) = data(rng, 1)
    layer = attention()
    _, state = layer.apply(initial(rng, layer), x, mutable=["intermediates"])
    assert not jax.tree.leaves(state)


def test_dropout_is_off_while_recording(rng):
    (x,) = data(rng, 1)
    variables = initial(rng, attention())
    out, _ = attention(dropout_rate=0.5, deterministic=False).apply(
        variables, x, rngs={"dropout": jax.random.key(1)}, mutable=["asap_capture"]
    )
    chex.assert_trees_all_close(out, attention().apply(variables, x), atol=1e-6)


@pytest.mark.parametrize("kind", STACKS)
def test_a_stack_records_layer_by_layer(rng, kind):
    stack, stack_variables, loop, loop_variables = stacked(rng, kind)
    (x,) = data(rng, 1)
    mask = problems.array(MASKS["tokens, float32"])
    record = lambda model, v: jax.jit(functools.partial(model.apply, mutable=["asap_capture"]))(
        v, x, mask
    )[1]["asap_capture"]
    together = record(stack, stack_variables)["layers"]["SinkhornAttention_0"]["record"]
    assert together.stack == (DEPTH,)
    for i, found in enumerate(record(loop, loop_variables).values()):
        single = found["SinkhornAttention_0"]["record"]
        arrays = lambda r: (r.query, r.key, r.value, r.mask)
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], arrays(together))
        chex.assert_trees_all_close(layer, arrays(single), atol=1e-5)
