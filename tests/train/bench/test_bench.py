"""Benchmarks at toy sizes: what is printed follows from what is compiled."""

import json
import math
import time

import chex
import jax
import jax.numpy as jnp
import pytest

import asap_jax as aj
from train.bench import esp_resources, features, floor, layer, long, memory_gradient, peers, trace
from train.bench.measure import DENSE, GIB, measure, table, value_and_gradients
from train.cli import parser
from train.runtime import machine, timing
from train.runtime.errors import UserError


def test_esp_resources_prints_and_writes_a_row_per_method_and_length(tmp_path, capsys):
    rows = esp_resources.run(lengths=(4,), out=tmp_path)
    text = capsys.readouterr().out
    names = ["Sinkhorn (S=3)", "Sinkhorn (S=10)", "Sinkhorn (S=20)"]
    for name in ("ESP (soft)", "ESP (released hard)"):
        names += [name, f"{name}, all slices at once"]
    names += ["ESP (exact hard), forward"]
    assert [(row.shape, row.name) for row in rows] == [("N=4", name) for name in names]
    assert all(f"| N=4 | {name} | " in text for name in names)
    assert all(row.milliseconds > 0 and row.whole_gibibytes > 0 for row in rows)
    assert all(f"{row.milliseconds:.1f} ({row.calls})" in text for row in rows)
    assert text.split("\n- ")[0] in (tmp_path / "esp-resources.md").read_text()


def test_memory_is_that_of_the_compiled_step():
    (row,) = measure("x", (1, 32, 8, 64), {"copy": lambda q, k, v: q + k + v}, rounds=1)
    array = 32 * 8 * 64 * 4
    assert row.whole_gibibytes * GIB == pytest.approx(4 * array, rel=0.01)


def test_a_train_step_differentiates_all_three_inputs():
    step = value_and_gradients(lambda q, k, v: q * k * v)
    x = jnp.full((2,), 2.0)
    value, gradients = step(x, x, x)
    assert float(value) == pytest.approx(2 * math.sin(8.0), abs=1e-5)
    expected = jnp.full((2,), 4 * math.cos(8.0))
    chex.assert_trees_all_close(gradients, (expected,) * 3, atol=1e-5)


def test_the_unrolled_comparison_is_the_same_function(capsys):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
    ours = aj.sinkhorn_attention(q, k, v, spec=aj.SinkhornSpec(7))
    chex.assert_trees_all_close(memory_gradient.unrolled(q, k, v, num_steps=7), ours, atol=1e-5)
    rows = memory_gradient.run(3, shape=(1, 4, 1, 2), rounds=1)
    assert [row.shape for row in rows] == ["forward"] * 2 + ["value and gradient"] * 2
    assert "S=3, batch 1, 4 tokens" in capsys.readouterr().out


def test_long_inputs_are_compared_with_softmax_in_blocks(tmp_path):
    rows = long.run((6,), rounds=1, out=tmp_path)
    assert [row.name for row in rows][:2] == [long.BASE, "one closure, row ending"]
    assert rows[0].ratio == 1.0
    for row in rows:
        assert row.ratio == pytest.approx(row.milliseconds / rows[0].milliseconds)
    stored = json.loads((tmp_path / "long.json").read_text())
    assert [row["name"] for row in stored["rows"]] == [row.name for row in rows]


def test_the_layer_benchmark_writes_what_it_prints(tmp_path, capsys):
    rows = layer.run(lengths=(8,), shapes=(), rounds=1, out=tmp_path)
    text = capsys.readouterr().out
    for name in ("softmax, divided late", "Sinkhorn S=20", "ASAP n=2, moments", layer.ONE_CALL):
        assert f"| N=8 | {name} |" in text
    assert all(row.milliseconds > 0 for row in rows)
    dense = min(row.milliseconds for row in rows if row.name in DENSE)
    assert all(row.ratio == pytest.approx(row.milliseconds / dense) for row in rows)
    stored = json.loads((tmp_path / "layer.json").read_text())
    assert [row["name"] for row in stored["rows"]] == [row.name for row in rows]
    assert "| N=8 | Sinkhorn S=20 |" in (tmp_path / "layer.md").read_text()
    assert all(row.low <= row.milliseconds <= row.high for row in rows)
    assert {"ESP, soft", "ESP, hard"} <= {row.name for row in rows}
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_named_shapes_and_sharp_scores_are_measured_on_request(monkeypatch, capsys):
    seen, measured = [], measure

    def watched(name, shape, rows, **settings):
        seen.append((name, shape, settings["sharpness"]))
        return measured(name, shape, rows, **settings)

    monkeypatch.setattr(layer, "measure", watched)
    monkeypatch.setattr(layer, "methods", lambda *_: {"plain": layer.softmax_plain})
    monkeypatch.setattr(layer, "NAMED", {"text": (1, 4, 1, 2)})
    monkeypatch.setattr(layer, "SHARP", (4, 30.0))
    rows = layer.run(lengths=(), shapes=("text", "sharp"), rounds=1)
    assert seen == [("text", (1, 4, 1, 2), 1.0), ("N=4, sharp", (1, 4, 8, 64), 30.0)]
    assert [row.shape for row in rows] == ["text", "N=4, sharp"]
    assert "text: batch 1, 4 tokens, 1 heads, head_dim 2" in capsys.readouterr().out


