"""Attention functions in Flax's layout: the teacher, the compiled layer, softmax."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj
from asap_jax.problem import Tokens

BANK = aj.slice_directions(0, 6, 4)
LAYER_SHAPE = (2, 7, 3, 4)

sinkhorn = jax.jit(aj.sinkhorn_attention, static_argnames="return_weights")
compiled = jax.jit(aj.asap_attention, static_argnames=("return_weights", "closures"))
softmax = jax.jit(aj.softmax_attention, static_argnames=("return_weights", "scale"))


def predictor_of(rng, *, dtype="float32", side="query", shape=(6,)):
    """A predictor with random coefficients."""
    w = problems.normal(rng, *shape, dtype=dtype, size=0.3)
    return aj.Predictor(directions=BANK, coefficients=w, side=side)


def settings_of(spec):
    """The spec as the keywords of the references."""
    return {
        "num_steps": spec.num_steps,
        "epsilon": spec.epsilon,
        "key_mass": spec.key_mass,
        "scale": spec.scale,
    }


def bias_and_mask(rng):
    """A bias for all heads and a mask with one empty query and one empty key."""
    mask = problems.random_mask(rng, 2, 1, 7, 5)
    mask[0, 0, 3] = False
    mask[1, 0, :, 2] = False
    return problems.normal(rng, 1, 3, 7, 5), problems.array(mask)


# ------------------------------------------------------------------------------- the teacher


@pytest.mark.parametrize("num_steps", [1, 4, 5, 10])
def test_teacher_follows_the_reference(rng, dtype, num_steps):
    q, k, v = problems.attention_inputs(rng, dtype=dtype, size=2.0)
    spec = aj.SinkhornSpec(num_steps=num_steps)
    out, weights = sinkhorn(q, k, v, spec=spec, return_weights=True)
    chex.assert_shape(out, LAYER_SHAPE)
    chex.assert_shape(weights, (2, 3, 7, 5))
    chex.assert_type([out, weights], dtype)
    expected_out, expected = reference.sinkhorn_layer(q, k, v, num_steps=num_steps)
    tolerance = {"float32": 5e-6, "float64": 1e-10}[dtype.name]
    np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=5 * tolerance)


@pytest.mark.parametrize("key_mass", ["balanced", "unit"])
def test_teacher_with_bias_mask_scale_and_epsilon_follows_the_reference(rng, key_mass):
    q, k, v = problems.attention_inputs(rng)
    bias, mask = bias_and_mask(rng)
    for num_steps in (4, 5):
        spec = aj.SinkhornSpec(num_steps=num_steps, epsilon=0.5, scale=0.8, key_mass=key_mass)
        out, weights = sinkhorn(q, k, v, bias, mask, spec=spec, return_weights=True)
        expected_out, expected = reference.sinkhorn_layer(
            q, k, v, bias=bias, mask=mask, **settings_of(spec)
        )
        np.testing.assert_allclose(weights, expected, rtol=0, atol=5e-6)
        np.testing.assert_allclose(out, expected_out, rtol=0, atol=2e-5)


def test_teacher_stays_exact_at_sharp_logits(rng, dtype):
    q, k, v = problems.attention_inputs(rng, queries=7, keys=7)
    s = reference.scores(problems.heads_first(q), problems.heads_first(k))
    q = problems.array(np.asarray(q) * (50 / np.abs(s).max()), dtype)
    k, v = k.astype(dtype), v.astype(dtype)
    for num_steps in (4, 5):
        _, weights = sinkhorn(
            q, k, v, spec=aj.SinkhornSpec(num_steps=num_steps), return_weights=True
        )
        _, expected = reference.sinkhorn_layer(q, k, v, num_steps=num_steps)
        tolerance = {"float32": 2e-5, "float64": 1e-10}[dtype.name]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------ the compiled layer


@pytest.mark.parametrize("closures", ["one_sided", "two_sided"])
@pytest.mark.parametrize("num_steps", [4, 5])
def test_compiled_layer_follows_the_reference(rng, dtype, num_steps, closures):
    q, k, v = problems.attention_inputs(rng, dtype=dtype)
    predictor = predictor_of(rng, dtype=dtype)
    spec = aj.SinkhornSpec(num_steps=num_steps)
    out, weights = compiled(
        q, k, v, predictor=predictor, spec=spec, closures=closures, return_weights=True
    )
    chex.assert_type([out, weights], dtype)
    expected_out, expected = reference.compiled_layer(
        q, k, v, BANK, predictor.coefficients, closures=closures, num_steps=num_steps
    )
    tolerance = {"float32": 5e-6, "float64": 1e-10}[dtype.name]
    np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=5 * tolerance)


@pytest.mark.parametrize(
    ("side", "num_steps", "closures"),
    [("query", 4, 5), ("query", 5, 4), ("key", 4, 2), ("key", 5, 1), ("key", 5, 3)],
)
def test_any_number_of_closures_from_either_side_follows_the_reference(
    rng, x64, side, num_steps, closures
):
    q, k, v = problems.attention_inputs(rng, dtype="float64")
    predictor = predictor_of(rng, dtype="float64", side=side)
    _, weights = compiled(
        q,
        k,
        v,
        predictor=predictor,
        spec=aj.SinkhornSpec(num_steps=num_steps),
        closures=closures,
        return_weights=True,
    )
    _, expected = reference.compiled_layer(
        q, k, v, BANK, predictor.coefficients, closures=closures, num_steps=num_steps, side=side
    )
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("side", "num_steps", "closures"),
    [("query", 4, 2), ("query", 5, 1), ("query", 5, 3), ("key", 4, 1), ("key", 5, 2)],
)
def test_closures_that_end_on_the_wrong_side_are_refused(rng, side, num_steps, closures):
    q, k, v = problems.attention_inputs(rng)
    with pytest.raises(ValueError, match="closures"):
        aj.asap_attention(
            q,
            k,
            v,
            predictor=predictor_of(rng, side=side),
            closures=closures,
            spec=aj.SinkhornSpec(num_steps=num_steps),
        )


@pytest.mark.parametrize("closures", ["one_sided", "two_sided"])
def test_named_endings_need_a_query_side_predictor(rng, closures):
    q, k, v = problems.attention_inputs(rng)
    with pytest.raises(ValueError, match="side"):
        aj.asap_attention(
            q,
            k,
            v,
            predictor=predictor_of(rng, side="key"),
            closures=closures,
            spec=aj.SinkhornSpec(),
        )


@pytest.mark.parametrize("padding", ["self", "none"])
@pytest.mark.parametrize("key_mass", ["balanced", "unit"])
def test_compiled_layer_with_bias_and_masks_follows_the_reference(rng, key_mass, padding):
    q, k, v = problems.attention_inputs(rng, queries=7, keys=7)
    bias = problems.normal(rng, 1, 3, 7, 7)
    entries = problems.random_mask(rng, 2, 1, 7, 7)
    entries[0, 0, 3] = False
    entries[1, 0, :, 2] = False
    predictor = predictor_of(rng)
    for mask in (problems.key_padding([7, 4], 7), problems.token_padding([7, 4], 7), entries):
        mask = np.broadcast_to(mask, (2, 1, 7, 7))
        spec = aj.SinkhornSpec(num_steps=4, epsilon=0.5, key_mass=key_mass, padding=padding)
        out, weights = compiled(
            q, k, v, bias, problems.array(mask), predictor=predictor, spec=spec, return_weights=True
        )
        expected_out, expected = reference.compiled_layer(
            q,
            k,
            v,
            BANK,
            predictor.coefficients,
            bias=bias,
            mask=mask,
            closures="two_sided",
            padding=padding,
            **settings_of(spec),
        )
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(out, expected_out, rtol=0, atol=5e-5)
        other = {"self": "none", "none": "self"}[padding]
        overruled = compiled(
            q, k, v, bias, problems.array(mask),
            predictor=predictor.replace(padding=padding),
            spec=dataclasses.replace(spec, padding=other),
            return_weights=True,
        )  # fmt: skip
        chex.assert_trees_all_equal(overruled, (out, weights))


def test_coefficients_may_differ_per_head(rng):
    q, k, v = problems.attention_inputs(rng)
    predictor = predictor_of(rng, shape=(3, 6))
    spec = aj.SinkhornSpec(num_steps=4)
    together = compiled(q, k, v, predictor=predictor, spec=spec)
    for head in range(3):
        one = aj.Predictor(directions=BANK, coefficients=predictor.coefficients[head])
        alone = compiled(*(x[..., head : head + 1, :] for x in (q, k, v)), predictor=one, spec=spec)
        chex.assert_trees_all_close(together[..., head : head + 1, :], alone, atol=1e-5)


def one_head(rng, dtype):
    """One problem with scores up to 10 and shifts up to 50: (q, k, v, scores) for 16 tokens."""
    q, k, v = (
        np.asarray(x)
        for x in problems.attention_inputs(rng, queries=16, keys=16, dim=8, batch=1, heads=1)
    )
    q = q * np.sqrt(50 / reference.query_shift(q).max())
    s = reference.scores(problems.heads_first(q), problems.heads_first(k))
    k = k * (10 / np.abs(s).max())
    q, k, v = (problems.array(x, dtype) for x in (q, k, v))
    return q, k, v, reference.scores(problems.heads_first(q), problems.heads_first(k))[0, 0]


def given_dual(dual, own, dtype, side="query"):
    """A predictor that answers with one dual, given in score coordinates.

    `own` are the queries or keys of its side; their shift takes the dual to cost coordinates, in
    the precision under test, as it does in a calibration.
    """
    tokens = jnp.swapaxes(own, -2, -3)
    shift = Tokens(tokens, tokens, tokens.shape[-1] ** -0.5, None, None).shift()[0, 0]
    return aj.Predictor(
        directions=jnp.eye(1, 8),
        coefficients=jnp.zeros(1),
        side=side,
        token_bias=problems.array(dual, dtype) + shift,
    )


@pytest.mark.parametrize(
    ("num_steps", "before_end"), [(2, 1), (10, 1), (10, 2), (10, 3), (5, 1), (5, 2), (11, 4)]
)
def test_the_exact_aligned_dual_gives_the_teacher(rng, dtype, num_steps, before_end):
    q, k, v, s = one_head(rng, dtype)
    side, dual = reference.aligned_dual(s, num_steps=num_steps, before_end=before_end)
    predictor = given_dual(dual, q if side == "query" else k, dtype, side)
    spec = aj.SinkhornSpec(num_steps=num_steps)
    _, weights = compiled(
        q, k, v, predictor=predictor, spec=spec, closures=before_end, return_weights=True
    )
    expected = reference.sinkhorn(s, num_steps=num_steps)
    tolerance = {"float32": 1e-6, "float64": 1e-12}[dtype.name]
    np.testing.assert_allclose(weights[0, 0], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("num_steps", "closures"), [(10, "one_sided"), (11, "two_sided")])
def test_the_exact_source_dual_gives_the_teacher(rng, dtype, num_steps, closures):
    q, k, v, s = one_head(rng, dtype)
    predictor = given_dual(reference.source_dual(s, num_steps=num_steps), q, dtype)
    _, weights = compiled(
        q,
        k,
        v,
        predictor=predictor,
        spec=aj.SinkhornSpec(num_steps=num_steps),
        closures=closures,
        return_weights=True,
    )
    expected = reference.sinkhorn(s, num_steps=num_steps)
    tolerance = {"float32": 1e-6, "float64": 1e-12}[dtype.name]
    np.testing.assert_allclose(weights[0, 0], expected, rtol=0, atol=tolerance)


# -------------------------------------------------------------------------- softmax attention


def test_softmax_attention_is_the_one_of_jax(rng):
    q, k, v = problems.attention_inputs(rng)
    bias, mask = problems.normal(rng, 1, 3, 7, 5), problems.random_mask(rng, 2, 1, 7, 5)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = jax.nn.dot_product_attention(q, k, v, bias=bias, mask=problems.array(mask))
    chex.assert_trees_all_close(softmax(q, k, v, bias, problems.array(mask)), expected, atol=2e-6)


def test_softmax_attention_is_the_one_step_teacher(rng):
    q, k, v = problems.attention_inputs(rng)
    bias, mask = bias_and_mask(rng)
    chex.assert_trees_all_close(
        softmax(q, k, v, bias, mask, scale=0.3, return_weights=True),
        sinkhorn(
            q, k, v, bias, mask, spec=aj.SinkhornSpec(num_steps=1, scale=0.3), return_weights=True
        ),
        atol=1e-6,
    )


# ---------------------------------------------------------------------- transformations


def test_functions_jit_with_nothing_marked_static(rng):
    q, k, v = problems.attention_inputs(rng)
    predictor, spec = predictor_of(rng), aj.SinkhornSpec(num_steps=4)
    chex.assert_trees_all_close(
        jax.jit(aj.asap_attention)(q, k, v, predictor=predictor, spec=spec),
        aj.asap_attention(q, k, v, predictor=predictor, spec=spec),
        atol=1e-5,
    )
    chex.assert_shape(jax.jit(aj.sinkhorn_attention)(q, k, v, spec=spec), LAYER_SHAPE)
    chex.assert_shape(jax.jit(aj.softmax_attention)(q, k, v), LAYER_SHAPE)


def test_gradient_reaches_the_predictor(rng, x64):
    q, k, v = problems.attention_inputs(rng, dtype="float64")
    w = problems.normal(rng, 6, dtype="float64")
    bank = BANK.astype(jnp.float64)
    mixing = problems.normal(rng, *LAYER_SHAPE, dtype="float64")
    loss = jax.jit(
        lambda bank, w: jnp.sum(
            mixing
            * aj.asap_attention(
                q,
                k,
                v,
                predictor=aj.Predictor(directions=bank, coefficients=w),
                spec=aj.SinkhornSpec(num_steps=4),
            )
        )
    )
    exact, measured = problems.slope(loss, (bank, w), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-5)


def test_layers_of_one_step_run_without_jit_as_with_it(rng):
    q, k, v = problems.attention_inputs(rng)
    one = functools.partial(aj.sinkhorn_attention, spec=aj.SinkhornSpec(num_steps=1))
    spec, predictor = aj.SinkhornSpec(num_steps=4), predictor_of(rng)
    compiled = functools.partial(
        aj.asap_attention, spec=spec, predictor=predictor, closures="one_sided"
    )
    total = lambda q: jnp.sum(jnp.sin(aj.softmax_attention(q, k, v)))
    calls = jax.grad(total), *(lambda q, f=f: f(q, k, v) for f in (one, compiled))
    for call in calls:
        with jax.disable_jit():
            result = call(q)
        chex.assert_trees_all_close(result, jax.jit(call)(q), atol=1e-5)
