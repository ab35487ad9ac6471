"""The conventions the paper leaves open, one test each.

Small problems with answers one can follow by hand or by the float64 reference; the test files of
the single parts go further.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj

BANK = aj.slice_directions(0, 4, 4)


def jit(function, *static):
    """The function, compiled, with its results in NumPy."""
    return problems.numpy_results(jax.jit(function, static_argnames=static))


scores = jit(aj.scores, "scale")
duals_of = jit(aj.sinkhorn_duals, "before_end")
weights_of = jit(aj.attention_weights, "epsilon")
sinkhorn = jit(aj.sinkhorn_attention, "return_weights")
compiled = jit(aj.asap_attention, "return_weights", "closures")
potentials = jit(aj.sliced_potentials, "scale", "outside")
predict = jit(aj.predict)
fit_ls = jit(aj.fit_ls)


def teacher(s, mask=None, **settings):
    """The teacher's weights for given scores."""
    spec = aj.SinkhornSpec(**settings)
    duals = duals_of(s, spec=spec, mask=mask)
    return weights_of(s, duals.query, duals.key, epsilon=spec.epsilon, mask=mask)


@lambda function: jit(function, "side", "closures")
def close(s, dual, side, closures):
    """Weights after some closures from a dual in score coordinates (square, no mask)."""
    duals = {"query": jnp.zeros_like(s[..., 0]), "key": jnp.zeros_like(s[..., 0, :]), side: dual}
    for _ in range(closures):
        if side == "query":
            side, duals["key"] = "key", aj.key_ctransform(s, duals["query"])
        else:
            side, duals["query"] = "query", aj.query_ctransform(s, duals["key"])
    return aj.attention_weights(s, duals["query"], duals["key"])


def test_convention_layout(rng):
    q, k, _ = problems.attention_inputs(rng)
    v = problems.normal(rng, 2, 5, 3, 2)
    out, weights = sinkhorn(q, k, v, spec=aj.SinkhornSpec(num_steps=4), return_weights=True)
    chex.assert_shape(out, (2, 7, 3, 2))  # batch, queries, heads, value width
    chex.assert_shape(weights, (2, 3, 7, 5))  # batch, heads, queries, keys
    mixed = np.einsum("bhnm,bmhd->bnhd", weights, v)
    chex.assert_trees_all_close(out, mixed, atol=1e-5)


def test_convention_scores(rng):
    q, k = problems.per_head(rng)
    s = scores(q, k)
    chex.assert_trees_all_close(s, np.einsum("bhnd,bhmd->bhnm", q, k) / 2.0, atol=1e-6)
    chex.assert_trees_all_close(scores(q, k, scale=3.0), 6.0 * s, rtol=1e-5, atol=1e-5)
    # The kernel is exp(s / epsilon).
    chex.assert_trees_all_close(
        teacher(s, num_steps=3, epsilon=0.25), teacher(4.0 * s, num_steps=3), atol=1e-5
    )
    # A bias of -1e8 or less masks; a milder one does not.
    bias = np.zeros((1, 1, 1, 5), np.float32)
    bias[..., 3], bias[..., 4] = -1e8, -20.0
    layer_q, layer_k = np.swapaxes(q, 1, 2), np.swapaxes(k, 1, 2)
    _, weights = sinkhorn(
        layer_q,
        layer_k,
        layer_k,
        problems.array(bias),
        spec=aj.SinkhornSpec(num_steps=4),
        return_weights=True,
    )
    assert (np.asarray(weights)[..., 3] == 0).all()
    np.testing.assert_allclose(weights[..., 4].sum(-1), 7 / 4, rtol=1e-5)


