"""ESP attention: the relaxation, the released hard flag, exact matchings, masks and annealing."""

import functools
import math

import chex
import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx

import asap_jax as aj
from asap_jax.baselines import expected_plans, softsort
from asap_jax.baselines.esp import MODES, esp_attention, esp_temperature_schedule

STATIC = ("mode", "padding", "implementation", "return_weights", "scale", "dtype")
attention = jax.jit(esp_attention, static_argnames=STATIC)

# ------------------------------------------------------------- references, float64 NumPy


def soft_ranks(x, tau):
    """Row r: softmax over i of -(x_(r) - x_i)^2 / tau."""
    exponent = -((np.sort(x)[:, None] - x[None, :]) ** 2) / tau
    e = np.exp(exponent - exponent.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def top_ranks(x, tau):
    """Row r: one at the largest entry of the relaxation, the first of equals."""
    return np.eye(len(x))[np.argmax(soft_ranks(x, tau), axis=1)]


def exact_ranks(x, tau):
    """Row r: one at the entry of rank r."""
    return np.eye(len(x))[np.argsort(x, kind="stable")]


RANKS = {"soft": soft_ranks, "hard_released": top_ranks, "hard": exact_ranks}


def monotone_coupling(n, m):
    """Rank r covers the quantiles [r/n, (r+1)/n]; entry (r, s): its share in [s/m, (s+1)/m]."""
    t = np.zeros((n, m))
    for r in range(n):
        for s in range(m):
            t[r, s] = n * max(0.0, min((r + 1) / n, (s + 1) / m) - max(r / n, s / m))
    return t


def plan(q, k, *, mode="soft", tau=1e-3, big_t=0.1, directions=None, scale=None):
    """The expected sliced plan of one head, q (N, d) and k (M, d)."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    x, y = scale * q, scale * k
    directions = np.eye(q.shape[1]) if directions is None else np.asarray(directions, np.float64)
    distance = np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))
    plans, costs = [], []
    for theta in directions / np.linalg.norm(directions, axis=1, keepdims=True):
        rows, columns = RANKS[mode](x @ theta, tau), RANKS[mode](y @ theta, tau)
        plans.append(rows.T @ monotone_coupling(len(x), len(y)) @ columns)
        costs.append((distance * plans[-1]).sum())
    weights = np.exp(-big_t * (np.array(costs) - min(costs)))
    return np.einsum("l,lnm->nm", weights / weights.sum(), np.array(plans))


def layer(q, k, v, *, query_valid=None, key_valid=None, **settings):
    """(out, weights) of a whole batch; tokens that are not valid are left out altogether."""
    q, k, v = (problems.heads_first(x) for x in (q, k, v))
    weights = np.zeros((*q.shape[:-1], k.shape[-2]))
    for b, h in np.ndindex(q.shape[:2]):
        rows = np.ones(q.shape[-2], bool) if query_valid is None else query_valid[b]
        columns = np.ones(k.shape[-2], bool) if key_valid is None else key_valid[b]
        if rows.any() and columns.any():
            sub = plan(q[b, h][rows], k[b, h][columns], **settings)
            weights[b, h][np.ix_(rows, columns)] = sub
    return np.swapaxes(weights @ np.nan_to_num(v), 1, 2), weights


def inputs(rng, length=7, *, keys=None, dim=4, dtype="float32", size=1.0, **settings):
    keys = length if keys is None else keys
    return problems.attention_inputs(
        rng, queries=length, keys=keys, dim=dim, dtype=dtype, size=size, **settings
    )


def lengths_to_valid(lengths, size):
    return np.arange(size) < np.asarray(lengths)[:, None]


# ----------------------------------------------------------------------------- the plans


@pytest.mark.parametrize("implementation", ["streaming", "dense"])
@pytest.mark.parametrize("bank", ["axes", "gaussian"])
@pytest.mark.parametrize(("tau", "big_t"), [(0.1, 0.1), (1e-3, 10.0)])
def test_soft_plan_follows_the_reference(rng, dtype, tau, big_t, bank, implementation):
    directions = None if bank == "axes" else problems.normal(rng, 5, 8, dtype=dtype)
    for length in (16, 64):
        q, k, v = inputs(rng, length, dim=8, dtype=dtype, batch=1)
        out, weights = attention(
            q,
            k,
            v,
            directions=directions,
            temperature=tau,
            inverse_temperature=big_t,
            implementation=implementation,
            return_weights=True,
        )
        chex.assert_type([out, weights], dtype)
        settings = {"tau": tau, "big_t": big_t, "directions": directions}
        expected_out, expected = layer(q, k, v, **settings)
        tolerance = {"float32": 1e-5, "float64": 1e-10}[dtype.name]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(out, expected_out, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("mode", ["hard_released", "hard"])
def test_hard_plans_follow_the_reference(rng, dtype, mode):
    for length in (7, 64):
        q, k, v = inputs(rng, length, dim=8, dtype=dtype)
        out, weights = attention(q, k, v, mode=mode, return_weights=True)
        expected_out, expected = layer(q, k, v, mode=mode)
        tolerance = {"float32": 1e-5, "float64": 1e-10}[dtype.name]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(out, expected_out, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("mode", ["soft", "hard_released"])
@pytest.mark.parametrize(("n", "m"), [(7, 5), (5, 7), (6, 3), (1, 4), (4, 1)])
def test_lengths_that_differ_are_joined_by_the_monotone_coupling(rng, x64, n, m, mode):
    q, k, v = inputs(rng, n, keys=m, dtype="float64")
    out, weights = attention(q, k, v, mode=mode, temperature=0.01, return_weights=True)
    expected_out, expected = layer(q, k, v, mode=mode, tau=0.01)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=1e-10)
    np.testing.assert_allclose(np.asarray(weights).sum((-2, -1)), n, atol=1e-10)
    if mode == "hard_released":
        np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, atol=1e-10)
        np.testing.assert_allclose(np.asarray(weights).sum(-2), n / m, atol=1e-10)


def test_scale_and_direction_lengths_follow_the_reference(rng, x64):
    q, k, v = inputs(rng, dtype="float64")
    directions = problems.normal(rng, 3, 4, dtype="float64", size=20.0)
    _, weights = attention(q, k, v, directions=directions, scale=0.3, return_weights=True)
    _, expected = layer(q, k, v, directions=directions, scale=0.3)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)


def test_exact_matchings_are_doubly_stochastic(rng):
    q, k, v = inputs(rng, 200, dim=64, batch=1)
    weights = attention(q, k, v, mode="hard", inverse_temperature=0.01, return_weights=True)[1]
    np.testing.assert_allclose(np.asarray(weights, np.float64).sum(-1), 1, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(weights, np.float64).sum(-2), 1, rtol=0, atol=1e-6)


def test_equal_values_are_matched_in_token_order_by_the_exact_mode_only(rng):
    q, k, v = inputs(rng, 8, dim=3)
    q, k = np.round(q), np.round(k)
    assert len(np.unique(np.asarray(q)[0, :, 0, 0])) < 8
    for mode in ("hard", "hard_released"):
        _, weights = attention(q, k, v, mode=mode, return_weights=True)
        np.testing.assert_allclose(weights, layer(q, k, v, mode=mode)[1], rtol=0, atol=1e-6)
        sums = np.asarray(weights).sum(-1)
        assert (np.abs(sums - 1).max() < 1e-6) == (mode == "hard")


def test_a_falling_temperature_leads_from_the_mean_to_the_matching(rng, x64):
    q, k, v = inputs(rng, dtype="float64")
    ends = [attention(q, k, v, temperature=tau, return_weights=True)[1] for tau in (1e9, 1e-12)]
    np.testing.assert_allclose(ends[0], 1 / 7, atol=1e-6)
    hard = attention(q, k, v, mode="hard", return_weights=True)[1]
    np.testing.assert_allclose(ends[1], hard, atol=1e-6)


def test_a_large_inverse_temperature_picks_the_cheapest_slice_and_zero_the_mean(rng, x64):
    q, k, v = inputs(rng, dtype="float64")
    for big_t in (0.0, 1e4):
        weights = attention(q, k, v, inverse_temperature=big_t, return_weights=True)[1]
        _, expected = layer(q, k, v, big_t=big_t)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_a_common_shift_of_queries_and_keys_changes_nothing(rng, mode):
    q, k, v = inputs(rng, 16)
    q, k = (np.round(np.asarray(x) * 64) / 64 for x in (q, k))
    for directions in (None, problems.normal(rng, 6, 4)):
        function = functools.partial(attention, mode=mode, directions=directions)
        moved = function(q + 1024, k + 1024, v)
        chex.assert_trees_all_close(moved, function(q, k, v), atol=2e-3)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_may_come_in_any_order(rng, mode):
    q, k, v = map(np.asarray, inputs(rng))
    rows, columns = rng.permutation(7), rng.permutation(7)
    moved = attention(q[:, rows], k[:, columns], v[:, columns], mode=mode)
    whole = np.asarray(attention(q, k, v, mode=mode))
    chex.assert_trees_all_close(moved, whole[:, rows], atol=1e-5)


@hypothesis.given(n=st.integers(0, 9), m=st.integers(0, 9))
def test_the_rank_coupling_is_the_monotone_plan(n, m):
    counts = (jnp.asarray([x], jnp.int32) for x in (n, m))
    t = np.asarray(softsort.rank_coupling(*counts, (9, 9), jnp.float32))[0]
    expected = np.zeros((9, 9))
    expected[:n, :m] = monotone_coupling(n, m) if n and m else 0
    np.testing.assert_allclose(t, expected, atol=1e-6)


# --------------------------------------------------------------------------------- masks


def spellings(valid):
    """A padding mask of self-attention as different users write it: (mask, bias)."""
    size = valid.shape[-1]
    key_only = valid[:, None, None, :]
    both = valid[:, None, :, None] & key_only
    additive = lambda mask, fill: np.where(mask, np.float32(0), np.float32(fill))
    return {
        "key only": (problems.array(key_only), None),
        "numpy": (key_only, None),
        "int": (problems.array(key_only, jnp.int32), None),
        "float": (problems.array(key_only, jnp.float32), None),
        "per head": (np.broadcast_to(key_only, (*valid.shape[:1], 3, 1, size)), None),
        "tokens": (problems.array(both), None),
        "flax": (nn.make_attention_mask(valid, valid), None),
        "bias": (None, additive(key_only, -1e9)),
        "-inf": (None, additive(both, -np.inf)),
        "mask and bias": (problems.array(valid[:, None, :, None]), additive(key_only, -1e9)),
    }


@pytest.mark.parametrize("mode", MODES)
def test_padding_in_every_spelling_is_as_if_the_tokens_were_not_there(rng, mode):
    q, k, v = inputs(rng)
    valid = lengths_to_valid([7, 4], 7)
    expected_out, expected = layer(q, k, v, mode=mode, query_valid=valid, key_valid=valid)
    function = functools.partial(esp_attention, mode=mode, return_weights=True)
    traced, raw = (jax.jit(function),), (jax.jit(function), function)
    for name, (mask, bias) in spellings(valid).items():
        for call in raw if name in ("key only", "mask and bias") else traced:
            out, weights = call(q, k, v, bias, mask)
            np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5, err_msg=name)
            np.testing.assert_allclose(out, expected_out, rtol=0, atol=1e-4, err_msg=name)
            assert (np.asarray(weights)[expected == 0].max(initial=0)) < 1e-6
            assert (np.asarray(weights)[1, :, 4:] == 0).all()
            assert (np.asarray(weights)[1, :, :, 4:] == 0).all()
    if mode == "hard":
        tokens = np.broadcast_to(valid[:, None], (2, 3, 7))
        np.testing.assert_allclose(np.asarray(weights).sum(-1), tokens, rtol=0, atol=1e-6)
        np.testing.assert_allclose(np.asarray(weights).sum(-2), tokens, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_padding_works_with_any_directions(rng, x64, mode):
    q, k, v = inputs(rng, dtype="float64")
    valid = lengths_to_valid([6, 3], 7)
    directions = problems.normal(rng, 5, 4, dtype="float64")
    mask = problems.array(valid[:, None, None])
    _, weights = attention(
        q, k, v, mask=mask, mode=mode, directions=directions, return_weights=True
    )
    settings = {"mode": mode, "directions": directions, "query_valid": valid, "key_valid": valid}
    np.testing.assert_allclose(weights, layer(q, k, v, **settings)[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["soft", "hard_released"])
def test_cross_attention_keeps_every_query_and_joins_quantiles(rng, x64, mode):
    key_valid = lengths_to_valid([5, 3], 5)
    for length in (7, 5):  # five queries to five keys is cross-attention only when we say so
        q, k, v = inputs(rng, length, keys=5, dtype="float64")
        _, weights = attention(
            q,
            k,
            v,
            mask=problems.array(key_valid[:, None, None]),
            mode=mode,
            padding="none",
            temperature=0.01,
            return_weights=True,
        )
        settings = {"mode": mode, "tau": 0.01, "key_valid": key_valid}
        np.testing.assert_allclose(weights, layer(q, k, v, **settings)[1], rtol=0, atol=1e-10)


def test_exact_matching_needs_equal_counts_not_equal_lengths(rng):
    q, k, v = inputs(rng, 7, keys=5)
    query_valid, key_valid = lengths_to_valid([5, 3], 7), lengths_to_valid([5, 3], 5)
    mask = query_valid[:, None, :, None] & key_valid[:, None, None, :]
    # A mask that is not an argument keeps its values under jit.
    function = functools.partial(esp_attention, mask=mask, mode="hard", return_weights=True)
    _, weights = jax.jit(function)(q, k, v)
    settings = {"mode": "hard", "query_valid": query_valid, "key_valid": key_valid}
    np.testing.assert_allclose(weights, layer(q, k, v, **settings)[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_of_single_pairs_is_refused_with_the_reason(rng, mode):
    q, k, v = inputs(rng)
    for mask in (np.tril(np.ones((7, 7), bool)), rng.random((7, 7)) < 0.5):
        for call in (
            esp_attention,
            jax.jit(functools.partial(esp_attention, mask=mask[None, None])),
        ):
            keywords = {"mask": mask[None, None]} if call is esp_attention else {}
            with pytest.raises(ValueError, match=r"mask.*single pairs"):
                call(q, k, v, **keywords)


@pytest.mark.parametrize("mode", MODES)
def test_a_traced_mask_of_single_pairs_stays_finite_and_is_zero_where_masked(rng, mode):
    q, k, v = inputs(rng)
    mask = np.tril(np.ones((7, 7), bool))[None, None]
    _, weights = attention(q, k, v, mask=problems.array(mask), mode=mode, return_weights=True)
    whole = attention(q, k, v, mode=mode, return_weights=True)[1]
    chex.assert_trees_all_close(weights, np.where(mask, whole, 0), atol=1e-6)


def test_a_bias_that_does_more_than_mask_is_refused(rng):
    q, k, v = inputs(rng)
    with pytest.raises(ValueError, match=r"bias of shape \(1, 3, 7, 7\)"):
        esp_attention(q, k, v, problems.normal(rng, 1, 3, 7, 7))
    traced = attention(q, k, v, problems.normal(rng, 1, 3, 7, 7))
    chex.assert_trees_all_close(traced, attention(q, k, v), atol=1e-6)


# ----------------------------------------------------------------- transforms and gradients


@pytest.mark.parametrize("implementation", ["streaming", "dense"])
@pytest.mark.parametrize("case", ["square", "cross", "masked", "directions"])
def test_gradients_match_finite_differences(rng, x64, case, implementation):
    q, k, v = inputs(rng, keys=5 if case == "cross" else 7, dtype="float64")
    mask = problems.array(lengths_to_valid([7, 4], 7)[:, None, None]) if case == "masked" else None
    bank = problems.normal(rng, 5, 4, dtype="float64") if case == "directions" else None
    mixing = problems.normal(rng, 2, 7, 3, 4, dtype="float64")

    @jax.jit
    def loss(q, k, v, tau, big_t, bank):
        out = esp_attention(
            q,
            k,
            v,
            mask=mask,
            directions=bank,
            temperature=tau,
            inverse_temperature=big_t,
            implementation=implementation,
        )
        return jnp.sum(mixing * out)

    settings = (jnp.asarray(0.05), jnp.asarray(2.0))
    if bank is None:
        exact, measured = problems.slope(
            lambda *args: loss(*args, None), (q, k, v, *settings), rng, step=1e-6
        )
    else:
        exact, measured = problems.slope(loss, (q, k, v, *settings, bank), rng, step=1e-6)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


def test_exact_matchings_pass_gradients_to_values_and_costs(rng, x64):
    q, k, v = inputs(rng, dtype="float64")
    mixing = problems.normal(rng, 2, 7, 3, 4, dtype="float64")
    loss = lambda q, k, v, big_t: jnp.sum(
        mixing * attention(q, k, v, mode="hard", inverse_temperature=big_t)
    )
    exact, measured = problems.slope(loss, (q, k, v, jnp.asarray(2.0)), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


def test_streaming_and_dense_agree_in_value_and_gradient(rng):
    q, k, v = inputs(rng, 32, dim=16)
    for mode in ("soft", "hard_released"):
        both = []
        for implementation in ("streaming", "dense"):
            loss = lambda q, k, v, settings=(mode, implementation): jnp.sum(
                jnp.sin(attention(q, k, v, mode=settings[0], implementation=settings[1]))
            )
            both.append(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v))
        chex.assert_trees_all_close(*both, atol=2e-4, rtol=2e-4)


def test_the_released_flag_has_the_gradient_of_the_relaxation_of_its_ranks(rng, x64):
    x = problems.normal(rng, 6, dtype="float64")
    mixing = problems.normal(rng, 6, 6, dtype="float64")
    ranks = functools.partial(softsort.soft_permutation, valid=None, sharpness=jnp.asarray(3.0))

    @functools.partial(jax.jit, static_argnames="harden")
    @functools.partial(jax.grad, has_aux=True)
    def gradient(x, *, harden):
        found = ranks(x, harden=harden)
        return jnp.sum(mixing * found), found

    soft, _ = gradient(x, harden=False)
    hard, found = gradient(x, harden=True)
    chex.assert_trees_all_close(soft, hard)
    np.testing.assert_array_equal(found, top_ranks(x, 1 / 3))


@pytest.mark.parametrize("tau", [1e-3, 1e-12, 0.0])
def test_gradients_stay_finite_at_equal_tokens_and_tiny_temperatures(rng, tau):
    q, _, v = inputs(rng)
    q = np.asarray(q)
    q = np.concatenate([q[:, :3], q[:, :3], np.zeros_like(q[:, :1])], 1)
    loss = lambda q, k, v, tau: jnp.sum(jnp.sin(attention(q, k, v, temperature=tau)))
    evaluate = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    chex.assert_tree_all_finite(evaluate(q, q, v, np.float32(tau)))


def test_temperatures_may_be_traced_and_compile_once(rng):
    q, k, v = inputs(rng)
    chex.clear_trace_counter()
    function = jax.jit(
        chex.assert_max_traces(lambda *a: esp_attention(*a[:3], temperature=a[3]), 1)
    )
    for tau in (0.5, 0.1, 1e-3):
        chex.assert_trees_all_close(
            function(q, k, v, jnp.float32(tau)), attention(q, k, v, temperature=tau), atol=1e-6
        )
    every = jax.jit(jax.vmap(lambda tau: attention(q, k, v, temperature=tau)))
    many = np.asarray(every(np.float32([0.5, 1e-3])))
    chex.assert_trees_all_close(many[1], attention(q, k, v, temperature=1e-3), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_runs_sharded_over_examples_with_keys_that_are_not(rng, mode):
    q, k, v = inputs(rng)
    loss = lambda q, k, v: jnp.sum(jnp.sin(esp_attention(q, k, v, mode=mode)))
    gradient = jax.grad(loss, (0, 2))
    mesh = jax.make_mesh((2,), ("examples",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("examples"), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        gradient, mesh=mesh, in_specs=(split, whole, split), out_specs=(split, split)
    )
    k = np.asarray(k)[:1]
    grads = jax.block_until_ready(jax.jit(sharded)(q, k, v))
    expected = jax.jit(gradient)(q, np.repeat(k, 2, 0), v)
    chex.assert_trees_all_close(grads, expected, atol=1e-4)


def test_forward_mode_is_had_from_the_dense_form(rng):
    q, k, v = inputs(rng)
    function = lambda q: esp_attention(q, k, v, implementation="dense")
    _, tangent = jax.jit(lambda q: jax.jvp(function, (q,), (jnp.ones_like(q),)))(q)
    chex.assert_tree_all_finite(tangent)


def test_memory_does_not_grow_with_the_number_of_slices(rng):
    def temporary(num_slices, implementation):
        bank = problems.normal(rng, num_slices, 4)
        function = lambda q, k, v: jnp.sum(
            jnp.sin(esp_attention(q, k, v, directions=bank, implementation=implementation))
        )
        q, k, v = inputs(rng, 96, batch=1)
        compiled = jax.jit(jax.grad(function, (0, 1, 2))).lower(q, k, v).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * 3 * 96**2)

    few, many = temporary(4, "streaming"), temporary(64, "streaming")
    assert many < few + 5
    assert temporary(64, "dense") > 64


# ---------------------------------------------------------------------- inside Flax models


def sequences(rng):
    """Two token sequences of lengths 6 and 4, and their mask as Flax makes it."""
    valid = problems.array(lengths_to_valid([6, 4], 6), jnp.float32)
    return problems.normal(rng, 2, 6, 12), nn.make_attention_mask(valid, valid)


def test_linen_models_anneal_inside_a_jitted_step(rng):
    x, mask = sequences(rng)
    variables = jax.jit(nn.MultiHeadDotProductAttention(num_heads=3).init)(jax.random.key(0), x)
    schedule = esp_temperature_schedule("annealed", init_value=0.1, num_steps=10)

    @jax.jit
    def run(variables, tau):
        operator = aj.linen.EspAttention(temperature=tau)
        model = nn.MultiHeadDotProductAttention(num_heads=3, attention_fn=operator)
        return model.apply(variables, x, mask=mask)

    for step in (0, 10):
        fixed = aj.linen.EspAttention(temperature=float(schedule(step)))
        model = nn.MultiHeadDotProductAttention(num_heads=3, attention_fn=fixed)
        expected = jax.jit(model.apply)(variables, x, mask=mask)
        chex.assert_trees_all_close(run(variables, schedule(step)), expected, atol=1e-5)


def test_nnx_models_anneal_without_compiling_anew(rng):
    x, _ = sequences(rng)
    operator = aj.nnx.EspAttention(directions=problems.normal(rng, 5, 4))
    model = nnx.MultiHeadAttention(3, 12, decode=False, attention_fn=operator, rngs=nnx.Rngs(0))
    traces = []

    @nnx.jit
    def run(model, tau):
        traces.append(None)
        aj.nnx.set_esp_temperature(model, tau)
        return model(x)

    outs = [run(model, jnp.float32(tau)) for tau in (0.1, 1e-3)]
    assert len(traces) == 1
    assert float(operator.temperature.get_value()) == np.float32(1e-3)
    chex.assert_trees_all_close(model(x), outs[1], atol=1e-5)
    assert np.abs(np.asarray(outs[0] - outs[1])).max() > 1e-4


def test_call_time_temperatures_override_those_of_a_linen_module(rng):
    q, k, v = inputs(rng)
    module = aj.linen.EspAttention(temperature=0.1, inverse_temperature=1.0)
    out = module.apply({}, q, k, v, temperature=1e-3, inverse_temperature=0.1)
    chex.assert_trees_all_close(out, attention(q, k, v), atol=1e-6)


# ------------------------------------------------------------------------------ schedules


def test_schedules_of_the_temperature():
    for name in ("constant", "init"):
        schedule = esp_temperature_schedule(name, init_value=0.02)
        assert [float(schedule(step)) for step in (0, 500)] == [0.02, 0.02]
    for name in ("annealed", "sharp"):
        schedule = esp_temperature_schedule(name, init_value=1e-2, end_value=1e-4, num_steps=10)
        values = [float(schedule(step)) for step in (0, 5, 10, 100)]
        np.testing.assert_allclose(values, [1e-2, 1e-3, 1e-4, 1e-4], rtol=1e-5)


def test_a_schedule_drives_training(rng):
    q, k, v = inputs(rng)
    schedule = esp_temperature_schedule("sharp", init_value=0.1, end_value=1e-3, num_steps=4)
    loss = lambda v, tau: jnp.mean(jnp.square(esp_attention(q, k, v, temperature=tau) - 1))
    step = jax.jit(lambda v, count: v - 20 * jax.grad(loss)(v, schedule(count)))
    trained = v
    for count in range(6):
        trained = step(trained, count)
    before, after = (float(loss(x, 1e-3)) for x in (v, trained))
    assert after < 0.9 * before


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("setting", "value", "error", "match"),
    [
        ("mode", "top1", ValueError, "top1.*soft.*hard_released.*hard"),
        ("padding", "both", ValueError, "both.*self.*none"),
        ("implementation", "quick", ValueError, "quick.*auto.*streaming.*dense"),
        ("temperature", 0.0, ValueError, "temperature"),
        ("temperature", -1.0, ValueError, "temperature"),
        ("temperature", math.nan, ValueError, "temperature"),
        ("temperature", np.ones(3, np.float32), TypeError, "temperature"),
        ("temperature", "cold", TypeError, "temperature"),
        ("inverse_temperature", -0.1, ValueError, "inverse_temperature"),
        ("inverse_temperature", math.inf, ValueError, "inverse_temperature"),
        ("scale", 0.0, ValueError, "scale"),
        ("directions", jnp.ones((3, 5)), ValueError, r"directions.*\(3, 5\).*\(L, 4\)"),
        ("directions", jnp.ones((4,)), ValueError, r"directions.*\(4,\)"),
        ("directions", jnp.ones((0, 4)), ValueError, r"directions.*\(0, 4\)"),
        ("directions", jnp.zeros((2, 4)), ValueError, "directions"),
        ("directions", jnp.ones((2, 4), jnp.int32), TypeError, "directions.*int32"),
        ("is_causal", True, ValueError, "is_causal"),
        ("mask", jnp.ones((2, 7), bool), ValueError, r"mask.*\(2, 7\).*\(2, 3, 7, 7\)"),
        ("mask", jnp.full((2, 1, 1, 7), 0.5), ValueError, "mask.*bias"),
        ("temperatur", 1.0, TypeError, "temperatur"),
    ],
)
def test_settings_that_do_not_fit_are_refused(rng, setting, value, error, match):
    q, k, v = inputs(rng)
    with pytest.raises(error, match=match):
        esp_attention(q, k, v, **{setting: value})


def test_exact_matching_of_different_numbers_is_refused_with_the_reason(rng):
    q, k, v = inputs(rng, 7, keys=5)
    with pytest.raises(ValueError, match=r"one to one.*7 active queries and 5 active keys"):
        esp_attention(q, k, v, mode="hard")
    with pytest.raises(ValueError, match="one to one"):
        attention(q, k, v, mode="hard")
    q, k, v = inputs(rng)
    mask = problems.array(lengths_to_valid([7, 4], 7)[:, None, None])
    with pytest.raises(ValueError, match="7 active queries and 4 active keys"):
        esp_attention(q, k, v, mask=mask, mode="hard", padding="none")


def test_traced_counts_that_differ_leave_ranks_without_a_partner(rng):
    q, k, v = inputs(rng, 7, keys=5)
    mask = jnp.ones((2, 1, 1, 5), bool)
    weights = attention(q, k, v, mask=mask, mode="hard", return_weights=True)[1]
    chex.assert_tree_all_finite(weights)
    np.testing.assert_allclose(np.asarray(weights).sum(-2), 1, atol=1e-6)
    assert np.asarray(weights).sum(-1).max() < 1 + 1e-6


def test_a_traced_temperature_with_axes_is_refused(rng):
    q, k, v = inputs(rng)
    with pytest.raises(ValueError, match=r"temperature must be a scalar.*\(3,\)"):
        attention(q, k, v, temperature=jnp.ones(3))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"name": "cosine"}, ValueError, "cosine.*constant.*init.*annealed.*sharp"),
        ({"name": "constant", "init_value": 0.0}, ValueError, "init_value"),
        ({"name": "annealed"}, TypeError, "num_steps"),
        ({"name": "annealed", "num_steps": 0}, ValueError, "num_steps"),
        ({"name": "sharp", "num_steps": 5, "end_value": 1.0}, ValueError, "end_value"),
    ],
)
def test_schedules_that_cannot_be_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        esp_temperature_schedule(**arguments)


def test_the_cost_of_a_plan_is_its_transport_cost(rng):
    distance, gamma = problems.normal(rng, 2, 4, 5), problems.normal(rng, 2, 4, 5)
    expected = (np.asarray(distance) * np.asarray(gamma)).sum((1, 2))
    np.testing.assert_allclose(expected_plans.plan_cost(distance, gamma), expected, rtol=1e-5)
