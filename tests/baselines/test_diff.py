"""Differential attention: the formula, its masks, and its place in stock Flax attention."""

import functools
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx

import asap_jax as aj
from asap_jax.baselines.diff import diff_attention, diff_lambda_init

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
STATIC = ("depth", "scale", "norm_epsilon", "return_weights", "dtype")
attention = jax.jit(diff_attention, static_argnames=STATIC)

# ------------------------------------------------------------- reference, float64 NumPy


def softmax_map(s, mask):
    """Row softmax over the allowed entries; a row with none is 0."""
    a = np.zeros(s.shape)
    for i in range(len(s)):
        keys = np.flatnonzero(mask[i])
        if len(keys):
            e = np.exp(s[i, keys] - s[i, keys].max())
            a[i, keys] = e / e.sum()
    return a


def reference(
    q,
    k,
    v,
    bias=None,
    mask=None,
    *,
    lambda_q1=None,
    lambda_k1=None,
    lambda_q2=None,
    lambda_k2=None,
    depth=0,
    lambda_init=None,
    norm_scale=None,
    scale=None,
):
    """(out, maps) of a batch in Flax's layout, pair by pair."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, n, heads, d = q.shape
    m, width = k.shape[1], v.shape[-1]
    shape = (batch, heads, n, m)
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias, np.float64), shape)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask) != 0, shape)
    scale = 1 / math.sqrt(d) if scale is None else scale
    start = 0.8 - 0.6 * math.exp(-0.3 * depth) if lambda_init is None else lambda_init
    lam = start
    if lambda_q1 is not None:
        q1, k1, q2, k2 = (
            np.asarray(x, np.float64) for x in (lambda_q1, lambda_k1, lambda_q2, lambda_k2)
        )
        lam = math.exp(q1 @ k1) - math.exp(q2 @ k2) + start
    gain = np.ones(2 * width) if norm_scale is None else np.asarray(norm_scale, np.float64)
    out, maps = np.zeros((batch, n, heads, width)), np.zeros((batch, heads // 2, n, m))
    for b in range(batch):
        for pair in range(heads // 2):
            first, second = (
                softmax_map(scale * q[b, :, h] @ k[b, :, h].T + bias[b, h], mask[b, h])
                for h in (2 * pair, 2 * pair + 1)
            )
            maps[b, pair] = first - lam * second
            values = np.concatenate([v[b, :, 2 * pair], v[b, :, 2 * pair + 1]], axis=1)
            head = maps[b, pair] @ values
            head = head / np.sqrt((head**2).mean(1, keepdims=True) + 1e-5) * gain
            out[b, :, 2 * pair], out[b, :, 2 * pair + 1] = np.split((1 - start) * head, 2, axis=1)
    return out, maps


def inputs(rng, *, heads=4, dtype="float32", **settings):
    return problems.attention_inputs(rng, heads=heads, dtype=dtype, **settings)


def parameters(rng, dim=4, width=4, *, dtype="float32", size=0.4):
    """The four vectors and a norm scale."""
    vectors = {name: problems.normal(rng, dim, dtype=dtype, size=size) for name in VECTORS}
    return vectors | {"norm_scale": 1 + problems.normal(rng, 2 * width, dtype=dtype, size=0.2)}


# ---------------------------------------------------------------------------- the formula


def test_lambda_init_by_depth():
    expected = [
        0.2,
        0.355509067591,
        0.470713018344,
        0.556058204156,
        0.619283472853,
        0.666121903911,
        0.700820667067,
        0.726526143048,
        0.745569228026,
        0.759676692356,
        0.770127758979,
        0.777870099559,
    ]
    np.testing.assert_allclose([diff_lambda_init(depth) for depth in range(12)], expected, 1e-11)
    assert isinstance(diff_lambda_init(np.int32(3)), float)


@pytest.mark.parametrize("depth", [0, 5])
def test_follows_the_reference(rng, dtype, depth):
    for shape in ({}, {"queries": 64, "keys": 64, "dim": 16}, {"queries": 33, "keys": 128}):
        q, k, v = inputs(rng, dtype=dtype, **shape)
        learned = parameters(rng, q.shape[-1], v.shape[-1], dtype=dtype, size=0.2)
        out, weights = attention(q, k, v, **learned, depth=depth, return_weights=True)
        chex.assert_shape(out, q.shape)
        chex.assert_shape(weights, (2, 2, q.shape[1], k.shape[1]))
        chex.assert_type([out, weights], dtype)
        expected_out, expected = reference(q, k, v, **learned, depth=depth)
        tolerance = {"float32": 2e-6, "float64": 1e-12}[dtype.name]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(out, expected_out, rtol=0, atol=tolerance)


def test_without_vectors_lambda_is_its_initial_value(rng):
    q, k, v = inputs(rng)
    for settings in ({}, {"depth": 3}, {"lambda_init": 0.5}):
        out, weights = attention(q, k, v, **settings, return_weights=True)
        expected_out, expected = reference(q, k, v, **settings)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-6)
        np.testing.assert_allclose(out, expected_out, rtol=0, atol=2e-6)
        start = settings.get("lambda_init", diff_lambda_init(settings.get("depth", 0)))
        np.testing.assert_allclose(np.asarray(weights).sum(-1), 1 - start, atol=1e-6)


def test_lambda_init_may_be_traced_as_in_a_scan_over_depths(rng):
    q, k, v = inputs(rng)
    starts = problems.array([diff_lambda_init(depth) for depth in range(3)], jnp.float32)
    _, outs = jax.lax.scan(
        lambda c, start: (c, diff_attention(q, k, v, lambda_init=start)), None, starts
    )
    for depth in range(3):
        chex.assert_trees_all_close(outs[depth], attention(q, k, v, depth=depth), atol=1e-6)


def test_scale_and_value_width_follow_the_reference(rng, x64):
    q, k, _ = inputs(rng, dtype="float64")
    v = problems.normal(rng, 2, 5, 4, 3, dtype="float64")
    out = attention(q, k, v, scale=0.9)
    np.testing.assert_allclose(out, reference(q, k, v, scale=0.9)[0], rtol=0, atol=1e-12)


def test_bias_and_masks_of_single_heads_follow_the_reference(rng):
    q, k, v = inputs(rng)
    bias, learned = problems.normal(rng, 1, 4, 7, 5), parameters(rng)
    whole = problems.random_mask(rng, 2, 1, 7, 5)
    whole[0, 0, 3] = False
    for mask in (whole, problems.random_mask(rng, 2, 4, 7, 5), problems.key_padding([5, 3], 5)):
        out, weights = attention(
            q, k, v, bias, problems.array(mask), **learned, return_weights=True
        )
        expected_out, expected = reference(q, k, v, bias, mask, **learned)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-6)
        np.testing.assert_allclose(out, expected_out, rtol=0, atol=5e-6)


def test_a_causal_mask_is_honoured_as_a_mask(rng):
    q, k, v = inputs(rng, keys=7)
    mask = np.tril(np.ones((7, 7), bool))[None, None]
    out = attention(q, k, v, mask=problems.array(mask))
    np.testing.assert_allclose(out, reference(q, k, v, mask=mask)[0], rtol=0, atol=5e-6)


def test_queries_without_keys_give_exact_zeros_and_no_gradient(rng):
    q, k, v = inputs(rng)
    mask = np.ones((2, 1, 7, 5), bool)
    mask[0, 0, 3], mask[1] = False, False
    loss = lambda q, k, v: jnp.sum(jnp.sin(attention(q, k, v, mask=problems.array(mask))))
    out = attention(q, k, v, mask=problems.array(mask))
    grads = jax.grad(loss, (0, 1, 2))(q, k, v)
    chex.assert_tree_all_finite((out, grads))
    for x in (out, *grads):
        assert (np.asarray(x)[1] == 0).all()
    for x in (out, grads[0]):
        assert (np.asarray(x)[0, 3] == 0).all()


# ---------------------------------------------------------------- transforms and dtypes


def test_gradients_match_finite_differences(rng, x64):
    q, k, v = inputs(rng, dtype="float64")
    learned = parameters(rng, dtype="float64")
    mask = problems.array(problems.random_mask(rng, 2, 1, 7, 5))
    bias = problems.normal(rng, 1, 4, 7, 5, dtype="float64")
    mixing = problems.normal(rng, 2, 7, 4, 4, dtype="float64")
    names = tuple(learned)

    @jax.jit
    def loss(q, k, v, bias, *values):
        given = dict(zip(names, values, strict=True))
        return jnp.sum(mixing * diff_attention(q, k, v, bias, mask, **given))

    exact, measured = problems.slope(loss, (q, k, v, bias, *learned.values()), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


# ------------------------------------------------------------------- inside Flax models


def sequences(rng):
    """Two token sequences of lengths 6 and 4, and their mask as Flax makes it."""
    valid = problems.array(np.arange(6) < np.array([[6], [4]]), jnp.float32)
    return problems.normal(rng, 2, 6, 16), nn.make_attention_mask(valid, valid)


def test_linen_module_holds_the_learned_parts_beside_those_of_stock_attention(rng):
    x, mask = sequences(rng)
    stock = nn.MultiHeadDotProductAttention(num_heads=4).init(jax.random.key(0), x)["params"]
    module = aj.linen.DiffAttention(depth=2)
    model = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=module)
    variables = model.init(jax.random.key(0), x)
    params = dict(variables["params"])
    learned = params.pop("attention_fn")
    chex.assert_trees_all_equal_shapes(params, stock)
    shapes = {name: value.shape for name, value in learned.items()}
    assert shapes == {**dict.fromkeys(VECTORS, (4,)), "scale": (8,)}
    out = jax.jit(model.apply)(variables, x, mask=mask)
    rest = {name: learned[name] for name in VECTORS}
    function = functools.partial(diff_attention, depth=2, norm_scale=learned["scale"], **rest)
    plain = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=function)
    chex.assert_trees_all_close(out, plain.apply({"params": params}, x, mask=mask), atol=1e-5)
    loss = lambda variables: jnp.sum(jnp.sin(model.apply(variables, x, mask=mask)))
    grads = jax.jit(jax.grad(loss))(variables)["params"]["attention_fn"]
    assert all(np.abs(np.asarray(g)).max() > 0 for g in grads.values())


def test_vectors_start_normal_with_deviation_a_tenth():
    x = jnp.zeros((1, 3, 8 * 2000))
    module = aj.linen.DiffAttention(depth=0)
    q = x.reshape(1, 3, 8, 2000)
    params = module.init(jax.random.key(1), q, q, q)["params"]
    for name in VECTORS:
        assert abs(float(params[name].std()) - 0.1) < 0.01
    nnx_module = aj.nnx.DiffAttention(2000, depth=0, rngs=nnx.Rngs(0))
    for name in VECTORS:
        assert abs(float(getattr(nnx_module, name).get_value().std()) - 0.1) < 0.01
    assert not np.allclose(nnx_module.lambda_q1.get_value(), nnx_module.lambda_k1.get_value())


def test_serves_as_attention_fn_of_nnx(rng):
    x, mask = sequences(rng)
    make = lambda f: nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=f, rngs=nnx.Rngs(0))
    module = aj.nnx.DiffAttention(4, depth=2, rngs=nnx.Rngs(1))
    model = make(module)
    learned = {name: getattr(module, name).get_value() for name in VECTORS}
    function = functools.partial(
        diff_attention, depth=2, norm_scale=module.scale.get_value(), **learned
    )
    run = nnx.jit(lambda model, x: model(x, mask=mask))
    q, k, v = model.query(x), model.key(x), model.value(x)
    expected = model.out(function(q, k, v, mask=mask))
    chex.assert_trees_all_close(run(model, x), expected, atol=1e-5)
    chex.assert_trees_all_close(run(make(function), x), expected, atol=1e-5)
    own = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    assert own == {*VECTORS, "scale"}
    grads = nnx.grad(lambda model: jnp.sum(jnp.sin(model(x, mask=mask))))(model)
    for name in (*VECTORS, "scale"):
        assert np.abs(np.asarray(grads["attention_fn"][name].get_value())).max() > 0


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("depth", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)]
)
def test_depths_that_cannot_be_are_refused(rng, depth, error):
    with pytest.raises(error, match="depth"):
        diff_lambda_init(depth)
    with pytest.raises(error, match="depth"):
        diff_attention(*inputs(rng), depth=depth)


def test_a_traced_depth_is_refused_with_the_cure(rng):
    with pytest.raises(TypeError, match="lambda_init"):
        jax.jit(diff_lambda_init)(3)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"lambda_q1": jnp.ones(4)}, ValueError, r"missing: lambda_k1, lambda_q2, lambda_k2"),
        (dict.fromkeys(VECTORS, jnp.ones(3)), ValueError, r"lambda_q1 of shape \(3,\).*\(4,\)"),
        (dict.fromkeys(VECTORS, jnp.ones(4, int)), TypeError, r"lambda_q1.*int"),
        ({"norm_scale": jnp.ones(4)}, ValueError, r"norm_scale of shape \(4,\).*\(8,\)"),
        ({"norm_epsilon": 0.0}, ValueError, r"norm_epsilon"),
        ({"lambda_init": math.nan}, ValueError, r"lambda_init"),
        ({"lambda_init": np.ones(2)}, TypeError, r"lambda_init"),
        ({"scale": -1.0}, ValueError, r"scale"),
        ({"is_causal": True}, ValueError, r"is_causal.*mask"),
        ({"implementation": "quick"}, ValueError, r"quick.*auto"),
        ({"mask": jnp.ones((2, 5), bool)}, ValueError, r"mask of shape \(2, 5\).*\(2, 4, 7, 5\)"),
        ({"lamda_init": 0.5}, TypeError, r"lamda_init"),
    ],
)
def test_settings_that_do_not_fit_are_refused(rng, settings, error, match):
    with pytest.raises(error, match=match):
        diff_attention(*inputs(rng), **settings)


@pytest.mark.parametrize(
    ("query_heads", "key_heads", "match"),
    [(3, 3, "even"), (4, 1, "even"), (8, 6, "divide"), (2, 4, "divide")],
)
def test_heads_that_make_no_pairs_are_refused(rng, query_heads, key_heads, match):
    q, _, _ = inputs(rng, heads=query_heads)
    _, k, v = inputs(rng, heads=key_heads)
    with pytest.raises(ValueError, match=match) as error:
        diff_attention(q, k, v)
    assert str(q.shape) in str(error.value)
    assert str(k.shape) in str(error.value)