def test_convention_steps(rng):
    s = problems.uniform_scores(rng, 2, 3, 6, 6, bound=3.0)
    rows = np.asarray(jax.nn.softmax(s, -1))
    columns = rows / rows.sum(-2, keepdims=True)
    chex.assert_trees_all_close(teacher(s, num_steps=1), rows, atol=1e-6)
    chex.assert_trees_all_close(teacher(s, num_steps=2), columns, atol=1e-6)
    chex.assert_trees_all_close(
        teacher(s, num_steps=3), columns / columns.sum(-1, keepdims=True), atol=1e-6
    )
    assert [aj.SinkhornSpec(num_steps=n).last_step for n in (1, 2, 3, 10)] == [
        "row",
        "column",
        "row",
        "column",
    ]
    # No early stop: one more step on a nearly balanced plan still moves the other side exactly.
    np.testing.assert_allclose(teacher(s, num_steps=100).sum(-2), 1.0, atol=2e-6)
    np.testing.assert_allclose(teacher(s, num_steps=101).sum(-1), 1.0, atol=2e-6)


def test_convention_units(rng):
    s = problems.uniform_scores(rng, 2, 3, 7, 5, bound=3.0)
    duals = duals_of(s, spec=aj.SinkhornSpec(num_steps=5, epsilon=0.5))
    by_hand = np.exp((s + duals.query[..., None] + duals.key[..., None, :]) / 0.5)
    chex.assert_trees_all_close(
        weights_of(s, duals.query, duals.key, epsilon=0.5), by_hand, rtol=1e-5
    )
    np.testing.assert_allclose(by_hand.sum(-1), 1.0, rtol=1e-5)  # rows of A sum to one
    # Potentials are epsilon times log scalings.
    scaled = duals_of(s / 0.5, spec=aj.SinkhornSpec(num_steps=5))
    chex.assert_trees_all_close(duals.query, 0.5 * scaled.query, atol=1e-5)
    chex.assert_trees_all_close(duals.key, 0.5 * scaled.key, atol=1e-5)


def test_convention_key_target(rng):
    s = problems.uniform_scores(rng, 2, 1, 6, 6, bound=3.0)
    mask = np.ones((2, 1, 6, 6), bool)
    mask[0, ..., 4:] = False  # six queries, four keys
    mask[1, 0, 4:, :] = False  # four queries, six keys
    active = mask.any(-2)
    balanced = teacher(s, problems.array(mask), num_steps=4).sum(-2)
    unit = teacher(s, problems.array(mask), num_steps=4, key_mass="unit").sum(-2)
    target = np.array([6 / 4, 4 / 6], np.float32)[:, None, None]
    chex.assert_trees_all_close(balanced, np.where(active, target, 0.0), atol=1e-5)
    chex.assert_trees_all_close(unit, np.where(active, 1.0, 0.0), atol=1e-5)
    assert aj.SinkhornSpec().key_mass == "balanced"
    chex.assert_trees_all_close(
        teacher(s, num_steps=4), teacher(s, num_steps=4, key_mass="unit"), atol=1e-6
    )
    # Both marginals can hold under the balanced target.
    both = teacher(s, problems.array(mask), num_steps=201)
    np.testing.assert_allclose(both.sum(-2), balanced, atol=1e-4)
    np.testing.assert_allclose(both.sum(-1), mask.any(-1), atol=1e-5)


@pytest.mark.parametrize("num_steps", [4, 5])
def test_convention_source_dual(rng, x64, num_steps):
    s = problems.uniform_scores(rng, 2, 3, 6, 6, dtype="float64", bound=5.0)
    source = duals_of(s, spec=aj.SinkhornSpec(num_steps=num_steps)).source
    step = num_steps - 1 if num_steps % 2 == 0 else num_steps - 2
    earlier = duals_of(s, spec=aj.SinkhornSpec(num_steps=step))
    chex.assert_trees_all_close(source, earlier.query, atol=1e-12)
    closures = 1 if num_steps % 2 == 0 else 2
    chex.assert_trees_all_close(
        close(s, source, "query", closures), teacher(s, num_steps=num_steps), atol=1e-12
    )
    assert duals_of(s, spec=aj.SinkhornSpec(num_steps=1)).source is None


