"""The refresh over several seeds: its table, its settings, and which runs fit together."""

import dataclasses
import json

import numpy as np
import pytest

from train.cli import parser
from train.data import tfds
from train.evaluation import compile_teacher
from train.study import refresh as study
from train.training import loop, refresh
from train.training.refresh import Accuracies

SCORES = {
    0: Accuracies(0.90, 0.95, 0.94, 0.96),
    3: Accuracies(0.91, 0.97, 0.95, 0.95),
    5: Accuracies(0.95, 0.96, 0.96, 0.97),
}


@pytest.fixture(scope="module")
def runs(minute, examples, tmp_path_factory):
    """Two seeds of one recipe, and a run of another recipe."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 3):
        loop.train(minute, examples, folder / str(seed), seed=seed, stop_after=1)
    other = dataclasses.replace(minute, learning_rate=0.5)
    loop.train(other, examples, folder / "other", seed=5, stop_after=1)
    return folder


def test_the_table_has_every_seed_and_mean_and_sample_deviation():
    table = study.table(SCORES)
    assert table.headings == ["test accuracy", "seed 0", "seed 3", "seed 5", "mean ± std"]
    values = np.array([0.95, 0.97, 0.96])
    deviation = np.sqrt(((values - values.mean()) ** 2).sum() / 2)
    assert table.rows[1] == [
        "compiled, refreshed",
        "0.9500",
        "0.9700",
        "0.9600",
        f"{values.mean():.4f} ± {deviation:.4f}",
    ]
    (first, *_) = study.table({0: SCORES[0]}).rows
    assert first[1:] == ["0.9000", "0.9000"]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_command_refreshes_every_run_and_writes_the_table(
    runs, monkeypatch, tmp_path, capsys, frozen
):
    seen = []

    def refreshed(teacher, variables, train, test, **settings):
        seen.append((teacher.seed, len(train), len(test), settings))
        return SCORES[teacher.seed]

    class Compiled:
        variables = None

    monkeypatch.setattr(compile_teacher, "compile_teacher", lambda *_, **__: Compiled)
    monkeypatch.setattr(refresh, "run", refreshed)
    monkeypatch.setenv(tfds.VARIABLE, str(tfds.PACKAGED))
    given = ["refresh", str(runs / "0"), str(runs / "3"), "--out", str(tmp_path)]
    assert parser.main([*given, *(["--frozen"] if frozen else [])]) == 0
    settings = dict(frozen=frozen, epochs=5, learning_rate=2e-4)
    assert seen == [(0, 2000, 500, settings), (3, 2000, 500, settings)]
    text = (tmp_path / "refresh.md").read_text()
    assert ("no gradient passes through the sorts" in text) == frozen
    assert "| teacher, trained on for as long | 0.9600 | 0.9500 | 0.9550 ± 0.0071 |" in text
    stored = json.loads((tmp_path / "refresh.json").read_text())
    assert stored["seeds"]["3"]["refreshed"] == 0.97
    assert "compiled, refreshed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "message"),
    [(("0", "other"), "must be of one recipe"), (("3", "3"), r"its own seed, got [3, 3]")],
)
def test_runs_that_do_not_fit_together_are_refused(runs, capsys, names, message):
    assert parser.main(["refresh", *(str(runs / name) for name in names)]) == 1
    assert message in capsys.readouterr().err
