"""From a layer's record to normal equations: which rows count, and how much."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj
from asap_jax.fitting import targets
from asap_jax.records import Record, problem

LENGTH, LENGTHS = 6, [6, 4]
FAMILIES = (aj.Moments(),)


def record_of(rng, spec, mask):
    q, k, v = problems.attention_inputs(rng, queries=LENGTH, keys=LENGTH, dtype="float64")
    return Record.of(q, k, v, None, mask, spec)


def by_hand(record, spec, before_end, mask):
    """Features, target, closure validity and curvature of every head of every example."""
    q, k = problems.heads_first(record.query), problems.heads_first(record.key)

    def head(q, k, mask):
        s = reference.scores(q, k)
        mask = reference.full_mask(mask, s.shape)
        valid = reference.feature_validity(mask, spec.padding)
        side, dual = reference.aligned_dual(
            s, num_steps=spec.num_steps, before_end=before_end, mask=mask
        )
        a = reference.close(s, dual, side=side, num_closures=1, mask=mask)
        rows = mask.any(1)
        a = a / np.maximum(a.sum(0 if side == "query" else 1, keepdims=True), 1e-300)
        if side == "key":
            q, k, a, rows, valid = k, q, a.T, mask.any(0), valid[::-1]
        dual = reference.center(dual, valid[0]) + reference.center(
            reference.query_shift(q), valid[0]
        )
        x = reference.moment_features(q, k, query_valid=valid[0], key_valid=valid[1])
        return x, dual, rows, valid[0], np.diag(a.sum(1)) - a @ a.T

    return reference.batched(head, (q, 2), (k, 2), (mask, 2))


@pytest.mark.parametrize("num_steps", [4, 5])
@pytest.mark.parametrize("rows", ["active", "all"])
def test_rows_are_active_tokens_or_all_tokens_in_the_closures(rng, x64, num_steps, rows):
    """Under a key-only mask padded queries take part in the closures; padded keys never do."""
    spec = aj.SinkhornSpec(num_steps)
    mask = problems.key_padding(LENGTHS, LENGTH)
    record = record_of(rng, spec, problems.array(mask))
    sums = targets.layer_sums(record, FAMILIES, target=1, rows=rows)
    x, y, closing, active, _ = by_hand(record, spec, 1, mask)
    keep = active if rows == "active" else closing
    x, y = np.where(keep[..., None], x, 0.0), np.where(keep, y, 0.0)
    np.testing.assert_allclose(sums.gram, np.einsum("bhnf,bhng->hfg", x, x), atol=1e-9)
    np.testing.assert_allclose(sums.moment, np.einsum("bhnf,bhn->hf", x, y), atol=1e-9)
    np.testing.assert_array_equal(sums.num_rows, keep.sum((0, 2)))


@pytest.mark.parametrize("num_steps", [4, 5])
@pytest.mark.parametrize("damping", [0.25, 1.0])
def test_weighted_rows_use_the_curvature_of_one_closure(rng, x64, num_steps, damping):
    spec = aj.SinkhornSpec(num_steps)
    mask = problems.token_padding(LENGTHS, LENGTH)
    record = record_of(rng, spec, problems.array(mask))
    sums = targets.layer_sums(record, FAMILIES, target=1, damping=damping)
    x, y, _, active, curvature = by_hand(record, spec, 1, mask)
    x, y = np.where(active[..., None], x, 0.0), np.where(active, y, 0.0)
    weight = (1 - damping) * curvature + damping * np.eye(LENGTH)
    np.testing.assert_allclose(sums.gram, np.einsum("bhnf,bhnm,bhmg->hfg", x, weight, x), atol=1e-9)
    np.testing.assert_allclose(sums.moment, np.einsum("bhnf,bhnm,bhm->hf", x, weight, y), atol=1e-9)


def test_the_curvature_is_that_of_the_kl_objective(rng, x64):
    """H is the Hessian of the closed objective in the dual, at the teacher's own dual."""
    spec = aj.SinkhornSpec(4)
    record = record_of(rng, spec, None)
    p = problem(record)
    duals = aj.sinkhorn_duals(p.scores, spec=spec)
    objective = lambda f: aj.kl_objective(
        jnp.ones(1), f[..., None], duals.source, p.scores, jnp.zeros_like(f),
        epsilon=1.0, ridge=0.0,
    )  # fmt: skip
    z = problems.normal(rng, *duals.source.shape, dtype="float64")
    _, curved = jax.jvp(jax.grad(objective), (duals.source,), (z,))
    weigh = targets.gauss_newton(p.scores, duals.source, "query", 0.0, jnp.ones(z.shape, bool))
    np.testing.assert_allclose(weigh(z[..., None])[..., 0] / LENGTH, curved, atol=1e-12)
