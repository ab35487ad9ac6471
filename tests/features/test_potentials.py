"""Sliced Kantorovich potentials: the paper's formula, any lengths, masks, float32 safety."""

import chex
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
BANK = aj.slice_directions(0, 6, 4)
LINE = jnp.ones((1, 1))  # the one direction of one-dimensional tokens

sliced_potentials = jax.jit(aj.sliced_potentials, static_argnames=("scale", "outside"))


def on_a_line(a, b, **settings):
    """The potential of projections a and b themselves, as a vector."""
    return sliced_potentials(a[..., None], b[..., None], LINE, scale=1.0, **settings)[..., 0]


def expected(q, k, directions, query_valid=None, key_valid=None, **settings):
    """The float64 loop, over a batch."""
    return reference.batched(
        lambda q, k, query_valid, key_valid: reference.sliced_features(
            q,
            k,
            directions,
            query_valid=None if query_valid is None else query_valid != 0,
            key_valid=None if key_valid is None else key_valid != 0,
            **settings,
        ),
        (q, 2),
        (k, 2),
        (query_valid, 1),
        (key_valid, 1),
    )


def dual_value(f, a, b):
    """The value of the best dual pair with source potential f, and how far f is from its own."""
    cost = (a[:, None] - b[None, :]) ** 2 / 2
    g = (cost - f[:, None]).min(0)
    return f.mean() + g.mean(), np.abs((cost - g[None, :]).min(1) - f).max()


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_equal_lengths_follow_the_formula_of_the_paper(rng, dtype, length):
    q, k = problems.per_head(rng, dtype=dtype, queries=length, keys=length, dim=16)
    bank = aj.slice_directions(1, 5, 16)
    x = sliced_potentials(q, k, bank)
    chex.assert_shape(x, (2, 3, length, 5))
    chex.assert_type(x, dtype)
    a, b = (np.asarray(t, np.float64) @ np.asarray(bank, np.float64).T / 2 for t in (q, k))
    a, b = np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2)
    formula = reference.batched(reference.square_potential, (a, 1), (b, 1))
    tolerance = {"float32": 1e-5, "float64": 5e-7}[dtype.name]  # the bank is unit to float32
    np.testing.assert_allclose(x, np.swapaxes(formula, -1, -2), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("queries", "keys"), [(7, 5), (5, 7), (12, 4), (1, 6), (6, 1), (9, 6)])
def test_any_lengths_follow_the_quantile_formula(rng, dtype, queries, keys):
    q, k = problems.per_head(rng, dtype=dtype, queries=queries, keys=keys)
    x = sliced_potentials(q, k, BANK)
    np.testing.assert_allclose(x, expected(q, k, BANK), rtol=0, atol=TOLERANCE[dtype.name])


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (12, 7), (7, 12), (9, 3), (5, 1), (1, 5)])
def test_potentials_solve_the_transport_problem_on_a_line(rng, queries, keys):
    a, b = rng.normal(size=queries), 1.0 + 2.0 * rng.normal(size=keys)
    f = np.asarray(
        on_a_line(problems.array(a, jnp.float32), problems.array(b, jnp.float32)), np.float64
    )
    value, infeasible = dual_value(f, a, b)
    assert infeasible <= 1e-5
    np.testing.assert_allclose(value, reference.transport_optimum(a, b), rtol=0, atol=1e-5)


def test_a_peer_library_finds_the_same_optimum(rng):
    import ot

    a, b = rng.normal(size=150), 0.5 + rng.normal(size=90) ** 2
    f = np.asarray(
        on_a_line(problems.array(a, jnp.float32), problems.array(b, jnp.float32)), np.float64
    )
    value, infeasible = dual_value(f, a, b)
    assert infeasible <= 1e-5
    np.testing.assert_allclose(value, ot.emd2_1d(a, b, metric="sqeuclidean") / 2, atol=1e-5)


