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


@functools.cache
def compiled(name, implementation, **settings):
    """The jitted function of an operator: one for all tests, so that each shape compiles once."""
    return jax.jit(OPERATORS[name].bind(implementation=implementation, **settings))


@pytest.fixture
def operator(request):
    """(the operator, its function under one implementation); parametrised by CASES or a part.

    The function of some settings comes from `bind`, jitted from `compiled`.
    """
    name, implementation = request.param
    return (
        OPERATORS[name],
        functools.partial(OPERATORS[name].bind, implementation=implementation),
        functools.partial(compiled, name, implementation),
    )


@functools.cache
def _graded(name, implementation):
    """The jitted loss, output and gradients of an operator, under a mask."""

    def loss(*arrays, mask):
        out = OPERATORS[name].bind(implementation=implementation)(*arrays, mask=mask)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.fixture
def graded(request):
    """The jitted loss, output and gradients of ``operator`` under a mask: one for all tests."""
    return _graded(*request.node.callspec.params["operator"])


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
    for implementation in chosen.implementations:  # "auto" is one of them
        function = chosen.bind(implementation=implementation)

        @jax.jit
        def evaluate(q, k, v, *masks, function=function):
            loss = lambda q, k, v: loss_of(function)(q, k, v, *masks)
            both = function(q, k, v, *masks, return_weights=True)
            return both, jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

        results.append(evaluate(q, k, v, *masks))
    for other in results[1:]:
        chex.assert_trees_all_close(other, results[0], atol=1e-4, rtol=1e-4)


@every(LINEAR)
def test_the_output_is_the_weights_times_the_values(rng, operator):
    chosen, _, compiled = operator
    q, k, v = chosen.inputs(rng)
    out, weights = compiled(return_weights=True)(q, k, v)
    chex.assert_shape(weights, (BATCH, HEADS, LENGTH, k.shape[1]))
    expected = np.swapaxes(np.asarray(weights, np.float64) @ problems.heads_first(v), 1, 2)
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-6)
    v = np.asarray(v)
    wide = np.concatenate([v, 2 * v, v[..., :1]], -1)
    wider = np.asarray(compiled()(q, k, wide))
    chex.assert_shape(wider, (BATCH, LENGTH, HEADS, 2 * DIM + 1))
    chex.assert_trees_all_close(wider[..., DIM : 2 * DIM], 2 * wider[..., :DIM], atol=1e-5)


# ------------------------------------------------------------------- layouts and transformations


@every(CASES)
def test_jit_vmap_and_batch_axes_change_nothing(rng, operator):
    chosen, bind, compiled = operator
    arrays, function = chosen.inputs(rng), bind()
    expected = np.asarray(compiled()(*arrays))
    chex.assert_shape(expected, (BATCH, LENGTH, HEADS, DIM))
    chex.assert_trees_all_close(function(*arrays), expected, atol=5e-6)
    chex.assert_trees_all_close(jax.jit(jax.vmap(function))(*arrays), expected, atol=5e-6)
    one = compiled()(*(np.asarray(x)[0] for x in arrays))
    chex.assert_trees_all_close(one, expected[0], atol=5e-6)
    deep = compiled()(*(np.asarray(x)[None] for x in arrays))
    chex.assert_trees_all_close(deep, expected[None], atol=5e-6)


@every(ONCE)
def test_remat_and_scan_over_layers_change_nothing(rng, operator):
    chosen, bind, _ = operator
    x, _, _ = chosen.square(rng)
    function = bind()
    block = lambda x: x + function(x, x, x)

    def stacked(x):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(block)(x), None), x, length=2)[0]

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
    def evaluate(layers, x):
        out = layers(x)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grad = evaluate(stacked, x)
    (_, expected), expected_grad = evaluate(lambda x: block(block(x)), x)
    chex.assert_trees_all_close(out, expected, atol=1e-5)
    chex.assert_trees_all_close(grad, expected_grad, atol=1e-3, rtol=1e-3)


@every(CASES)
def test_fewer_key_value_heads_are_shared_by_groups_of_query_heads(rng, operator):
    chosen, _, compiled = operator
    q, _, _ = chosen.inputs(rng)
    _, k, v = map(np.asarray, chosen.inputs(rng, heads=2))
    order = [0, 1, 0, 1] if chosen.pairs else [0, 0, 1, 1]
    full = compiled()(q, k[..., order, :], v[..., order, :])
    chex.assert_trees_all_close(compiled()(q, k, v), full, atol=2e-6)


