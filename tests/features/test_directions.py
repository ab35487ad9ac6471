"""Slice direction banks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import asap_jax as aj

KINDS = ["gaussian", "orthogonal", "axes"]


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_unit_rows(kind):
    bank = aj.slice_directions(0, 10, 4, kind=kind)
    chex.assert_shape(bank, (10, 4))
    chex.assert_type(bank, jnp.float32)
    np.testing.assert_allclose(np.linalg.norm(bank, axis=-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal"])
def test_a_seed_always_gives_the_same_bank(kind):
    bank = aj.slice_directions(3, 6, 4, kind=kind)
    chex.assert_trees_all_equal(bank, aj.slice_directions(3, 6, 4, kind=kind))
    chex.assert_trees_all_equal(bank, aj.slice_directions(jax.random.key(3), 6, 4, kind=kind))
    assert np.abs(np.asarray(bank) - aj.slice_directions(4, 6, 4, kind=kind)).max() > 0.1


def test_orthogonal_banks_come_in_orthonormal_blocks():
    bank = np.asarray(aj.slice_directions(0, 10, 4, kind="orthogonal"))
    for start in (0, 4, 8):
        block = bank[start : start + 4]
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-5)


def test_gaussian_banks_cover_the_sphere_evenly():
    bank = np.asarray(aj.slice_directions(0, 4000, 3))
    np.testing.assert_allclose(bank.mean(0), 0.0, atol=0.05)
    np.testing.assert_allclose(bank.T @ bank / len(bank), np.eye(3) / 3, atol=0.03)


def test_axis_directions_repeat_in_order():
    np.testing.assert_array_equal(
        aj.slice_directions(0, 5, 3, kind="axes"), np.eye(3)[[0, 1, 2, 0, 1]]
    )


def test_banks_stay_float32_with_64_bit_types(x64):
    for kind in KINDS:
        chex.assert_type(aj.slice_directions(0, 5, 3, kind=kind), jnp.float32)
