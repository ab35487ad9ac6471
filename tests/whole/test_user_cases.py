"""Faults that users of attention and transport software meet, each with the right answer.

`EVERY` names the Sinkhorn teacher and the compiled layer with either ending. Where the endings can
only differ in the number of closures, `BOTH` leaves the one-sided ending out to save time.
"""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
import reference
from jax.sharding import NamedSharding, PartitionSpec

import asap_jax as aj

BATCH, LENGTH, HEADS, DIM = 2, 16, 4, 32
BANK = aj.slice_directions(0, 8, DIM)
COEFFICIENTS = problems.normal(np.random.default_rng(7), 8, size=0.3)
EVERY = ["teacher", "one_sided", "two_sided"]
BOTH = ["teacher", "two_sided"]
ENDS_ON_COLUMNS, ENDS_ON_ROWS = aj.SinkhornSpec(num_steps=10), aj.SinkhornSpec(num_steps=11)

potentials = jax.jit(aj.sliced_potentials, static_argnames="scale")


def attend(name, *arguments, spec=ENDS_ON_COLUMNS, **settings):
    """Calls an operator on (query, key, value, bias, mask)."""
    if name == "teacher":
        return aj.sinkhorn_attention(*arguments, spec=spec, **settings)
    predictor = aj.Predictor(directions=BANK, coefficients=COEFFICIENTS)
    return aj.asap_attention(*arguments, spec=spec, predictor=predictor, closures=name, **settings)


STATIC = ("spec", "return_weights", "precision")
OPERATOR = {
    name: jax.jit(functools.partial(attend, name), static_argnames=STATIC) for name in EVERY
}


def run(name, *arguments, **settings):
    """An operator's results in NumPy, on which further arithmetic compiles nothing."""
    return jax.tree.map(np.asarray, OPERATOR[name](*arguments, **settings))


def inputs(
    rng, *, dtype="float32", batch=BATCH, queries=LENGTH, keys=LENGTH, heads=HEADS, size=1.0
):
    """Query, key and value of the usual size, as NumPy arrays."""
    arrays = problems.attention_inputs(
        rng, dtype=dtype, batch=batch, queries=queries, keys=keys, heads=heads, dim=DIM, size=size
    )
    return tuple(map(np.asarray, arrays))


def closed_side_error(name, weights, spec, target=1.0):
    """Largest error of the marginal that the operator's last step sets."""
    rows = spec.last_step == "row" and name != "one_sided"
    return float(np.abs(weights.sum(-1) - 1.0 if rows else weights.sum(-2) - target).max())


def calibration_rows(q, k, mask=None):
    """Features and centred duals of activations in the layout of attention functions."""
    q, k = jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2)
    valid = jnp.ones(q.shape[:-1], bool)
    if mask is not None:
        valid = jnp.broadcast_to(mask.any(-1), valid.shape)
    dual = aj.sinkhorn_duals(aj.scores(q, k), spec=ENDS_ON_COLUMNS, mask=mask).source
    target = jnp.where(valid, dual + aj.query_shift(q), jnp.zeros_like(dual))
    mean = target.sum(-1, keepdims=True) / valid.sum(-1, keepdims=True, dtype=target.dtype)
    x = aj.sliced_potentials(q, k, BANK, query_valid=valid, key_valid=valid)
    return x, target - mean, valid


rows_of = jax.jit(calibration_rows)


def fit(q, k, mask=None, *, ridge=1e-3):
    """Coefficients of the bank for some activations."""
    x, target, valid = rows_of(q, k, mask)
    return aj.fit_ls(x, target, ridge=ridge, valid=valid).coefficients


