"""Sinkhorn attention as `attention_fn` of stock nnx attention: drop-in and recording."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx
from nnx_models import (
    BATCH,
    DEPTH,
    FEATURES,
    HEADS,
    LENGTH,
    SLICES,
    SPEC,
    STACKS,
    Capture,
    State,
    attention,
    compile_model,
    data,
    output,
    project,
    record,
    shake,
    stacked,
)

import asap_jax as aj

# ------------------------------------------------------------------------------- a drop-in layer


@pytest.mark.parametrize("normalize_qk", [False, True])
def test_output_is_sinkhorn_attention_on_the_projections(rng, normalize_qk):
    layer = shake(rng, attention(normalize_qk=normalize_qk))
    (x,) = data(rng, 1)
    expected = output(layer, aj.sinkhorn_attention(*project(layer, x), spec=SPEC))
    chex.assert_trees_all_close(layer(x), expected, atol=2e-6)
    chex.assert_trees_all_close(nnx.jit(lambda m, x: m(x))(layer, x), expected, atol=2e-6)


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


def test_plain_functions_serve_as_attention_fn(rng):
    batches = data(rng)
    layer = attention()
    plain = attention(functools.partial(aj.sinkhorn_attention, spec=SPEC))
    chex.assert_trees_all_close(plain(batches[0]), layer(batches[0]), atol=1e-6)
    model = compile_model(layer, batches).model
    state = model.attention_fn.asap.get_value()
    mask = problems.array(MASKS["tokens, float32"])
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


def test_a_state_of_another_spec_is_refused(rng):
    batches = data(rng)
    model = compile_model(attention(), batches).model
    model.attention_fn.spec = aj.SinkhornSpec(num_steps=6)
    with pytest.raises(ValueError, match=r"'attention_fn' has .*num_steps=6.*num_steps=4"):
        model(batches[0])


# -------------------------------------------------------------------------------------- recording


def test_the_record_holds_the_inputs_of_the_call(rng):
    (x,) = data(rng, 1)
    layer, mask = shake(rng, attention()), problems.array(MASKS["tokens, float32"])
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