@pytest.mark.parametrize("outside", ["extend", "zero"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (9, 5)])
def test_masked_tokens_are_not_in_the_support(rng, dtype, queries, keys, outside):
    q, k = problems.per_head(rng, dtype=dtype, queries=queries, keys=keys)
    query_valid, key_valid = rng.random((2, 3, queries)) < 0.6, rng.random((2, 3, keys)) < 0.6
    query_valid[0, 0] = key_valid[0, 1] = False
    query_valid[1, 0, :] = np.arange(queries) == 2
    key_valid[1, 0, :] = np.arange(keys) == 1
    x = sliced_potentials(
        q,
        k,
        BANK,
        query_valid=problems.array(query_valid),
        key_valid=problems.array(key_valid),
        outside=outside,
    )
    loop = expected(q, k, BANK, query_valid, key_valid, outside=outside)
    np.testing.assert_allclose(x, loop, rtol=0, atol=TOLERANCE[dtype.name])
    count = query_valid.sum(-1)[..., None]
    mean = (np.asarray(x) * query_valid[..., None]).sum(-2) / np.maximum(count, 1)
    np.testing.assert_allclose(mean, 0.0, atol=TOLERANCE[dtype.name])
    if outside == "zero":
        assert (np.asarray(x)[~query_valid] == 0).all()


@pytest.mark.parametrize("outside", ["extend", "zero"])
def test_values_of_masked_tokens_do_not_matter(rng, outside):
    q, k = problems.per_head(rng, queries=7, keys=7)
    valid = problems.array(np.arange(7) < 5)[None, None]
    settings = {"query_valid": valid, "key_valid": valid, "outside": outside}
    clean = sliced_potentials(q, k, BANK, **settings)
    for rubbish in (jnp.nan, jnp.inf, -1e30):
        x = sliced_potentials(
            *(jnp.where(valid[..., None], x, rubbish) for x in (q, k)), BANK, **settings
        )
        chex.assert_trees_all_equal(x[..., :5, :], clean[..., :5, :])
        if outside == "zero":
            assert (np.asarray(x)[..., 5:, :] == 0).all()


def test_padding_changes_nothing_at_real_tokens(rng):
    q, k = problems.per_head(rng, queries=6, keys=6)
    alone = sliced_potentials(q, k, BANK)
    for size in (9, 16):
        more = [problems.normal(rng, 2, 3, size - 6, 4, size=5.0) for _ in range(2)]
        valid = problems.array(np.arange(size) < 6)[None, None]
        x = sliced_potentials(
            *(jnp.concatenate(pair, -2) for pair in zip((q, k), more, strict=True)),
            BANK,
            query_valid=valid,
            key_valid=valid,
        )
        chex.assert_trees_all_close(x[..., :6, :], alone, atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 1), (2, 1, 7), (1, 3, 1), (2, 3, 7)])
def test_validities_broadcast(rng, shape):
    q, k = problems.per_head(rng, queries=7, keys=5)
    valid = rng.random(shape) < 0.7
    full = np.broadcast_to(valid, (2, 3, 7))
    x = sliced_potentials(q, k, BANK, query_valid=problems.array(valid))
    y = sliced_potentials(q, k, BANK, query_valid=problems.array(full, jnp.float32))
    chex.assert_trees_all_close(x, y, atol=1e-6)


def test_directions_are_normalised_on_entry(rng):
    q, k = problems.per_head(rng)
    sizes = problems.array(rng.uniform(0.1, 9.0, size=(6, 1)), jnp.float32)
    chex.assert_trees_all_close(
        sliced_potentials(q, k, sizes * BANK), sliced_potentials(q, k, BANK), atol=1e-5
    )


def test_potentials_are_proportional_to_the_scale(rng, x64):
    q, k = problems.per_head(rng, dtype="float64")
    plain = sliced_potentials(q, k, BANK, scale=1.0)
    chex.assert_trees_all_close(sliced_potentials(q, k, BANK, scale=0.3), 0.3 * plain, atol=1e-12)
    chex.assert_trees_all_close(sliced_potentials(q, k, BANK), 0.5 * plain, atol=1e-12)


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4])
def test_a_common_offset_does_not_move_float32_potentials(rng, size):
    q, k = problems.per_head(rng, queries=16, keys=16)
    # Rounded to the grid that the offset leaves, so that both runs see the same tokens.
    q, k = (jnp.round(x * 256) / 256 for x in (q, k))
    offset = problems.array(np.full(4, size), jnp.float32)[None, None, None]
    plain = sliced_potentials(q, k, BANK)
    moved = sliced_potentials(q + offset, k + offset, BANK)
    assert float(jnp.abs(moved - plain).max()) <= 1e-3 * float(jnp.abs(plain).max())


