"""The fits: exactly the first M examples, none held out; the control with zero coefficients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import asap_jax as aj
from train.runtime.errors import UserError
from train.study.paper import fits, rows
from train.training.teacher import Teacher


@pytest.mark.parametrize("count", [64, 150])
def test_a_fit_receives_the_first_m_rows_twice_and_holds_none_out(
    minute, examples, monkeypatch, count
):
    received, options = [], []

    def add(self, teacher, batch, index=None):
        received.append(np.asarray(batch))
        options.append(self.options)

    monkeypatch.setattr(aj.linen.Calibration, "add", add)
    row = rows.Compiled("a row", aj.PaperFit(), "two_sided", count)
    fits.fit(Teacher(minute, 3, 0, {"params": {}}), examples, row)
    expected = minute.inputs.prepare(examples.take(slice(count)))
    np.testing.assert_array_equal(np.concatenate(received), np.concatenate([expected] * 2))
    assert {one.holdout for one in options} == {0.0}
    assert {one.seed for one in options} == {3}


def test_more_examples_than_there_are_is_an_error(minute, examples):
    with pytest.raises(UserError, match="first 201 examples needs more than the 200"):
        list(fits.first_batches(minute, examples, 201))


@pytest.mark.parametrize(
    ("num_steps", "closures", "same", "keys"),
    [
        (5, "two_sided", 3, 6),
        (5, "one_sided", 2, 6),
        (20, "two_sided", 4, 6),
        (20, "two_sided", 4, 4),
    ],
)
def test_a_residual_fit_without_residual_is_sinkhorn(num_steps, closures, same, keys):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(3, 1, 6, 2, 4)))
    mask = (jnp.arange(6) < keys)[None, None, None, :]  # padded text: padded queries stay
    spec = aj.SinkhornSpec(num_steps=num_steps, key_mass="unit")
    predictor = aj.Predictor(
        directions=aj.slice_directions(0, 3, 4),
        coefficients=jnp.ones(3),
        token_bias=jnp.ones(6),
        baseline="first_step",
    )
    variables = {"asap": {"layer": {"state": aj.CompiledState(predictor, spec, closures)}}}
    zero = fits.with_zero_coefficients(variables)["asap"]["layer"]["state"]
    assert all(np.all(x == 0) for x in jax.tree.leaves(zero.predictor.head))
    settings = dict(predictor=zero.predictor, spec=spec, closures=closures)
    ours = aj.asap_attention(q, k, v, None, mask, return_weights=True, **settings)
    plain = dataclasses.replace(spec, num_steps=same)
    theirs = aj.sinkhorn_attention(q, k, v, None, mask, spec=plain, return_weights=True)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