@pytest.mark.parametrize("num_steps", [4, 5])
def test_convention_aligned_dual(rng, x64, num_steps):
    s = problems.uniform_scores(rng, 2, 3, 6, 6, dtype="float64", bound=5.0)
    spec = aj.SinkhornSpec(num_steps=num_steps)
    for before_end in range(1, num_steps):
        duals = duals_of(s, spec=spec, before_end=before_end)
        chex.assert_trees_all_close(
            close(s, duals.aligned, duals.aligned_side, before_end),
            teacher(s, num_steps=num_steps),
            atol=1e-12,
        )
    # Three closures from the source dual of a column-ending teacher are two steps too many.
    if num_steps == 4:
        chex.assert_trees_all_close(
            close(s, duals_of(s, spec=spec).source, "query", 3), teacher(s, num_steps=6), atol=1e-12
        )


def test_convention_coordinates(rng, x64):
    q, k, v = problems.attention_inputs(rng, dtype="float64", queries=6, keys=6, batch=1, heads=1)
    bias = problems.normal(rng, 1, 1, 6, 6, dtype="float64")
    s = reference.scores(problems.heads_first(q), problems.heads_first(k), bias=bias)
    shift = reference.query_shift(problems.heads_first(q))[0, 0]
    dual = reference.source_dual(s[0, 0], num_steps=4)
    predictor = aj.Predictor(
        directions=BANK, coefficients=jnp.zeros(4), token_bias=problems.array(dual + shift)
    )
    # What a predictor answers is a centred dual in cost coordinates ...
    answer = predict(predictor, np.swapaxes(q, 1, 2), np.swapaxes(k, 1, 2))
    np.testing.assert_allclose(answer[0, 0], reference.center(dual + shift), atol=1e-12)
    # ... and the layer takes the shift off again before it closes; the bias is not part of it.
    _, weights = compiled(
        q,
        k,
        v,
        bias,
        predictor=predictor,
        spec=aj.SinkhornSpec(num_steps=4),
        closures="one_sided",
        return_weights=True,
    )
    np.testing.assert_allclose(
        weights[0, 0], reference.sinkhorn(s[0, 0], num_steps=4), rtol=0, atol=1e-12
    )
    # Projections are multiplied by the square root of the scale, so that slices share its units.
    q, k = np.asarray(q), np.asarray(k)
    x = potentials(q[:, :, 0], k[:, :, 0], np.eye(4), scale=0.7)
    a, b = (np.sqrt(0.7) * t[0, :, 0, 2] for t in (q, k))
    np.testing.assert_allclose(x[0, :, 2], reference.square_potential(a, b), atol=1e-12)


@pytest.mark.parametrize(
    ("closures", "num_steps", "exact"),
    [
        ("one_sided", 4, "column"),
        ("one_sided", 5, "column"),
        ("two_sided", 4, "column"),
        ("two_sided", 5, "row"),
        (1, 4, "column"),
        (2, 5, "row"),
    ],
)
def test_convention_endings(rng, closures, num_steps, exact):
    q, k, v = problems.attention_inputs(rng, queries=6, keys=6)
    predictor = aj.Predictor(directions=BANK, coefficients=problems.normal(rng, 4))
    _, weights = compiled(
        q,
        k,
        v,
        predictor=predictor,
        closures=closures,
        return_weights=True,
        spec=aj.SinkhornSpec(num_steps=num_steps),
    )
    errors = {
        "row": float(aj.metrics.row_error(weights)),
        "column": float(aj.metrics.column_error(weights)),
    }
    assert errors.pop(exact) < 1e-5
    assert min(errors.values()) > 1e-3  # and the other side is not
    count = {"one_sided": 1, "two_sided": 3 if num_steps == 4 else 2}.get(closures, closures)
    _, expected = reference.compiled_layer(
        q, k, v, BANK, predictor.coefficients, num_steps=num_steps, closures=count
    )
    np.testing.assert_allclose(weights, expected, atol=1e-5)