# ------------------------------------------------------------------------------------- dtypes


@every(ONCE)
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32_and_rounded_once(rng, operator, low):
    chosen, _, compiled = operator
    arrays = chosen.inputs(rng, dtype=low)
    function = compiled(return_weights=True)
    out, weights = function(*arrays)
    chex.assert_type([out, weights], jnp.dtype(low))
    full = function(*(np.asarray(x, np.float32) for x in arrays))
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(low)), full)
    chex.assert_trees_all_equal((out, weights), rounded)


@every(ONCE)
def test_dtype_sets_the_dtype_of_inputs_and_output(rng, operator):
    chosen, _, compiled = operator
    arrays = chosen.inputs(rng)
    out = compiled(dtype=jnp.bfloat16)(*arrays)
    chex.assert_type(out, jnp.bfloat16)
    low = (np.asarray(x).astype(jnp.bfloat16) for x in arrays)
    chex.assert_trees_all_equal(out, compiled()(*low))


# -------------------------------------------------------------------------------------- masks


def spellings(mask):
    """A mask of padded tokens as different users write it: (bias, mask)."""
    valid = mask[:, 0].any(-1)
    additive = lambda mask, fill: np.where(mask, np.float32(0), np.float32(fill))
    return {
        "numpy": (None, mask),
        "int": (None, mask.astype(np.int32)),
        "float, from flax": (None, nn.make_attention_mask(valid, valid)),
        "each head": (None, np.broadcast_to(mask, (BATCH, HEADS, LENGTH, LENGTH))),
        "bias": (additive(mask, -1e9), None),
        "bias of -inf": (additive(mask, -np.inf), None),
        "queries as mask, keys as bias": (
            additive(valid[:, None, None], -1e9),
            valid[:, None, :, None],
        ),
    }


@every(CASES)
def test_padded_tokens_are_as_if_they_were_not_there(rng, operator):
    chosen, _, compiled = operator
    q, k, v = map(np.asarray, chosen.square(rng))
    lengths, mask = (LENGTH, 4), tokens([LENGTH, 4])
    function = compiled(return_weights=True)
    out, weights = map(np.asarray, function(q, k, v, mask=mask))
    for example, length in enumerate(lengths):
        short = [x[example : example + 1, :length] for x in (q, k, v)]
        short_out, short_weights = map(np.asarray, function(*short))
        chex.assert_trees_all_close(out[example, :length], short_out[0], atol=5e-6)
        chex.assert_trees_all_close(
            weights[example, :, :length, :length], short_weights[0], atol=5e-6
        )
        assert (out[example, length:] == 0).all()
        assert (weights[example, :, length:] == 0).all()
        assert (weights[example, :, :, length:] == 0).all()


@every([(name, "auto") for name in ("softmax", "asap, moments", "diff", "esp, soft")])
def test_every_spelling_of_padding_gives_the_same_output(rng, operator):
    chosen, _, compiled = operator
    arrays, mask = chosen.square(rng), tokens([LENGTH, 4])
    expected = compiled()(*arrays, None, mask)
    for name, (bias, spelt) in spellings(np.asarray(mask)).items():
        out = compiled()(*arrays, bias, spelt)
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6, err_msg=name)


@every(ONCE)
def test_an_additive_mask_is_refused_or_makes_everything_nan(rng, operator):
    """Read as 0/1, it would leave nothing but the padding."""
    chosen, bind, compiled = operator
    arrays, mask = chosen.square(rng), np.asarray(tokens([LENGTH, 4]))
    additive = np.where(mask, np.float32(0), np.float32(-1e9))
    with pytest.raises(ValueError, match="give additive masks as bias"):
        bind()(*arrays, mask=additive)
    function = compiled(return_weights=True)
    out, weights = function(*arrays, None, additive)
    assert np.isnan(out).all()
    assert np.isnan(weights).any()  # exact sorting leaves zeros
    expected = function(*arrays, None, mask)
    chex.assert_trees_all_close(function(*arrays, None, mask.astype("f")), expected, atol=2e-6)


