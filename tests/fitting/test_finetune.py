"""Tuning through all closures: the divergence, its coordinates, and what a tuned state does."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from small_models import FIRST, compile_auto, data, teacher

import asap_jax as aj
from asap_jax.fitting import finetune
from asap_jax.records import Record

LENGTH = 6


def record_of(rng, spec, mask=None, batch=2, size=1.5):
    q, k, v = problems.attention_inputs(
        rng, queries=LENGTH, keys=LENGTH, batch=batch, dtype="float64", size=size
    )
    return Record.of(q, k, v, None, mask, spec)


@functools.partial(jax.jit, static_argnums=2)
def matrices(record, predictor, closures):
    """The attention weights of the teacher and those of a predictor."""
    call = dict(mask=record.mask, spec=record.spec, return_weights=True)
    tokens = record.query, record.key, record.value
    _, exact = aj.sinkhorn_attention(*tokens, **call)
    _, predicted = aj.asap_attention(*tokens, predictor=predictor, closures=closures, **call)
    return exact, predicted


@functools.partial(jax.jit, static_argnums=2)
def plan_divergence(record, predictor, closures):
    target = finetune.plan_target(record)
    return finetune.plan_divergence(predictor, record, target, closures=closures)


def divergence(record, predictor, closures):
    """From the two matrices themselves, with their masses."""
    a, b = (np.asarray(x, np.float64) for x in matrices(record, predictor, closures))
    safe = lambda x: np.where(a > 0, x, 1.0)
    terms = a * np.log(safe(a) / safe(b)) - a + b
    return terms.sum((-1, -2)).mean() / LENGTH


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_steps", [4, 5])
@pytest.mark.parametrize("closures", [1, 2, 3])
def test_the_divergence_equals_that_of_the_weight_matrices(rng, x64, num_steps, closures, masked):
    spec = aj.SinkhornSpec(num_steps)
    mask = problems.array(problems.key_padding([6, 4], LENGTH)) if masked else None
    record = record_of(rng, spec, mask)
    head = lambda count: aj.LinearHead(problems.normal(rng, 3, count, dtype="float64", size=0.1))
    corrections = tuple(aj.Correction((aj.Moments(),), head(13)) for _ in range(closures - 1))
    predictor = aj.Predictor(
        (aj.Moments(),), head(12), corrections=corrections, side=spec.side_before_end(closures)
    )
    found = plan_divergence(record, predictor, closures)
    np.testing.assert_allclose(found, divergence(record, predictor, closures), atol=1e-12)


def test_whitened_features_have_unit_second_moments(rng, x64):
    x = rng.normal(size=(2, 3, 50, 5)) * np.array([1.0, 1e3, 1e-3, 1.0, 5.0])

    @jax.jit
    def whitening(x, y):
        sums = aj.NormalEquations.zero(5, num_heads=3, dtype=jnp.float64).add(x, y)
        return sums.whitening()

    white = np.einsum("bhnf,hfg->bhng", x, whitening(x, np.zeros(x.shape[:-1])))
    square = np.einsum("bhnf,bhng->hfg", white, white) / 100
    np.testing.assert_allclose(square, np.broadcast_to(np.eye(5), (3, 5, 5)), atol=1e-9)


@pytest.mark.parametrize("per_head", [False, True])
def test_a_hidden_layer_starts_at_the_linear_head(rng, dtype, per_head):
    lead = (3,) if per_head else ()
    x = problems.normal(rng, 2, 3, 7, 5, dtype=dtype)
    linear = aj.LinearHead(problems.normal(rng, *lead, 5, dtype=dtype))
    whitening = np.broadcast_to(np.eye(5, dtype=dtype), (*lead, 5, 5))
    head = aj.MLPHead.around(linear, whitening, 4, 0)
    evaluate = jax.jit(lambda head, x: head(x))
    expected = np.asarray(evaluate(linear, x))
    chex.assert_trees_all_close(evaluate(head, x), expected, atol=1e-6)
    bias, out = (problems.normal(rng, *lead, 4, dtype=dtype) for _ in range(2))
    moved = head.replace(bias=bias, out=out)
    full = lambda z, *shape: np.broadcast_to(z, (3, *shape))
    inside = np.einsum("bhnf,hfk->bhnk", x, full(head.hidden, 5, 4)) + full(bias, 4)[:, None]
    expected = expected + np.einsum("bhnk,hk->bhn", np.tanh(inside), full(out, 4))
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype.name]
    np.testing.assert_allclose(evaluate(moved, x), expected, atol=tolerance)


@pytest.mark.parametrize("hidden", [0, 4])
def test_tuning_lowers_the_divergence_and_is_never_worse(rng, x64, hidden):
    spec = aj.SinkhornSpec(5)
    records = [record_of(rng, spec, batch=32, size=3.0) for _ in range(4)]
    plain = aj.Candidate("plain", chain=True, coefficients="pooled")
    tuned = aj.Candidate("tuned", chain=True, coefficients="pooled", tuned=15, hidden=hidden)
    before, _ = plain.fit(records, 2)
    after, figures = tuned.fit(records, 2)
    first, last = figures["validation_kl"]
    assert last < 0.98 * first
    assert 0 < figures["tuned_steps"] <= 15
    # The last record validates.
    for predictor, value in ((before, first), (after, last)):
        np.testing.assert_allclose(divergence(records[3], predictor, 2), value, rtol=1e-6)


def test_tuned_states_compile_and_can_be_saved_and_loaded(rng, tmp_path):
    wanted = aj.Candidate("tuned", chain=True, tuned=3, hidden=3)
    result = compile_auto(data(rng), candidates=(wanted,))
    assert result.report.layers[FIRST].fit["tuned_steps"] <= 3
    aj.save(tmp_path / "compiled.npz", result)
    loaded = aj.load(tmp_path / "compiled.npz", like=teacher()[1])
    chex.assert_trees_all_equal(loaded["asap"], dict(result.variables["asap"]))


@pytest.mark.parametrize("settings", [{"tuned": -1}, {"hidden": 4}, {"tuned": True}], ids=str)
def test_tuning_out_of_range_is_refused(settings):
    with pytest.raises(ValueError, match="|".join(settings)):
        aj.Candidate("x", **settings)