def test_convention_masks(rng):
    q, k, v = problems.attention_inputs(rng, queries=6, keys=6)
    spec = aj.SinkhornSpec(num_steps=4)
    mask = problems.random_mask(rng, 2, 1, 6, 6)
    mask[0, 0, 2] = mask[0, 0, :, 4] = False
    mask[1] = False
    out, weights = sinkhorn(q, k, v, mask=problems.array(mask), spec=spec, return_weights=True)
    assert (np.asarray(weights)[~np.broadcast_to(mask, weights.shape)] == 0).all()
    # A query with no key and an example with no token give exactly zero.
    assert (np.asarray(out)[0, 2] == 0).all()
    assert (np.asarray(out)[1] == 0).all()
    # 0/1 in float32, as Flax passes it, is the same mask; other ranks are refused.
    floats = sinkhorn(q, k, v, mask=problems.array(mask, jnp.float32), spec=spec)
    chex.assert_trees_all_close(floats, out, atol=1e-6)
    with pytest.raises(ValueError, match=r"\(2, 6\).*\(2, 3, 6, 6\)"):
        aj.sinkhorn_attention(q, k, v, mask=jnp.ones((2, 6), bool), spec=spec)
    # What sits in a masked slot never reaches an active token.
    query, *dirty = (np.array(x) for x in (q, k, v))
    query[0, 2] = np.inf
    for x in dirty:
        x[0, 4] = np.nan
    same = sinkhorn(query, *dirty, mask=problems.array(mask, jnp.float32), spec=spec)
    chex.assert_trees_all_equal(same, floats)
    # Duals of inactive slots are 0.
    duals = duals_of(problems.uniform_scores(rng, 2, 3, 6, 6), spec=spec, mask=problems.array(mask))
    assert (duals.query[0, :, 2] == 0).all()
    assert (duals.key[0, :, 4] == 0).all()
    assert (duals.source[1] == 0).all()
    # A triangular array is honoured entry by entry; only is_causal is refused.
    triangle = np.tril(np.ones((1, 1, 6, 6), bool))
    _, weights = sinkhorn(q, k, v, mask=triangle, spec=spec, return_weights=True)
    assert (np.triu(np.asarray(weights), 1) == 0).all()
    np.testing.assert_allclose(weights.sum(-2), 1.0, atol=1e-5)