@every(CASES)
def test_nothing_in_a_padded_slot_spreads_to_outputs_or_gradients(rng, operator, graded):
    chosen, _, _ = operator
    arrays, mask = chosen.square(rng), tokens([LENGTH, 4])
    valid = np.asarray(mask)[:, 0].any(-1)[..., None, None]
    spoil = lambda fill: [np.where(valid, x, np.float32(fill)) for x in arrays]
    clean = graded(*spoil(0.0), mask=mask)
    chex.assert_tree_all_finite(clean)
    for fill in (jnp.nan, jnp.inf, -1e30):
        chex.assert_trees_all_equal(graded(*spoil(fill), mask=mask), clean)
    assert all((np.asarray(g)[1, 4:] == 0).all() for g in clean[1])


@every(CASES)
def test_an_example_without_tokens_gives_zeros_and_no_gradient(rng, operator, graded):
    chosen, _, _ = operator
    arrays, mask = chosen.square(rng), tokens([LENGTH, 0])
    (_, out), grads = graded(*arrays, mask=mask)
    chex.assert_tree_all_finite((out, grads))
    assert all((np.asarray(x)[1] == 0).all() for x in (out, *grads))


# ------------------------------------------------------------------------------------ dropout


@every(ONCE)
def test_dropout_acts_only_when_it_is_on_and_needs_an_rng(rng, operator):
    chosen, bind, compiled = operator
    arrays, key = chosen.inputs(rng), jax.random.key(0)
    plain = compiled()(*arrays)
    chex.assert_trees_all_equal(compiled(dropout_rate=0.5)(*arrays, dropout_rng=key), plain)
    with pytest.raises(ValueError, match="dropout_rng"):
        bind(dropout_rate=0.5, deterministic=False)(*arrays)
    with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\)"):
        bind(dropout_rate=1.0, deterministic=False)(*arrays, dropout_rng=key)
    dropping = compiled(dropout_rate=0.5, deterministic=False)
    draw = lambda seed: np.asarray(dropping(*arrays, dropout_rng=jax.random.key(seed)))
    one, again, other = draw(1), draw(1), draw(2)
    chex.assert_trees_all_equal(one, again)
    assert np.abs(one - other).max() > 0.01


@every(LINEAR)
def test_dropout_keeps_the_mean_of_the_output(rng, operator):
    chosen, bind, compiled = operator
    arrays = chosen.inputs(rng)
    dropping = bind(dropout_rate=0.5, deterministic=False)
    many = jax.jit(jax.vmap(lambda key: dropping(*arrays, dropout_rng=key)))
    drawn = np.asarray(many(jax.random.split(jax.random.key(0), 1000)))
    # A draw's deviation is at most max|v| for weights of up to 1: 0.1 of it here, over 1000 draws.
    error = 5 * drawn.std(0) / np.sqrt(1000) + 1e-5
    assert (np.abs(drawn.mean(0) - compiled()(*arrays)) <= error).all()


@every(ONCE)
def test_broadcast_dropout_shares_one_mask_over_the_batch(rng, operator):
    chosen, _, compiled = operator
    q, k, v = (np.repeat(np.asarray(x)[:1], 2, axis=0) for x in chosen.inputs(rng))
    dropping = functools.partial(compiled, dropout_rate=0.5, deterministic=False)
    draw = lambda function: np.asarray(function(q, k, v, dropout_rng=jax.random.key(0)))
    shared = draw(dropping())
    chex.assert_trees_all_equal(shared[0], shared[1])
    apart = draw(dropping(broadcast_dropout=False))
    assert np.abs(apart[0] - apart[1]).max() > 0.01


# ---------------------------------------------------------------------------------- gradients


@every([(name, "auto") for name, o in OPERATORS.items() if o.smooth])
def test_gradients_match_finite_differences(rng, x64, operator):
    chosen, bind, _ = operator
    arrays = chosen.inputs(rng, dtype="float64")
    bias, mask = chosen.bias_and_mask(rng, arrays[1].shape[1])
    function = bind(predictor_dtype="float64")
    mixing = problems.normal(rng, BATCH, LENGTH, HEADS, DIM, dtype="float64")
    arguments = arrays if bias is None else (*arrays, np.asarray(bias, np.float64))

    @jax.jit
    def loss(q, k, v, bias=None):
        return jnp.sum(mixing * function(q, k, v, bias, mask))

    exact, measured = problems.slope(loss, arguments, rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


# ----------------------------------------------------------------------------------- refusals


@every(ONCE)
def test_what_an_operator_cannot_do_is_refused_by_name(rng, operator):
    chosen, bind, _ = operator
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