# ------------------------------------------------------- masks in every spelling and precision


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("low", "tolerance"), [("bfloat16", 2e-2)])
def test_masks_in_half_precision_are_exact_and_finite(rng, name, low, tolerance):
    q, k, v = inputs(rng, dtype=low)
    mask = problems.array(problems.key_padding([11, 11], LENGTH))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def evaluate(q, k, v):
        out, weights = attend(name, q, k, v, None, mask, return_weights=True)
        return jnp.sum(out.astype(jnp.float32) ** 2), (out, weights)

    grads, (out, weights) = jax.tree.map(np.asarray, evaluate(q, k, v))
    chex.assert_type([out, weights, *grads], jnp.dtype(low))
    chex.assert_tree_all_finite((grads, out, weights))
    full = run(name, *(x.astype(jnp.float32) for x in (q, k, v)), None, mask)
    np.testing.assert_allclose(out.astype(jnp.float32), full, rtol=0, atol=tolerance)
    assert (weights[..., 11:] == 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_a_large_negative_bias_is_the_same_as_a_mask(rng, name):
    q, k, v = inputs(rng)
    bias = np.zeros((1, 1, 1, LENGTH), np.float32)
    bias[..., 12:] = -np.inf
    expected = run(name, q, k, v, None, problems.array(bias == 0), return_weights=True)
    for fill in (-1e9, -1e30, np.finfo(np.float32).min, -np.inf):
        bias[..., 12:] = fill
        out = run(name, q, k, v, problems.array(bias), return_weights=True)
        chex.assert_trees_all_close(out, expected, atol=1e-6)
        assert (out[1][..., 12:] == 0).all()
        np.testing.assert_allclose(out[1][..., :12].sum(-2), LENGTH / 12, rtol=1e-5)


@pytest.mark.parametrize("name", BOTH)
def test_all_forms_of_a_key_mask_give_the_same_result(rng, name):
    q, k, v = inputs(rng)
    key_only = np.arange(LENGTH)[None, None, None] < 11
    full = np.broadcast_to(key_only, (BATCH, HEADS, LENGTH, LENGTH))
    every_other = np.repeat(full, 2, axis=-2)[..., ::2, :]  # a strided view
    spellings = {
        "batch": np.broadcast_to(key_only, (BATCH, 1, 1, LENGTH)),
        "query": np.broadcast_to(key_only, (1, 1, LENGTH, LENGTH)),
        "full": full,
        "strided": every_other,
        "transposed": np.ascontiguousarray(full.swapaxes(-1, -2)).swapaxes(-1, -2),
        "int": full.astype(np.int32),
        "float": key_only.astype(np.float32),
        "flax": nn.make_attention_mask(
            np.ones((BATCH, LENGTH), np.float32), full[:, 0, 0].astype(np.float32)
        ),
    }
    if name != "teacher":  # every new shape and dtype is compiled anew
        spellings = {spelling: spellings[spelling] for spelling in ("query", "int", "flax")}
    expected = run(name, q, k, v, None, key_only)
    for spelling, mask in spellings.items():
        out = run(name, q, k, v, None, mask)
        assert np.abs(out - expected).max() <= 1e-6, spelling


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(BATCH, LENGTH), (LENGTH, LENGTH), (BATCH, LENGTH, LENGTH)])
def test_masks_of_an_unsupported_rank_are_refused_by_shape(rng, name, shape):
    q, k, v = inputs(rng)
    with pytest.raises(ValueError, match="mask") as error:
        attend(name, q, k, v, mask=jnp.ones(shape, bool))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("name", EVERY)
def test_a_mask_that_differs_per_query_is_applied_in_every_closure(rng, name):
    q, k, v = inputs(rng)
    mask = problems.random_mask(rng, BATCH, HEADS, LENGTH, LENGTH)
    _, weights = run(name, q, k, v, None, problems.array(mask), return_weights=True)
    if name == "teacher":
        _, expected = reference.sinkhorn_layer(q, k, v, mask=mask, num_steps=10)
    else:
        _, expected = reference.compiled_layer(
            q, k, v, BANK, COEFFICIENTS, mask=mask, num_steps=10, closures=name
        )
    assert (np.asarray(weights)[~mask] == 0).all()
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------- unequal lengths, padding


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("queries", "keys", "active"), [(12, 7, 5), (1, 7, 7), (33, 12, 12)])
def test_different_numbers_of_queries_and_keys_work(rng, name, queries, keys, active):
    q, k, v = inputs(rng, queries=queries, keys=keys)
    mask = problems.array(problems.key_padding([active, active], keys))
    for spec in (ENDS_ON_COLUMNS, ENDS_ON_ROWS):
        out, weights = run(name, q, k, v, None, mask, spec=spec, return_weights=True)
        chex.assert_shape(out, (BATCH, queries, HEADS, DIM))
        assert (weights.sum(-1) > 1e-3).all()  # no query is dropped
        assert (weights[..., active:] == 0).all()
        error = closed_side_error(name, weights[..., :active], spec, queries / active)
        assert error <= 1e-5 * max(1, queries / active)


def test_padding_masked_only_as_key_still_contributes_column_mass(rng):
    q, k, v = inputs(rng, batch=1, queries=10, keys=10)
    _, alone = run("teacher", q, k, v, return_weights=True)
    padded = [np.concatenate([x, problems.normal(rng, 1, 7, HEADS, DIM)], 1) for x in (q, k, v)]
    mask = problems.array(problems.key_padding([10], 17))
    _, together = run("teacher", *padded, None, mask, return_weights=True)
    assert np.abs(together[:, :, :10, :10] - alone).max() > 0.01
    # Every query, padded ones too, is in the sums: active columns share 17 units of mass.
    np.testing.assert_allclose(together.sum(-2)[..., :10], 1.7, rtol=1e-5)
    unit = aj.SinkhornSpec(key_mass="unit")
    _, together = run("teacher", *padded, None, mask, spec=unit, return_weights=True)
    np.testing.assert_allclose(together.sum(-2)[..., :10], 1.0, rtol=1e-5)


