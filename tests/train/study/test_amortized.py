"""The study of training through compiled layers: its ways, its times, what it writes."""

import dataclasses
import itertools
import json

import pytest

from train.cli import parser
from train.data import tfds
from train.recipes import catalogue
from train.study import amortized


@pytest.fixture(scope="module")
def small(minute):
    """Four steps, in batches so large that a run has a handful of steps."""
    spec = dataclasses.replace(minute.spec, num_steps=4)
    return dataclasses.replace(minute, name="small", spec=spec, batch_size=500, epochs=5)


def test_every_way_changes_only_what_it_trains_through(small):
    ways = amortized.ways(small, every=7)
    assert list(ways) == [
        "Sinkhorn S=4",
        "compiled, 2 closures",
        "compiled, 1 closure, row ending",
        "Sinkhorn S=2",
        "softmax",
    ]
    assert ways["Sinkhorn S=4"] == small
    for name, recipe in ways.items():
        plain = dataclasses.replace(recipe, amortize=None, attention="sinkhorn", spec=small.spec)
        assert plain == small
        assert (recipe.amortize is not None) == name.startswith("compiled")
    one = ways["compiled, 1 closure, row ending"].amortize
    assert (one.every, one.closures, one.ending) == (7, 1, "row")


def test_a_run_has_about_the_steps_asked_for_and_drops_its_rate_in_proportion():
    recipe = catalogue.DEMO  # 40 steps per epoch, 50 epochs, a drop after 38
    short = amortized.of_length(recipe, 2000, 410)
    assert (short.epochs, short.drops) == (10, (8,))
    assert amortized.of_length(recipe, 2000, 2000) == recipe
    assert amortized.of_length(recipe, 2000, 1).epochs == 1


def test_seconds_leave_out_compilation_resumption_and_a_pause():
    line = lambda step, seconds: {"step": step, "seconds": seconds}
    steady = [line(20 * i, 30.0 + 2.0 * i) for i in range(1, 41)]  # 30 s of compilation
    assert amortized.seconds_of(steady) == pytest.approx(80.0)
    paused = [line(x["step"], x["seconds"] + 50.0 * (x["step"] > 400)) for x in steady]
    assert amortized.seconds_of(paused) == pytest.approx(80.0)
    resumed = [line(x["step"], x["seconds"] - 40.0 * (x["step"] > 400)) for x in steady]
    assert amortized.seconds_of(resumed) == pytest.approx(80.0)
    assert amortized.seconds_of(steady[:1]) == 32.0


@pytest.mark.slow
def test_the_study_trains_tests_and_writes(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(catalogue.SMALL, "small", small)
    monkeypatch.setitem(catalogue.RECIPES, "small", small)
    ways = amortized.ways
    few = lambda recipe, every: dict(itertools.islice(ways(recipe, every).items(), 2))
    monkeypatch.setattr(amortized, "ways", few)
    monkeypatch.setenv(tfds.VARIABLE, str(tmp_path / "nowhere"))  # packaged recipes read their own
    runs, out = str(tmp_path / "runs"), str(tmp_path / "out")
    given = ["study", "amortized", "small", "--seeds", "3", "--steps", "8", "--every", "2"]
    given += ["--test-examples", "100", "--runs", runs, "--out", out]
    assert parser.main(given) == 0
    printed = capsys.readouterr().out
    stored = json.loads((tmp_path / "out" / "amortized.json").read_text())
    plain, compiled = stored["runs"]["small"]
    assert (plain["way"], plain["seed"]) == ("Sinkhorn S=4", 3)
    assert plain["tested"]["own"] == plain["tested"]["sinkhorn"]
    assert (plain["tested"]["agreement"], plain["tested"]["examples"]) == (1.0, 100)
    assert plain["rel_l2"] is None
    assert 0 < compiled["rel_l2"] < 1
    assert compiled["seconds"] > 0
    text = (tmp_path / "out" / "amortized.md").read_text()
    for part in ("compiled, 2 closures", "2 epochs, 8 steps of 500 images", "seeds: 3"):
        assert part in text
        assert part in printed
    # A study that is repeated reads its runs.
    monkeypatch.setattr(amortized.loop.devices, "fakes_devices", lambda: pytest.fail("trained"))
    assert parser.main(given) == 0