def test_an_offset_of_one_side_adds_its_product(rng, x64):
    q, k = problems.per_head(rng, dtype="float64", queries=7, keys=7)
    t = problems.normal(rng, 1, 1, 1, 4, dtype="float64")
    directions = BANK / jnp.linalg.norm(BANK, axis=-1, keepdims=True)
    a = jnp.einsum("bhnd,ld->bhnl", q, directions.astype(jnp.float64)) / jnp.sqrt(2.0)
    shift = (t[0, 0] @ directions.astype(jnp.float64).T)[None, None] / jnp.sqrt(2.0)
    product = shift * (a - a.mean(-2, keepdims=True))
    plain = sliced_potentials(q, k, BANK)
    moved_keys = sliced_potentials(q, k + t, BANK)
    moved_queries = sliced_potentials(q + t, k, BANK)
    chex.assert_trees_all_close(moved_keys, plain - product, atol=1e-6)
    chex.assert_trees_all_close(moved_queries, plain + product, atol=1e-6)


def test_ties_and_signed_zeros_give_the_right_potentials():
    a = problems.array([0.0, -0.0, 1.0, 1.0, 1e-40, -1e-40, 1.0, -2.0], jnp.float32)
    b = problems.array([0.5, 0.5, -0.0, 0.0, 0.5, 2.0, -1e-42, 1.0], jnp.float32)
    f = np.asarray(on_a_line(a, b))
    np.testing.assert_allclose(f, reference.square_potential(a, b), atol=1e-6)
    for group in ([0, 1, 4, 5], [2, 3, 6]):
        np.testing.assert_allclose(f[group], f[group[0]], atol=1e-6)
    zero = on_a_line(jnp.zeros(5), jnp.zeros(5))
    chex.assert_trees_all_equal(zero, jnp.zeros(5))


def test_order_of_tokens_does_not_matter(rng):
    q, k = problems.per_head(rng)
    x = sliced_potentials(q, k, BANK)
    queries, keys = rng.permutation(7), rng.permutation(5)
    y = sliced_potentials(q[..., queries, :], k[..., keys, :], BANK)
    chex.assert_trees_all_close(y, x[..., queries, :], atol=1e-5)


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_half_precision_tokens_give_float32_potentials(rng, low):
    q, k = problems.per_head(rng, dtype=low, queries=32, keys=32)
    x = sliced_potentials(q, k, BANK.astype(low))
    chex.assert_type(x, jnp.float32)
    np.testing.assert_allclose(x, expected(q, k, BANK.astype(low)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (7, 5)])
def test_gradient_matches_finite_differences_away_from_ties(rng, x64, queries, keys):
    q, k = problems.per_head(rng, dtype="float64", queries=queries, keys=keys)
    valid = problems.array(np.arange(queries) != 2)[None, None]
    mixing = problems.normal(rng, 2, 3, queries, 6, dtype="float64")
    bank = BANK.astype(jnp.float64)
    loss = lambda q, k, bank: jnp.sum(
        mixing * jnp.sin(sliced_potentials(q, k, bank, query_valid=valid))
    )
    exact, measured = problems.slope(loss, (q, k, bank), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


def test_gradients_are_finite_without_any_token(rng):
    q, k = problems.per_head(rng)
    none = jnp.zeros((1, 1, 1), bool)
    loss = lambda q, k: jnp.sum(
        jnp.sin(sliced_potentials(q, k, BANK, query_valid=none, key_valid=none, outside="zero"))
    )
    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(q, k)
    assert value == 0
    chex.assert_trees_all_equal(grads, (jnp.zeros_like(q), jnp.zeros_like(k)))


def test_vmap_over_one_side_equals_a_loop(rng):
    q, k = problems.per_head(rng)
    mapped = jax.vmap(sliced_potentials, in_axes=(None, 0, None))(q[0], k, BANK)
    loop = jnp.stack([sliced_potentials(q[0], x, BANK) for x in k])
    chex.assert_trees_all_close(mapped, loop, atol=1e-6)


@hypothesis.given(
    a=hypothesis.extra.numpy.arrays(np.float64, 6, elements=st.integers(-5, 5).map(float)),
    b=hypothesis.extra.numpy.arrays(np.float64, 4, elements=st.integers(-5, 5).map(float)),
    query_valid=hypothesis.extra.numpy.arrays(np.bool_, 6),
    key_valid=hypothesis.extra.numpy.arrays(np.bool_, 4),
)
def test_ties_and_any_support_match_the_reference_loop(a, b, query_valid, key_valid):
    with jax.enable_x64(True):
        f = on_a_line(
            problems.array(a),
            problems.array(b),
            query_valid=problems.array(query_valid),
            key_valid=problems.array(key_valid),
        )
    loop = reference.general_potential(a, b, query_valid, key_valid)
    np.testing.assert_allclose(f, loop, atol=1e-10)