# ------------------------------------------------------------------------- ties and precision


@pytest.mark.parametrize("name", BOTH)
def test_equal_tokens_get_equal_outputs(rng, name):
    q, k, v = inputs(rng)
    q, k, v = (x.copy() for x in (q, k, v))
    q[:, 9], k[:, 5], v[:, 5] = q[:, 2], k[:, 0], v[:, 0]
    q[:, 3], q[:, 4], q[:, 11] = 0.0, -0.0, 1e-42
    out, weights = run(name, q, k, v, return_weights=True)
    for twins in ([2, 9], [3, 4], [3, 11]):
        np.testing.assert_allclose(out[:, twins[0]], out[:, twins[1]], rtol=0, atol=1e-6)
    np.testing.assert_allclose(weights[..., 0], weights[..., 5], rtol=0, atol=1e-6)
    order = rng.permutation(LENGTH)
    moved = run(name, q[:, order], k, v)
    np.testing.assert_allclose(moved, out[:, order], rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", EVERY)
def test_tokens_of_zero_give_the_mean_value(rng, name):
    q, k, v = inputs(rng)
    out, weights = run(name, np.zeros_like(q), np.zeros_like(k), v, return_weights=True)
    np.testing.assert_allclose(weights, 1 / LENGTH, atol=1e-7)
    np.testing.assert_allclose(
        out, np.broadcast_to(v.mean(1, keepdims=True), out.shape), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("precision", [jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST])
def test_the_closed_side_does_not_depend_on_matmul_precision(rng, name, precision):
    q, k, v = inputs(rng, batch=1, queries=128, keys=128, size=2.0)
    for spec in (ENDS_ON_COLUMNS, ENDS_ON_ROWS):
        _, weights = run(name, q, k, v, spec=spec, precision=precision, return_weights=True)
        assert closed_side_error(name, weights, spec) <= 1e-5


def test_a_fit_on_many_half_precision_tokens_predicts_like_float64(rng):
    q, k = (problems.normal(rng, 80, 1, 250, DIM, dtype="bfloat16", size=2.0) for _ in range(2))

    @jax.jit
    def fitted_to(q, k):
        duals = aj.sinkhorn_duals(aj.scores(q, k), spec=ENDS_ON_COLUMNS)
        target = duals.source + aj.query_shift(q)
        x = aj.sliced_potentials(q, k, BANK)
        return x, aj.fit_ls(x, target - target.mean(-1, keepdims=True)).coefficients

    x, fitted = fitted_to(q, k)

    s = reference.scores(q, k)
    g = np.zeros((80, 1, 250))
    for _ in range(5):  # nine half-steps: the last row dual of ten
        f = -reference.logsumexp(s + g[..., None, :], -1)
        g = -reference.logsumexp(s + f[..., None], -2)
    f = f + reference.query_shift(q)
    exact_target = f - f.mean(-1, keepdims=True)
    a, b = (np.asarray(t, np.float64) @ np.asarray(BANK, np.float64).T / DIM**0.25 for t in (q, k))
    exact_x = np.swapaxes(
        reference.batched(
            reference.square_potential, (np.swapaxes(a, -1, -2), 1), (np.swapaxes(b, -1, -2), 1)
        ),
        -1,
        -2,
    )
    exact = reference.ridge_fit(exact_x, exact_target, ridge=1e-3)
    difference = exact_x @ (np.asarray(fitted, np.float64) - exact)
    assert np.linalg.norm(difference) <= 0.01 * np.linalg.norm(exact_x @ exact)
    np.testing.assert_allclose(x, exact_x, rtol=0, atol=1e-5 * np.abs(exact_x).max())


@pytest.mark.parametrize("name", EVERY)
def test_large_logits_give_finite_weights_with_exact_sums(rng, name):
    q, k, v = inputs(rng)
    for size in (1.0, 30.0, 300.0, 1000.0):
        for spec in (ENDS_ON_COLUMNS, ENDS_ON_ROWS):
            out, weights = run(name, size * q, k, v, spec=spec, return_weights=True)
            chex.assert_tree_all_finite((out, weights))
            assert closed_side_error(name, weights, spec) <= 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_a_constant_on_all_logits_changes_nothing(rng, name):
    q, k, v = inputs(rng)
    bias = np.zeros((1, 1, 1, 1), np.float32)
    _, plain = run(name, q, k, v, bias, return_weights=True)
    _, moved = run(name, q, k, v, bias + 1e4, return_weights=True)
    np.testing.assert_allclose(moved, plain, rtol=0, atol=5e-3)


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 1e-2, 1e-3])
def test_small_entropy_gives_finite_weights_with_exact_sums(rng, epsilon):
    q, k, v = inputs(rng)
    for name in BOTH:
        spec = aj.SinkhornSpec(num_steps=10, epsilon=epsilon)
        out, weights = run(name, q, k, v, spec=spec, return_weights=True)
        chex.assert_tree_all_finite((out, weights))
        assert closed_side_error(name, weights, spec) <= 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_teacher_trains_without_diverging(rng, dtype):
    x = problems.normal(rng, 8, LENGTH, 16)
    y = problems.array(rng.integers(0, 2, size=8))
    size = {"q": (16, 16), "k": (16, 16), "v": (16, 16)}
    params = [{n: problems.normal(rng, *s, size=0.3) for n, s in size.items()} for _ in range(2)]
    params.append({"out": problems.normal(rng, 16, 2, size=0.3)})

    def loss(params):
        h = x.astype(dtype)
        for layer in params[:2]:
            q, k, v = (
                (h @ layer[n].astype(dtype)).reshape(8, LENGTH, 2, 8) for n in ("q", "k", "v")
            )
            h = h + aj.sinkhorn_attention(q, k, v, spec=ENDS_ON_COLUMNS).reshape(8, LENGTH, 16)
        logits = h.mean(1).astype(jnp.float32) @ params[2]["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    optimiser = optax.adam(3e-3)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimiser.update(grads, state)
            return (optax.apply_updates(params, updates), state), (value, optax.tree.norm(grads))

        return jax.lax.scan(step, (params, optimiser.init(params)), length=200)[1]

    with jax.numpy_dtype_promotion("standard"):  # optax.adam does not run under strict promotion
        losses, norms = train(params)
    assert np.isfinite(losses).all()
    assert np.isfinite(norms).all()
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", BOTH)
def test_a_single_active_key_gets_all_the_mass(rng, name):
    q, k, v = inputs(rng)
    mask = (np.arange(LENGTH) == 6)[None, None, None]
    out, weights = run(name, q, k, v, None, mask, return_weights=True)
    mass = np.asarray(weights.sum(-1))
    expected = np.swapaxes(mass[..., None] * np.asarray(v)[:, 6][:, :, None], 1, 2)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert (weights[..., :6] == 0).all()
    np.testing.assert_allclose(weights.sum(-2)[..., 6], LENGTH, rtol=1e-5)
    loss = lambda q, k, v: jnp.sum(jnp.sin(OPERATOR[name](q, k, v, None, mask)))
    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    chex.assert_tree_all_finite(grads)
    for grad in grads[1:]:
        assert (np.delete(np.asarray(grad), 6, axis=1) == 0).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("argument", ["mu", "nu", "marginals"])
def test_passing_marginals_raises(rng, name, argument):
    q, k, v = inputs(rng)
    with pytest.raises(TypeError, match=argument):
        attend(name, q, k, v, **{argument: jnp.ones(LENGTH)})


# ----------------------------------------------------------------------------- 64-bit types


def test_64_bit_types_do_not_change_any_dtype(rng, x64):
    spec = aj.SinkhornSpec(num_steps=10, epsilon=np.float64(1.0))
    fitted = jax.jit(functools.partial(fit, ridge=np.float64(1e-3)))
    for dtype in ("float32", "float64"):
        q, k, v = inputs(rng, dtype=dtype)
        w = fitted(q, k)
        chex.assert_type(w, jnp.dtype(dtype))
        for name in BOTH:
            out, weights = run(name, q, k, v, spec=spec, return_weights=True)
            chex.assert_type([out, weights], jnp.dtype(dtype))
            if dtype == "float64":
                assert closed_side_error(name, weights, spec) < 1e-12


# ----------------------------------------------------------------- transformations, devices


@pytest.mark.parametrize("name", BOTH)
def test_derivatives_under_vmap_equal_a_loop(rng, name):
    q, k, v = inputs(rng)
    grad = jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(OPERATOR[name](q, k, v)))))
    mapped = jax.jit(jax.vmap(grad))(q, k, v)
    loop = np.stack([grad(*one) for one in zip(q, k, v, strict=True)])
    np.testing.assert_allclose(mapped, loop, rtol=0, atol=2e-6)
    tiny = (x[0, :3, :1, :] for x in (q, k, v))
    jacobian = jax.jit(jax.jacrev(OPERATOR[name]))(*tiny)
    chex.assert_shape(jacobian, (3, 1, DIM, 3, 1, DIM))
    chex.assert_tree_all_finite(jacobian)


