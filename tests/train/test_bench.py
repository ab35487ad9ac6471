"""Benchmarks at toy sizes: what is printed follows from what is compiled."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import pytest

import asap_jax as aj
from train import cli
from train.bench import esp_resources, memory


def test_esp_resources_prints_a_row_per_method_and_length(capsys):
    rows = esp_resources.run(lengths=(4, 8))
    text = capsys.readouterr().out
    assert [row.length for row in rows] == [4] * 6 + [8] * 6
    for name in ("Sinkhorn (S=3)", "Sinkhorn (S=10)", "Sinkhorn (S=20)", "ESP (soft)"):
        assert text.count(name + " ") >= 2, name
    assert all(row.milliseconds > 0 and row.gibibytes > 0 for row in rows)


def test_a_step_beyond_the_limit_is_not_run_and_says_what_it_needs(capsys):
    rows = esp_resources.run(lengths=(4,), limit_gib=0.0)
    assert all(row.milliseconds is None and row.runs == 0 for row in rows)
    assert len(re.findall(r"not run \(needs \d+\.\d GiB\)", capsys.readouterr().out)) == 6


def test_memory_is_that_of_the_compiled_step():
    row = esp_resources.measure("copy", lambda q, k, v: q + k + v, 32)
    array = 32 * esp_resources.HEADS * esp_resources.WIDTH * 4
    assert row.gibibytes * esp_resources.GIB == pytest.approx(4 * array, rel=0.01)


def test_a_train_step_differentiates_all_three_inputs():
    step = esp_resources.step_of(lambda q, k, v: q * k * v, trained=True)
    x = jnp.full((2,), 2.0)
    value, gradients = step(x, x, x)
    assert float(value) == pytest.approx(2 * math.sin(8.0), abs=1e-5)
    expected = jnp.full((2,), 4 * math.cos(8.0))
    chex.assert_trees_all_close(gradients, (expected,) * 3, atol=1e-5)


def test_the_unrolled_comparison_is_the_same_function():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    ours = aj.sinkhorn_attention(q, k, v, spec=aj.SinkhornSpec(7))
    chex.assert_trees_all_close(memory.unrolled(q, k, v, 7), ours, atol=1e-5)


def test_an_unknown_benchmark_lists_the_known(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "nothing"])
    assert "esp-resources" in capsys.readouterr().err
