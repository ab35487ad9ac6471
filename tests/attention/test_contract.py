"""What holds for every attention function under every implementation."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from operators import BATCH, CASES, DIM, HEADS, LENGTH, ONCE, OPERATORS, tokens

LINEAR = [case for case in ONCE if not OPERATORS[case[0]].pairs]


@pytest.fixture
def operator(request):
    """(the operator, its function under one implementation); parametrised by CASES or a part."""
    name, implementation = request.param
    chosen = OPERATORS[name]
    bind = lambda **settings: chosen.bind(implementation=implementation, **settings)
    return chosen, bind


def every(cases):
    """Runs a test for these operators and implementations."""
    return pytest.mark.parametrize("operator", cases, indirect=True, ids=map(": ".join, cases))


def loss_of(function):
    return lambda *arrays, **masks: jnp.sum(jnp.sin(function(*arrays, **masks)))


# -------------------------------------------------------------------------- implementations


@pytest.mark.parametrize("name", OPERATORS)
def test_implementations_agree_in_outputs_weights_and_gradients(rng, name):
    chosen = OPERATORS[name]
    q, k, v = chosen.inputs(rng)
    masks = chosen.bias_and_mask(rng, k.shape[1])
    results = []
    for implementation in (*chosen.implementations, "auto"):
        function = chosen.bind(implementation=implementation)
        both = jax.jit(functools.partial(function, return_weights=True))(q, k, v, *masks)
        loss = lambda q, k, v, function=function: loss_of(function)(q, k, v, *masks)
        value_and_grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
        results.append((both, value_and_grads))
    for other in results[1:]:
        chex.assert_trees_all_close(other, results[0], atol=1e-4, rtol=1e-4)


@every(LINEAR)
def test_the_output_is_the_weights_times_the_values(rng, operator):
    chosen, bind = operator
    q, k, v = chosen.inputs(rng)
    out, weights = jax.jit(bind(return_weights=True))(q, k, v)
    chex.assert_shape(weights, (BATCH, HEADS, LENGTH, k.shape[1]))
    expected = np.swapaxes(np.asarray(weights, np.float64) @ problems.heads_first(v), 1, 2)
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-6)
    wide = jnp.concatenate([v, 2 * v, v[..., :1]], -1)
    wider = jax.jit(bind())(q, k, wide)
    chex.assert_shape(wider, (BATCH, LENGTH, HEADS, 2 * DIM + 1))
    chex.assert_trees_all_close(wider[..., DIM : 2 * DIM], 2 * wider[..., :DIM], atol=1e-5)


# ------------------------------------------------------------------- layouts and transformations


@every(CASES)
def test_jit_vmap_and_batch_axes_change_nothing(rng, operator):
    chosen, bind = operator
    arrays, function = chosen.inputs(rng), bind()
    expected = jax.jit(function)(*arrays)
    chex.assert_shape(expected, (BATCH, LENGTH, HEADS, DIM))
    chex.assert_trees_all_close(function(*arrays), expected, atol=5e-6)
    chex.assert_trees_all_close(jax.jit(jax.vmap(function))(*arrays), expected, atol=5e-6)
    one = jax.jit(function)(*(x[0] for x in arrays))
    chex.assert_trees_all_close(one, expected[0], atol=5e-6)
    deep = jax.jit(function)(*(x[None] for x in arrays))
    chex.assert_trees_all_close(deep, expected[None], atol=5e-6)


@every(ONCE)
def test_remat_and_scan_over_layers_change_nothing(rng, operator):
    chosen, bind = operator
    x, _, _ = chosen.square(rng)
    function = bind()
    block = lambda x: x + function(x, x, x)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def stacked(x):
        out, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(block)(x), None), x, length=2)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grad = stacked(x)
    by_hand = lambda x: jnp.sum(jnp.sin(block(block(x))))
    chex.assert_trees_all_close(out, jax.jit(lambda x: block(block(x)))(x), atol=1e-5)
    chex.assert_trees_all_close(grad, jax.jit(jax.grad(by_hand))(x), atol=1e-3, rtol=1e-3)


@every(CASES)
def test_fewer_key_value_heads_are_shared_by_groups_of_query_heads(rng, operator):
    chosen, bind = operator
    q, _, _ = chosen.inputs(rng)
    _, k, v = chosen.inputs(rng, heads=2)
    order = [0, 1, 0, 1] if chosen.pairs else [0, 0, 1, 1]
    full = jax.jit(bind())(q, k[..., order, :], v[..., order, :])
    chex.assert_trees_all_close(jax.jit(bind())(q, k, v), full, atol=2e-6)


# ------------------------------------------------------------------------------------- dtypes


@every(ONCE)
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32_and_rounded_once(rng, operator, low):
    chosen, bind = operator
    arrays = chosen.inputs(rng, dtype=low)
    function = jax.jit(bind(return_weights=True))
    out, weights = function(*arrays)
    chex.assert_type([out, weights], jnp.dtype(low))
    full = function(*(x.astype(jnp.float32) for x in arrays))
    chex.assert_trees_all_equal((out, weights), jax.tree.map(lambda x: x.astype(low), full))


@every(ONCE)
def test_dtype_sets_the_dtype_of_inputs_and_output(rng, operator):
    chosen, bind = operator
    arrays = chosen.inputs(rng)
    out = jax.jit(bind(dtype=jnp.bfloat16))(*arrays)
    chex.assert_type(out, jnp.bfloat16)
    chex.assert_trees_all_equal(out, jax.jit(bind())(*(x.astype(jnp.bfloat16) for x in arrays)))


# -------------------------------------------------------------------------------------- masks


def spellings(mask):
    """A mask of padded tokens as different users write it: (bias, mask)."""
    valid = np.asarray(mask)[:, 0].any(-1)
    additive = lambda fill: jnp.where(mask, 0.0, fill)
    return {
        "numpy": (None, np.asarray(mask)),
        "int": (None, mask.astype(jnp.int32)),
        "float, from flax": (None, nn.make_attention_mask(valid, valid)),
        "each head": (None, jnp.broadcast_to(mask, (BATCH, HEADS, LENGTH, LENGTH))),
        "bias": (additive(-1e9), None),
        "bias of -inf": (additive(-jnp.inf), None),
        "queries as mask, keys as bias": (
            jnp.where(jnp.asarray(valid)[:, None, None], 0.0, -1e9),
            jnp.asarray(valid)[:, None, :, None],
        ),
    }


@every(CASES)
def test_padded_tokens_are_as_if_they_were_not_there(rng, operator):
    chosen, bind = operator
    q, k, v = chosen.square(rng)
    lengths, mask = (LENGTH, 4), tokens([LENGTH, 4])
    function = jax.jit(bind(return_weights=True))
    out, weights = function(q, k, v, mask=mask)
    for example, length in enumerate(lengths):
        short = [x[example : example + 1, :length] for x in (q, k, v)]
        short_out, short_weights = function(*short)
        chex.assert_trees_all_close(out[example, :length], short_out[0], atol=5e-6)
        chex.assert_trees_all_close(
            weights[example, :, :length, :length], short_weights[0], atol=5e-6
        )
        assert (np.asarray(out)[example, length:] == 0).all()
        assert (np.asarray(weights)[example, :, length:] == 0).all()
        assert (np.asarray(weights)[example, :, :, length:] == 0).all()


@every([(name, "auto") for name in ("softmax", "asap, moments", "diff", "esp, soft")])
def test_every_spelling_of_padding_gives_the_same_output(rng, operator):
    chosen, bind = operator
    arrays, mask = chosen.square(rng), tokens([LENGTH, 4])
    expected = jax.jit(bind())(*arrays, None, mask)
    for name, (bias, spelt) in spellings(mask).items():
        out = jax.jit(bind())(*arrays, bias, spelt)
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6, err_msg=name)


@every(CASES)
def test_nothing_in_a_padded_slot_spreads_to_outputs_or_gradients(rng, operator):
    chosen, bind = operator
    arrays, mask = chosen.square(rng), tokens([LENGTH, 4])
    valid = np.asarray(mask)[:, 0].any(-1)[..., None, None]
    spoil = lambda fill: [jnp.where(valid, x, fill) for x in arrays]
    evaluate = jax.jit(jax.value_and_grad(loss_of(bind()), (0, 1, 2)))
    clean = evaluate(*spoil(0.0), mask=mask)
    chex.assert_tree_all_finite(clean)
    for fill in (jnp.nan, jnp.inf, -1e30):
        chex.assert_trees_all_equal(evaluate(*spoil(fill), mask=mask), clean)
    assert all((np.asarray(g)[1, 4:] == 0).all() for g in clean[1])


@every(CASES)
def test_an_example_without_tokens_gives_zeros_and_no_gradient(rng, operator):
    chosen, bind = operator
    arrays, mask = chosen.square(rng), tokens([LENGTH, 0])

    def loss(*arrays):
        out = bind()(*arrays, mask=mask)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    chex.assert_tree_all_finite((out, grads))
    assert all((np.asarray(x)[1] == 0).all() for x in (out, *grads))


# ------------------------------------------------------------------------------------ dropout


@every(ONCE)
def test_dropout_acts_only_when_it_is_on_and_needs_an_rng(rng, operator):
    chosen, bind = operator
    arrays, key = chosen.inputs(rng), jax.random.key(0)
    plain = jax.jit(bind())(*arrays)
    rate = functools.partial(bind, dropout_rate=0.5)
    chex.assert_trees_all_equal(jax.jit(rate())(*arrays, dropout_rng=key), plain)
    with pytest.raises(ValueError, match="dropout_rng"):
        rate(deterministic=False)(*arrays)
    with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\)"):
        bind(dropout_rate=1.0, deterministic=False)(*arrays, dropout_rng=key)
    dropping = jax.jit(rate(deterministic=False))
    one, again, other = (dropping(*arrays, dropout_rng=jax.random.key(seed)) for seed in (1, 1, 2))
    chex.assert_trees_all_equal(one, again)
    assert float(jnp.abs(one - other).max()) > 0.01


@every(LINEAR)
def test_dropout_keeps_the_mean_of_the_output(rng, operator):
    chosen, bind = operator
    arrays = chosen.inputs(rng)
    dropping = bind(dropout_rate=0.5, deterministic=False)
    many = jax.jit(jax.vmap(lambda key: dropping(*arrays, dropout_rng=key)))
    drawn = many(jax.random.split(jax.random.key(0), 1000))
    # A draw's deviation is at most max|v| for weights of up to 1: 0.1 of it here, over 1000 draws.
    error = 5 * np.asarray(drawn).std(0) / np.sqrt(1000) + 1e-5
    assert (np.abs(drawn.mean(0) - jax.jit(bind())(*arrays)) <= error).all()


@every(ONCE)
def test_broadcast_dropout_shares_one_mask_over_the_batch(rng, operator):
    chosen, bind = operator
    q, k, v = (jnp.repeat(x[:1], 2, axis=0) for x in chosen.inputs(rng))
    rates = dict(dropout_rate=0.5, deterministic=False, dropout_rng=jax.random.key(0))
    shared = jax.jit(bind(**rates))(q, k, v)
    chex.assert_trees_all_equal(shared[0], shared[1])
    apart = jax.jit(bind(**rates, broadcast_dropout=False))(q, k, v)
    assert float(jnp.abs(apart[0] - apart[1]).max()) > 0.01


# ---------------------------------------------------------------------------------- gradients


@every([(name, "auto") for name, o in OPERATORS.items() if o.smooth])
def test_gradients_match_finite_differences(rng, x64, operator):
    chosen, bind = operator
    arrays = chosen.inputs(rng, dtype="float64")
    bias, mask = chosen.bias_and_mask(rng, arrays[1].shape[1])
    function = bind(predictor_dtype="float64")
    mixing = problems.normal(rng, BATCH, LENGTH, HEADS, DIM, dtype="float64")
    arguments = arrays if bias is None else (*arrays, bias.astype(jnp.float64))

    @jax.jit
    def loss(q, k, v, bias=None):
        return jnp.sum(mixing * function(q, k, v, bias, mask))

    exact, measured = problems.slope(loss, arguments, rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


# ----------------------------------------------------------------------------------- refusals


@every(ONCE)
def test_what_an_operator_cannot_do_is_refused_by_name(rng, operator):
    chosen, bind = operator
    arrays = chosen.inputs(rng)
    for keywords, error, match in (
        ({"is_causal": True}, ValueError, "is_causal=True is refused"),
        ({"qk_attn_weights_einsum": jnp.einsum}, ValueError, "qk_attn_weights_einsum"),
        ({"attn_weights_value_einsum": jnp.einsum}, ValueError, "attn_weights_value_einsum"),
        ({"temperatur": 2.0}, TypeError, "temperatur"),
        ({"mask": jnp.ones((2, 5), bool)}, ValueError, r"mask of shape \(2, 5\).*\(2, 4, 7, "),
        ({"return_weights": jnp.bool_(True)}, TypeError, "return_weights"),
    ):
        with pytest.raises(error, match=match):
            bind()(*arrays, **keywords)
    known = ".*".join(("quick", "auto", chosen.implementations[0]))
    with pytest.raises(ValueError, match=known):
        chosen.bind(implementation="quick")(*arrays)