@pytest.mark.parametrize("name", ["teacher", "two_sided"])
def test_devices_share_a_batch_without_changing_an_example(rng, name):
    assert jax.device_count() == 2
    q, k, v = inputs(rng, batch=4)
    expected = OPERATOR[name](q, k, v)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("batch")
    shared = [jax.device_put(x, NamedSharding(mesh, rows)) for x in (q, k, v)]
    sharded = jax.block_until_ready(OPERATOR[name](*shared))
    assert sharded.sharding.is_equivalent_to(NamedSharding(mesh, rows), sharded.ndim)
    np.testing.assert_allclose(sharded, expected, rtol=0, atol=1e-6)
    function = functools.partial(attend, name)
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows))
    np.testing.assert_allclose(jax.block_until_ready(mapped(q, k, v)), expected, rtol=0, atol=1e-6)
    pair = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]
    out = jax.block_until_ready(jax.pmap(function)(*pair))
    np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", [4, 3])
def test_calibration_sums_of_devices_combine(rng, batch):
    x = np.asarray(problems.normal(rng, batch, HEADS, LENGTH, 5))
    y = np.asarray(problems.normal(rng, batch, HEADS, LENGTH))
    expected = jax.jit(aj.fit_ls)(x, y).coefficients
    # An uneven batch is filled up with an example in which nothing is valid.
    valid = np.ones((batch, 1, 1), bool)
    if batch % 2:
        x, y, valid = (np.concatenate([t, np.zeros_like(t[:1])]) for t in (x, y, valid))
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("batch")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows), out_specs=PartitionSpec()
    )
    def sums(x, y, valid):
        return jax.lax.psum(aj.NormalEquations.zero(5).add(x, y, valid), "batch")

    solve = jax.jit(lambda sums: sums.solve(1e-3))
    combined = solve(jax.block_until_ready(sums(x, y, valid)))
    np.testing.assert_allclose(combined.coefficients, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(combined.num_rows, batch * HEADS * LENGTH)


# ----------------------------------------------- shapes of one, neighbours, offsets, gradients


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 1, 16), (2, 4, 1), (1, 1, 1)])
def test_axes_of_size_one_are_kept(rng, name, batch, heads, length):
    q, k, v = inputs(rng, batch=batch, heads=heads, queries=length, keys=length)
    out = run(name, q, k, v)
    chex.assert_shape(out, (batch, length, heads, DIM))
    if length == 1:
        np.testing.assert_allclose(out, v, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BOTH)
