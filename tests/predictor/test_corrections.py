"""Corrections after closures."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj

FAMILIES = (aj.Moments(),)


def corrections_of(rng, count, dtype="float64"):
    return tuple(
        aj.Correction(FAMILIES, aj.LinearHead(problems.normal(rng, 3, 13, dtype=dtype, size=0.1)))
        for _ in range(count)
    )


def by_hand(q, k, w, corrections, mask, *, side, num_closures, spec):
    """One head: predict, then close and correct in turn."""
    s = reference.scores(q, k)
    mask = reference.full_mask(mask, s.shape)
    valid = dict(zip(("query", "key"), reference.feature_validity(mask, "self"), strict=True))
    active = {"query": mask.any(1), "key": mask.any(0)}
    tokens, other = {"query": q, "key": k}, {"query": "key", "key": "query"}

    def features(side):
        return reference.moment_features(
            tokens[side], tokens[other[side]],
            query_valid=valid[side], key_valid=valid[other[side]],
        )  # fmt: skip

    shift = lambda side: reference.query_shift(tokens[side])
    dual = reference.center(features(side) @ w, valid[side]) - shift(side)
    dual = np.where(active[side], dual, 0.0)
    for coefficients in corrections:
        if side == "query":
            target = np.log(active["query"].sum() / active["key"].sum())
            dual = reference.key_ctransform(s, dual, log_target=target, mask=mask)
        else:
            dual = reference.query_ctransform(s, dual, mask=mask)
        side = other[side]
        cost = reference.center(dual, valid[side]) + reference.center(shift(side), valid[side])
        dual = dual + coefficients[0] * cost + features(side) @ coefficients[1:]
        dual = np.where(active[side], dual, 0.0)
    left = num_closures - len(corrections)
    return reference.close(s, dual, side=side, num_closures=left, mask=mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("num_closures", "count", "num_steps"), [(2, 1, 4), (3, 2, 4), (3, 2, 5), (3, 1, 4)]
)
def test_corrections_follow_the_closures_in_order(rng, x64, num_closures, count, num_steps, masked):
    spec = aj.SinkhornSpec(num_steps)
    query, key, value = problems.attention_inputs(rng, queries=6, keys=6, dtype="float64")
    side = spec.side_before_end(num_closures)
    w = problems.normal(rng, 3, 12, dtype="float64", size=0.3)
    corrections = corrections_of(rng, count)
    mask = problems.key_padding([6, 4], 6) if masked else None
    predictor = aj.Predictor(FAMILIES, coefficients=w, corrections=corrections, side=side)
    _, weights = jax.jit(aj.asap_attention, static_argnames=("closures", "return_weights"))(
        query, key, value, mask=None if mask is None else problems.array(mask),
        predictor=predictor, spec=spec, closures=num_closures, return_weights=True,
    )  # fmt: skip
    stacked = np.stack([c.head.coefficients for c in corrections], 1)
    loop = reference.batched(
        lambda q, k, w, c, mask: by_hand(
            q, k, w, c, mask, side=side, num_closures=num_closures, spec=spec
        ),
        (problems.heads_first(query), 2), (problems.heads_first(key), 2), (np.asarray(w), 1),
        (stacked, 2), (mask, 2),
    )  # fmt: skip
    np.testing.assert_allclose(weights, loop, atol=1e-10)


def test_the_last_closure_is_never_corrected(rng):
    query, key, value = problems.attention_inputs(rng)
    spec = aj.SinkhornSpec(4)
    predictor = aj.Predictor(
        FAMILIES,
        coefficients=jnp.ones(12),
        corrections=corrections_of(rng, 2, "float32"),
        side="key",
    )
    with pytest.raises(ValueError, match=r"2 correction\(s\) need more than 2 closure\(s\)"):
        aj.asap_attention(query, key, value, predictor=predictor, spec=spec, closures=2)


def test_gradients_reach_the_corrections(rng, x64):
    query, key, value = problems.attention_inputs(rng, dtype="float64")
    corrections = corrections_of(rng, 1)
    w = problems.normal(rng, 3, 12, dtype="float64", size=0.3)

    def loss(w, coefficients):
        one = aj.Correction(FAMILIES, aj.LinearHead(coefficients))
        predictor = aj.Predictor(FAMILIES, coefficients=w, corrections=(one,), side="key")
        out = aj.asap_attention(
            query, key, value, predictor=predictor, spec=aj.SinkhornSpec(4), closures=2
        )
        return jnp.sum(jnp.sin(out))

    exact, measured = problems.slope(loss, (w, corrections[0].head.coefficients), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-6)


@pytest.mark.parametrize("num_steps", [4, 5])
@pytest.mark.parametrize("num_closures", [1, 2, 3])
def test_the_exact_aligned_dual_gives_the_teacher(rng, x64, num_steps, num_closures):
    """Through the whole layer: the teacher's own dual as the prediction, for both endings."""
    spec = aj.SinkhornSpec(num_steps)
    query, key, value = problems.attention_inputs(rng, dtype="float64", batch=1)
    q, k = (jnp.swapaxes(x, -2, -3) for x in (query, key))
    duals = aj.sinkhorn_duals(aj.scores(q, k), spec=spec, before_end=num_closures)
    own = q if duals.aligned_side == "query" else k
    exact = duals.aligned + aj.query_shift(own)
    predictor = aj.Predictor(
        FAMILIES, coefficients=jnp.zeros(12), token_bias=exact[0], side=duals.aligned_side
    )
    settings = dict(spec=spec, return_weights=True)
    out, weights = aj.asap_attention(
        query, key, value, predictor=predictor, closures=num_closures, **settings
    )
    chex.assert_trees_all_close(
        (out, weights), aj.sinkhorn_attention(query, key, value, **settings), atol=1e-12
    )
