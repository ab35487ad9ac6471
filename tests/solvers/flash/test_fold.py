"""The bias inside the head dimension."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from asap_jax.solvers.flash import fold
from asap_jax.solvers.flash.kernel import MASKED


def log_sum_exp(folded):
    q, k, centre = (np.asarray(x, np.float64) for x in folded)
    return np.log(np.exp(q @ np.swapaxes(k, -1, -2)).sum(-1)) + centre


@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", 2e-6), ("bfloat16", 2e-6), ("float16", 6.2e-5)]
)
def test_the_folded_bias_is_as_exact_as_the_true_one(rng, dtype, error):
    q, k = problems.per_head(rng, queries=40, keys=30, dim=5, dtype=dtype)
    bias = problems.normal(rng, *k.shape[:-1], size=2) - 20
    bias = bias.at[..., 25:].set(MASKED)
    folded = jax.jit(fold.fold)(q, k, bias)
    assert folded.q.dtype == folded.k.dtype == q.dtype
    assert folded.q.shape[-1] == fold.width(5) == 8
    scores = np.asarray(q, np.float64) @ np.swapaxes(np.asarray(k, np.float64), -1, -2)
    exact = np.log(np.exp(scores + np.asarray(bias, np.float64)[..., None, :]).sum(-1))
    np.testing.assert_allclose(log_sum_exp(folded), exact, rtol=0, atol=error)


def test_parts_are_exact_in_half_precision_and_add_up(rng):
    bias = problems.normal(rng, 1000, size=30)
    for dtype in (jnp.float32, jnp.bfloat16):
        parts = jax.jit(fold.parts, static_argnums=1)(bias, dtype)
        assert len(parts) == fold.PARTS
        for part in parts:
            np.testing.assert_array_equal(part, part.astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_allclose(sum(parts), bias, rtol=2e-7)


def test_the_gradient_of_the_bias_is_that_of_its_first_channel(rng):
    q, k = problems.per_head(rng)
    bias, weights = problems.normal(rng, *k.shape[:-1]), problems.normal(rng, 2, 3, 7, 5)

    def loss(bias):
        x = fold.fold(q, k, bias)
        return jnp.sum(weights * (x.q @ jnp.swapaxes(x.k, -1, -2)))

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(bias), weights.sum(-2), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_example_without_keys_is_finite(rng, dtype):
    q, k = problems.per_head(rng, dtype=dtype)
    folded = fold.fold(q, k, jnp.full(k.shape[:-1], MASKED))
    assert all(np.isfinite(x).all() for x in folded)
    assert (np.asarray(folded.centre) == 0).all()
