"""A table on tiny teachers: it trains, stops, continues, and reads what it has."""

import collections
import dataclasses
import json

import pytest

from train.recipes import catalogue as recipes
from train.runtime.errors import Stopped
from train.study.paper import catalogue, driver, frozen, presets, replacement, rows, runs
from train.study.paper.frozen_tables import FrozenTable

TINY = FrozenTable(
    "tiny",
    "tab:operator_main",
    "A tiny table",
    lambda spec, preset: [*rows.budgets(spec, (3,)), rows.teacher(spec)],
    ("calls", "passes", "time (ms)", "attention rel-l2", "accuracy (%)", "cases"),
    ("time (ms)",),
    score=True,
)


@pytest.fixture
def models(shallow, tmp_path, monkeypatch):
    """The models of a table whose recipe has one tiny layer."""
    recipe = dataclasses.replace(shallow, name="imdb", epochs=1, batch_size=500, drops=())
    for catalogued in (recipes.SMALL, recipes.RECIPES):
        monkeypatch.setitem(catalogued, "imdb", recipe)
    entry = catalogue.Entry("", "", 1, lambda *given: replacement.run(TINY, *given))
    monkeypatch.setitem(catalogue.TABLES, "tiny", entry)
    monkeypatch.setattr(frozen, "CASE_BATCHES", 2)
    preset = dataclasses.replace(presets.PRESETS["small"], test_examples=40)
    return runs.Models(preset, tmp_path / "runs", (0, 1), runs.Data(None))


def test_a_stopped_table_continues_and_a_finished_one_only_reads(models, tmp_path, monkeypatch):
    measured = collections.Counter()
    for name in ("_cases", "_score", "_times"):
        monkeypatch.setattr(frozen.Frozen, name, _counted(getattr(frozen.Frozen, name), measured))
    score = frozen.Frozen._score
    monkeypatch.setattr(frozen.Frozen, "_score", _interrupted)
    with pytest.raises(Stopped, match="stopped in table tiny"):
        driver.run_table("tiny", models, tmp_path / "out")
    assert measured == {"_cases": 1}
    monkeypatch.setattr(frozen.Frozen, "_score", score)
    driver.run_table("tiny", models, tmp_path / "out")
    assert measured == {"_cases": 4, "_score": 4, "_times": 2}  # two rows, two seeds
    first = json.loads((tmp_path / "out" / "tiny.json").read_text())
    again = dataclasses.replace(models, data=runs.Data(None))
    monkeypatch.setattr(runs, "load_data", lambda *given: pytest.fail("read the data"))
    monkeypatch.setattr(runs.loop, "train", lambda *given, **more: pytest.fail("trained"))
    driver.run_table("tiny", again, tmp_path / "out")
    assert sum(measured.values()) == 10
    second = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert second["rows"] == first["rows"]
    three, teacher = first["rows"]
    assert three["metrics"]["rel_l2"]["count"] == 2 * 1 * 2  # batches, layers, seeds
    assert three["metrics"]["rel_l2"]["mean"] > 0
    assert teacher["metrics"]["rel_l2"]["mean"] == 0
    assert teacher["agreement"]["mean"] == 1
    assert three["layer"]["count"] == 2 * presets.ROUNDS
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["imdb-sinkhorn-0", "imdb-sinkhorn-1"]
    text = (tmp_path / "out" / "tiny.md").read_text()
    for part in ("14.14 ± 0.03", "preset: small", "seeds: 0, 1", "date: ", "machine: "):
        assert part in text


def _counted(method, counter):
    def counted(self, given):
        result = method(self, given)
        counter[method.__name__] += 1
        return result

    return counted


def _interrupted(self, row):
    raise KeyboardInterrupt