def test_convention_two_validities(rng):
    q, k, v = problems.attention_inputs(rng, queries=6, keys=6)
    valid = np.arange(6) < np.array([[6], [4]])
    key_only = valid[:, None, None, :]
    tokens = nn.make_attention_mask(*2 * [valid.astype(np.float32)])
    spec = aj.SinkhornSpec(num_steps=5)
    # A key-only mask keeps every query in the closures, a token mask drops padded queries too.
    _, kept = sinkhorn(q, k, v, mask=key_only, spec=spec, return_weights=True)
    _, dropped = sinkhorn(q, k, v, mask=tokens, spec=spec, return_weights=True)
    np.testing.assert_allclose(kept.sum(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(dropped.sum(-1)[1, 0], valid[1], atol=1e-5)
    assert np.abs(kept[1, :, :4] - dropped[1, :, :4]).max() > 1e-3
    # Features see a masked key as a padded token in self-attention, not in cross-attention.
    predictor = aj.Predictor(directions=BANK, coefficients=problems.normal(rng, 4))
    answers = {}
    for padding in ("self", "none"):
        spec = aj.SinkhornSpec(num_steps=4, padding=padding)
        _, answers[padding] = compiled(
            q,
            k,
            v,
            mask=key_only,
            predictor=predictor,
            spec=spec,
            closures="one_sided",
            return_weights=True,
        )
        _, expected = reference.compiled_layer(
            q,
            k,
            v,
            BANK,
            predictor.coefficients,
            mask=key_only,
            padding=padding,
            num_steps=4,
            closures="one_sided",
        )
        np.testing.assert_allclose(answers[padding], expected, atol=1e-5)
    chex.assert_trees_all_close(answers["self"][0], answers["none"][0], atol=1e-6)
    assert np.abs(answers["self"][1] - answers["none"][1]).max() > 1e-3
    # By value: however the key-only mask is spelled.
    _, spelled = compiled(
        q,
        k,
        v,
        mask=np.broadcast_to(key_only, (2, 3, 6, 6)),
        predictor=predictor,
        spec=aj.SinkhornSpec(num_steps=4),
        closures="one_sided",
        return_weights=True,
    )
    chex.assert_trees_all_close(spelled, answers["self"], atol=1e-6)


def test_convention_padded_queries_under_a_key_only_mask(rng):
    q, k = problems.per_head(rng, queries=6, keys=6)
    valid = problems.array(np.arange(6) < 4)
    settings = {"query_valid": valid, "key_valid": valid}
    extended = potentials(q, k, BANK, **settings)
    zero = potentials(q, k, BANK, outside="zero", **settings)
    loop = reference.batched(
        lambda q, k: reference.sliced_features(
            q, k, BANK, query_valid=np.asarray(valid), key_valid=np.asarray(valid)
        ),
        (q, 2),
        (k, 2),
    )
    np.testing.assert_allclose(extended, loop, atol=1e-5)  # the same function, off its support
    chex.assert_trees_all_close(zero[..., :4, :], extended[..., :4, :], atol=1e-6)
    assert (zero[..., 4:, :] == 0).all()
    # The layer extends: padded queries get the dual of the function at their own place.
    predictor = aj.Predictor(directions=BANK, coefficients=problems.normal(rng, 4))
    layer = [np.swapaxes(x, 1, 2) for x in (q, k, k)]
    key_only = np.asarray(valid)[None, None, None]
    _, weights = compiled(
        *layer,
        mask=problems.array(key_only),
        predictor=predictor,
        spec=aj.SinkhornSpec(num_steps=4),
        return_weights=True,
    )
    _, expected = reference.compiled_layer(
        *layer, BANK, predictor.coefficients, mask=key_only, num_steps=4, closures="two_sided"
    )
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    assert (weights[..., 4:, :4] > 0).all()


def test_convention_unequal_lengths():
    def potential(a, b, **settings):
        line = lambda x: np.array(x, np.float32)[:, None]
        one = np.ones((1, 1), np.float32)
        return potentials(line(a), line(b), one, scale=1.0, **settings)[:, 0]

    # Three queries at 0, 1, 2 and two keys: slope b_(1) after the first query, b_(2) after the
    # second, so phi = 0, 0, 10 and f = 0, 1/2, 2 - 10, less their mean.
    f = potential([0.0, 1.0, 2.0], [0.0, 10.0])
    np.testing.assert_allclose(f, np.array([0.0, 0.5, -8.0]) + 2.5, atol=1e-6)
    # Two queries, three keys: slope number ceil(3 / 2) = 2.
    f = potential([0.0, 2.0], [1.0, 5.0, 7.0])
    np.testing.assert_allclose(f, [4.0, -4.0], atol=1e-6)  # phi = 0, 10 and f = 0, 2 - 10
    # Left of the first valid query the slope is b_(1), right of the last b_(M).
    f = potential([0.0, 1.0, -2.0, 3.0], [1.0, 5.0], query_valid=np.array([1, 1, 0, 0]) > 0)
    phi = np.array([0.0, 1.0, -2.0, 1.0 + 5.0 * 2.0])
    values = np.array([0.0, 0.5, 2.0, 4.5]) - phi
    np.testing.assert_allclose(f, values - values[:2].mean(), atol=1e-6)


def test_convention_grouped_heads(rng):
    q, k, v = map(np.asarray, problems.attention_inputs(rng, heads=4))
    spec = aj.SinkhornSpec(num_steps=4)
    grouped = sinkhorn(q, k[:, :, :2], v[:, :, :2], spec=spec)
    full = sinkhorn(q, np.repeat(k[:, :, :2], 2, 2), np.repeat(v[:, :, :2], 2, 2), spec=spec)
    chex.assert_trees_all_close(grouped, full, atol=1e-6)
    with pytest.raises(ValueError, match="heads"):
        aj.sinkhorn_attention(q, k[:, :, :3], v[:, :, :3], spec=spec)


def test_convention_precision(rng, x64):
    for low in ("bfloat16", "float16", "float32"):
        q, k, v = problems.attention_inputs(rng, dtype=low)
        heads = [np.swapaxes(x, 1, 2) for x in (q, k)]
        chex.assert_type(scores(*heads), jnp.float32)
        x = potentials(*heads, BANK)
        chex.assert_type(x, jnp.float32)
        x = x.astype(jnp.dtype(low))
        chex.assert_type(fit_ls(x, x[..., 0]).coefficients, jnp.float32)
        chex.assert_type(sinkhorn(q, k, v, spec=aj.SinkhornSpec(num_steps=4)), jnp.dtype(low))
    q, k = problems.per_head(rng, dtype="float64")
    chex.assert_type([scores(q, k), potentials(q, k, BANK)], jnp.float64)
    # A common offset leaves float32 potentials where they are; ties have no order.
    q, k = (np.round(64 * np.asarray(x, np.float32)) / 64 for x in (q, k))
    far = np.float32(1e3)
    plain, moved = potentials(q, k, BANK), potentials(q + far, k + far, BANK)
    assert plain.dtype == moved.dtype == np.float32
    assert np.abs(moved - plain).max() < 1e-3 * np.abs(plain).max()
    twice = potentials(np.concatenate([q, q], -2), k, BANK)
    chex.assert_trees_all_close(twice[..., :7, :], twice[..., 7:, :], atol=1e-6)


def test_convention_dropout_and_causal(rng):
    q, k, v = problems.attention_inputs(rng, keys=7)
    predictor = aj.Predictor(directions=BANK, coefficients=jnp.ones(4))
    spec = aj.SinkhornSpec(num_steps=4)
    for call in (
        lambda **s: aj.sinkhorn_attention(q, k, v, spec=spec, **s),
        lambda **s: aj.asap_attention(q, k, v, spec=spec, predictor=predictor, **s),
    ):
        with pytest.raises(ValueError, match="identity"):
            call(is_causal=True)
        with pytest.raises(TypeError, match="unexpected keyword"):
            call(causal=True)
        with pytest.raises(ValueError, match="dropout_rng"):
            call(dropout_rate=0.1, deterministic=False)
    plain = sinkhorn(q, k, v, spec=spec)
    drop = jax.jit(aj.sinkhorn_attention, static_argnames=("dropout_rate", "deterministic"))
    off = drop(q, k, v, spec=spec, dropout_rate=0.9, deterministic=True)
    chex.assert_trees_all_close(off, plain, atol=1e-6)


def test_convention_least_squares(rng, x64):
    x, y = rng.normal(size=(2, 3, 7, 4)), rng.normal(size=(2, 3, 7))
    fit_ls = jit(aj.fit_ls, "ridge")
    # Examples, tokens and heads are pooled.
    rows = fit_ls(x.reshape(42, 4), y.reshape(42), ridge=0.1).coefficients
    chex.assert_trees_all_close(fit_ls(x, y, ridge=0.1).coefficients, rows, atol=1e-12)
    # The ridge is not normalised: data given twice need twice the ridge for the same answer.
    twice = fit_ls(np.concatenate([x, x]), np.concatenate([y, y]), ridge=0.2).coefficients
    chex.assert_trees_all_close(twice, rows, atol=1e-12)
    default = fit_ls(x, y).coefficients
    chex.assert_trees_all_close(default, fit_ls(x, y, ridge=1e-3).coefficients, atol=1e-14)
    # There is no intercept: a constant target is explained by centred features not at all.
    centred = x - x.mean((0, 1, 2), keepdims=True)
    constant = fit_ls(centred, np.full((2, 3, 7), 5.0)).coefficients
    chex.assert_trees_all_close(constant, np.zeros(4), atol=1e-12)


@pytest.mark.parametrize("key_mass", ["balanced", "unit"])
def test_convention_kl(rng, x64, key_mass):
    q, k = problems.per_head(rng, dtype="float64", queries=6, keys=6)
    mask = problems.random_mask(rng, 2, 1, 6, 6)
    mask[0, 0, 2] = mask[1, 0, :, 4] = False
    mask = np.broadcast_to(mask, (2, 3, 6, 6))
    s, shift = reference.scores(q, k), reference.query_shift(q)
    x = np.asarray(potentials(q, k, BANK))
    target = shift + reference.batched(
        lambda s, mask: reference.source_dual(
            s, num_steps=4, epsilon=0.5, key_mass=key_mass, mask=mask
        ),
        (s, 2),
        (mask, 2),
    )

    def objective(w):
        return (
            reference.batched(
                lambda *problem: reference.kl_objective(
                    w, *problem[:-1], epsilon=0.5, key_mass=key_mass, mask=problem[-1]
                ),
                (x, 2),
                (target, 1),
                (s, 2),
                (shift, 1),
                (mask, 2),
            ).sum()
            + 0.01 / 2 * w @ w
        )

    # J in plan units with half the ridge, summed over examples and heads, up to a constant.
    data = [problems.array(t) for t in (x, target, s, shift)]
    settings = {"epsilon": 0.5, "ridge": 0.01, "key_mass": key_mass, "mask": problems.array(mask)}
    points = rng.normal(size=(3, 4))
    ours = [float(aj.kl_objective(problems.array(w), *data, **settings)) for w in points]
    theirs = [objective(w) for w in points]
    np.testing.assert_allclose(np.diff(ours), np.diff(theirs), rtol=1e-9)
    # The fit is its stationary point, and not worse than least squares.
    fit = aj.fit_kl(*data, **settings)
    assert fit.converged, fit.reason
    assert fit.num_steps >= 1
    w = np.asarray(fit.coefficients)
    valid = problems.array(mask.any(-1))
    least_squares = np.asarray(aj.fit_ls(*data[:2], ridge=0.01, valid=valid).coefficients)
    assert objective(w) <= objective(least_squares)
    for direction in np.eye(4):
        slope = (objective(w + 1e-5 * direction) - objective(w - 1e-5 * direction)) / 2e-5
        assert abs(slope) < 1e-7


def test_convention_options(rng, x64):
    q, k, v = problems.attention_inputs(rng)
    plain = aj.SinkhornSpec(num_steps=4, epsilon=0.5, scale=0.25)
    expected = sinkhorn(q, k, v, spec=plain)
    chex.assert_type(expected, jnp.float32)
    for number in (np.float64, np.float32, np.asarray, jnp.asarray):
        spec = aj.SinkhornSpec(num_steps=4, epsilon=number(0.5), scale=number(0.25))
        assert spec == plain
        assert hash(spec) == hash(plain)
        assert type(spec.epsilon) is float
    x, y = problems.normal(rng, 7, 4), problems.normal(rng, 7)
    for ridge in (np.float64(0.5), np.asarray(0.5), jnp.asarray(0.5)):
        chex.assert_type(aj.fit_ls(x, y, ridge=ridge).coefficients, jnp.float32)


def test_convention_errors(rng):
    q, k, v = problems.attention_inputs(rng)
    spec = aj.SinkhornSpec(num_steps=4)
    # Shapes, dtypes and settings: at trace time, naming both shapes.
    with pytest.raises(ValueError, match=r"\(2, 7, 3, 4\).*\(2, 5, 3, 3\)"):
        jax.jit(aj.sinkhorn_attention)(q, k[..., :3], v, spec=spec)
    with pytest.raises(TypeError, match="int32"):
        jax.eval_shape(lambda q: aj.sinkhorn_attention(q, k, v, spec=spec), q.astype(jnp.int32))
    # Values: when they are known ...
    x, y = problems.normal(rng, 7, 4), problems.normal(rng, 7)
    with pytest.raises(ValueError, match="ridge"):
        aj.fit_ls(x, y, ridge=-1.0)
    with pytest.raises(ValueError, match="finite"):
        aj.fit_ls(x.at[0, 0].set(jnp.nan), y)
    # ... and under a trace the result stays finite and says so.
    fit = jax.jit(aj.fit_ls)(x.at[0, 0].set(jnp.nan), y)
    chex.assert_tree_all_finite(fit.coefficients)
    assert not bool(fit.ok)