def test_an_example_does_not_depend_on_its_neighbours(rng, name):
    q, k, v = inputs(rng, batch=1)
    alone = run(name, q, k, v)
    for neighbour in (30.0 * q, np.full_like(q, np.nan)):
        together = run(name, *(np.concatenate(x) for x in ((q, neighbour), (k, k), (v, v))))
        np.testing.assert_allclose(together[:1], alone, rtol=0, atol=1e-6)
    # NaN in an active token stays in its example.
    assert np.isnan(together[1:]).all()


@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4])
def test_a_common_offset_of_all_tokens_does_not_move_the_features(rng, offset):
    # On the grid that the offset leaves, so that both runs see the same tokens.
    inputs = map(np.asarray, problems.per_head(rng, queries=64, keys=64, dim=DIM))
    q, k = (np.round(x * 512) / 512 for x in inputs)
    plain = np.asarray(potentials(q, k, BANK))
    moved = potentials(q + np.float32(offset), k + np.float32(offset), BANK)
    assert np.abs(moved - plain).max() <= 1e-3 * np.abs(plain).max()
    loop = reference.batched(
        lambda q, k: reference.sliced_features(q, k, BANK), (q[:1, :1], 2), (k[:1, :1], 2)
    )
    np.testing.assert_allclose(plain[:1, :1], loop, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_steps", [2, 3, 4, 5])
def test_the_gradient_of_the_teacher_goes_through_both_duals(rng, x64, num_steps):
    q, k, v = problems.attention_inputs(rng, dtype="float64")
    mixing = problems.normal(rng, 2, 7, 3, 4, dtype="float64")
    spec = aj.SinkhornSpec(num_steps=num_steps)
    loss = jax.jit(lambda q, k: jnp.sum(mixing * aj.sinkhorn_attention(q, k, v, spec=spec)))
    exact, measured = problems.slope(loss, (q, k), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)