def test_sharpness_is_a_factor_of_the_first_input():
    lines = []
    watch = lambda q, k, v: jax.debug.callback(lambda *x: lines.append(x), q, k) or q + k + v
    for sharpness in (1.0, 8.0):
        measure("x", (1, 3, 1, 2), {"watched": watch}, rounds=1, sharpness=sharpness)
    jax.effects_barrier()
    (q, k), (sharp_q, sharp_k) = lines[0], lines[-1]
    chex.assert_trees_all_close(sharp_q, 8 * q)
    chex.assert_trees_all_equal(sharp_k, k)


def test_the_prediction_alone_is_timed_together_with_softmax(tmp_path):
    rows = features.run(lengths=(8,), rounds=1, out=tmp_path)
    names = [row.name for row in rows]
    assert names == [*DENSE, "prediction, moments", "prediction, 32 slices"]
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    (predictor,) = (p for name, p in layer.predictors(4).items() if name == "moments")
    dual = features.prediction(predictor, q, k, v)
    chex.assert_shape(dual, (1, 2, 8))
    chex.assert_trees_all_close(dual.mean(-1), jnp.zeros((1, 2)), atol=1e-6)
    assert (tmp_path / "features.md").exists()


def test_the_floor_is_two_products_and_ratios_are_to_it(tmp_path):
    rows = {row.name: row for row in floor.run(lengths=(8,), rounds=1, out=tmp_path)}
    assert next(iter(rows)) == floor.PRODUCTS
    assert rows[floor.PRODUCTS].ratio == 1
    assert set(floor.COMPARED) < set(rows)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    both = floor.products(lambda s: s, q, k, v)
    chex.assert_trees_all_close(both, jnp.einsum("bnhd,bmhd,bmhe->bnhe", q, k, v), atol=1e-5)
    assert (tmp_path / "floor.md").exists()


def test_every_instruction_of_a_program_belongs_to_a_part_of_the_method():
    like = [jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.float32)] * 3
    both = {"scores", "exponentials", "values", "closures"}
    for name, expected in (("ASAP n=2, moments", both | {"prediction"}), ("Sinkhorn S=10", both)):
        text = jax.jit(layer.methods(16)[name]).lower(*like).compile().as_text()
        parts = trace.parts_of(text, 40)
        assert expected <= set(parts.values()) <= expected | {"moving data", "rest"}


def test_a_trace_measures_the_parts_of_a_call(tmp_path, capsys):
    found = trace.run(lengths=(40,), calls=2, out=tmp_path)
    assert set(found["N=40"]) == set(trace.COMPARED)
    for name, row in found["N=40"].items():
        assert set(row) == {"call", *trace.PARTS}
        assert all(row[part] > 0 for part in ("call", "scores", "values", "exponentials"))
        assert (row["prediction"] > 0) == ("moments" in name)
    assert "| scores (queries times keys) |" in capsys.readouterr().out
    assert json.loads((tmp_path / "trace.json").read_text())["rows"] == found
    assert (tmp_path / "trace.md").exists()


def test_a_length_equal_to_the_width_of_a_head_is_refused_by_the_trace():
    with pytest.raises(UserError, match="other than 64"):
        trace.run(lengths=(512, 64))


def test_a_row_that_needs_too_much_memory_is_not_run():
    rows = {"softmax, divided late": layer.softmax_late, "plain": layer.softmax_plain}
    measured = measure("N=4", (1, 4, 1, 2), rows, rounds=1, limit_gib=-1.0)
    assert all(row.milliseconds is None and row.ratio is None for row in measured)
    assert "not run (needs 0.0 GiB)" in table(measured).markdown()
    assert "not run (needs 0.0 GiB)" in esp_resources.table(measured).markdown()
    assert all(row.calls == 0 for row in measured)


@pytest.mark.parametrize("num_steps", [4, 10])
def test_the_peers_compute_the_same_attention(num_steps):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 6, 2, 4))
    ours = aj.sinkhorn_attention(q, k, v, spec=aj.SinkhornSpec(num_steps))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = peers.ott_attention(q, k, v, num_steps=num_steps)
    chex.assert_trees_all_close(ours, theirs, atol=2e-6)
    chex.assert_trees_all_close(
        layer.softmax_late(q, k, v), layer.softmax_plain(q, k, v), atol=1e-6
    )


def test_short_calls_are_queued_until_they_fill_the_window():
    calls = []
    short = lambda: calls.append(1) or time.sleep(1e-3)
    (times,) = timing.samples({"short": short}, rounds=2, window=20.0).values()
    assert len(times) == 2
    assert 2 + 2 * 3 < len(calls) <= 2 + 2 * 20  # two calls before, then two samples
    assert all(1 <= milliseconds < 20 for milliseconds in times)


def test_a_setting_that_a_benchmark_does_not_take_is_refused(capsys):
    assert parser.main(["bench", "import", "--lengths", "8"]) == 1
    assert "bench import takes no --lengths" in capsys.readouterr().err


def test_an_unknown_benchmark_lists_the_known(capsys):
    with pytest.raises(SystemExit):
        parser.main(["bench", "nothing"])
    assert "esp-resources" in capsys.readouterr().err


def test_facts_hold_the_settings_of_the_allocator(monkeypatch):
    for name in machine.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert "allocator" not in machine.facts()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "5")
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert machine.facts()["allocator"] == "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=5"
