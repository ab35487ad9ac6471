"""Sorting by bit patterns is sorting."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asap_jax.features import sorting

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, 3.4e38, -3.4e38, 1.0, -1.0, np.nan, -np.nan]


@given(hnp.arrays(np.float32, (3, 8), elements=st.sampled_from(SPECIAL) | st.floats(width=32)))
def test_sorting_gives_the_order_of_numpy(x):
    np.testing.assert_array_equal(sorting.ascending(problems.array(x)), np.sort(x, axis=-1))


def test_float64_values_are_sorted(rng, x64):
    x = rng.normal(size=(2, 50)) * 10.0 ** rng.integers(-300, 300, (2, 50))
    np.testing.assert_array_equal(sorting.ascending(problems.array(x)), np.sort(x))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f))])
def test_values_and_derivatives_are_right_under_transforms(rng, transform):
    x, t = (problems.array(rng.normal(size=(4, 9)), jnp.float32) for _ in range(2))
    loss = lambda x: jnp.sum(sorting.ascending(x) ** 3 * jnp.arange(9.0))
    order = np.argsort(x, axis=-1)
    expected = np.zeros(x.shape, np.float32)
    slope = 3 * np.sort(x, axis=-1) ** 2 * np.arange(9.0, dtype=np.float32)
    np.put_along_axis(expected, order, slope, axis=-1)
    rows = jax.vmap(jax.grad(loss))
    chex.assert_trees_all_close(transform(rows)(x) if transform is jax.jit else rows(x), expected)
    push = jax.jvp(transform(sorting.ascending), (x,), (t,))
    expected = (np.sort(x, axis=-1), np.take_along_axis(np.asarray(t), order, axis=-1))
    chex.assert_trees_all_close(push, expected)
