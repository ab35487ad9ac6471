"""A few problems at a time: how many, and the same result as all at once."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import asap_jax as aj
from asap_jax.solvers import batching


@pytest.mark.parametrize(
    ("lead", "kernel", "limit", "expected"),
    [
        ((4, 8), 100, 10_000, (4, 8)),  # all at once
        ((4, 8), 100, 1_600, (2, 8)),  # heads whole, two examples
        ((4, 8), 100, 500, (1, 4)),  # half the heads of one example
        ((4, 8), 100, 10, (1, 1)),  # one problem even where it does not fit
        ((3, 7), 100, 500, (1, 1)),  # only divisors
        ((2, 1, 6), 10, 120, (2, 1, 6)),
        ((), 10, 1, ()),
    ],
)
def test_group_sizes_follow_the_memory_limit(lead, kernel, limit, expected):
    assert batching.group_sizes(lead, kernel, limit) == expected


@pytest.mark.parametrize("step", [(1, 1), (1, 3), (2, 1), (2, 2), (4, 6)])
def test_mapping_over_groups_equals_one_call(rng, step):
    x, shared, head = (rng.normal(size=s).astype("f") for s in ((4, 6, 5), (1, 1, 5), (1, 6, 1)))

    def function(x, shared, head, nothing):
        assert nothing is None
        assert x.shape[:2] == step
        return jnp.cumsum(x * shared, -1) + head

    out = batching.map_groups(function, (x, shared, head, None), (4, 6), step)
    np.testing.assert_allclose(out, np.cumsum(x * shared, -1) + head, rtol=1e-5)


def test_attention_in_groups_equals_one_call_with_its_gradient(rng, monkeypatch):
    q, k, v = problems.attention_inputs(rng, queries=6, keys=6, batch=4)
    bias = problems.normal(rng, 1, 3, 6, 6)
    mask = problems.array(problems.random_mask(rng, 4, 1, 1, 6))

    def results():
        function = functools.partial(aj.sinkhorn_attention, mask=mask, spec=aj.SinkhornSpec(5))
        return problems.graded(function, (0, 1, 2, 3))(q, k, v, bias)

    monkeypatch.setattr(batching, "ELEMENTS", {})
    whole = results()
    for limit in (36, 108):  # one head, and all heads of an example
        monkeypatch.setattr(batching, "ELEMENTS", {jax.default_backend(): limit})
        chex.assert_trees_all_close(results(), whole, atol=1e-5)
