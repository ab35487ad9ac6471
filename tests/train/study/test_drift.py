"""The drift study: its inputs, and what the command writes."""

import dataclasses
import json

import numpy as np

import asap_jax as aj
from train.cli import parser
from train.data.text import PAD, SPECIAL
from train.study import drift_inputs
from train.training import loop


def test_random_tokens_have_the_padding_of_the_texts(rng):
    tokens = np.where(np.arange(6) < [[6], [2], [1]], 7, PAD).astype(np.int32)
    drawn = drift_inputs.random_tokens(tokens, 50)
    np.testing.assert_array_equal(drawn == PAD, tokens == PAD)
    active = drawn[drawn != PAD]
    assert active.min() >= len(SPECIAL)
    assert active.max() < 50
    assert len(set(active)) > 3


def test_samples_are_always_the_same_and_in_order():
    chosen = drift_inputs.sampled(50, 10)
    np.testing.assert_array_equal(chosen, drift_inputs.sampled(50, 10))
    assert (np.diff(chosen) > 0).all()
    assert (len(chosen), len(drift_inputs.sampled(4, 10))) == (10, 4)


def test_the_study_measures_scales_and_other_inputs(minute, examples, tmp_path, capsys):
    recipe = dataclasses.replace(minute, spec=aj.SinkhornSpec(num_steps=3))
    run = tmp_path / "run"
    loop.train(recipe, examples, run, seed=3)
    settings = ["--test-examples", "20", "--calibration", "60", "--out", str(tmp_path)]
    assert parser.main(["study", "drift", str(run), *settings]) == 0
    rows = json.loads((tmp_path / "drift.json").read_text())["rows"]
    own = drift_inputs.OWN
    shifted = [f"{own}, queries x {scale}" for scale in ("1.5", "2", "3")]
    assert [row["inputs"] for row in rows] == [own, *shifted, "random pixels"]
    plain, *_, tripled, _ = rows
    assert set(plain["rel_l2"]) == {
        *(f"{name}, n={n}" for name in ("moments", "guard", "scales") for n in (1, 2)),
        "Sinkhorn S=2",
    }
    assert all(0 < x < 2 for row in rows for x in row["rel_l2"].values())
    assert not plain["recalibrate"]
    assert tripled["recalibrate"]
    assert 2.5 < tripled["score_ratio"] < 3.5  # of the head farthest from 1, not always the same
    cell = f"{plain['rel_l2']['moments, n=1']:.3f}"
    assert f"| {own} | {cell} |" in (tmp_path / "drift.md").read_text()
    assert "recalibrate" in capsys.readouterr().out
