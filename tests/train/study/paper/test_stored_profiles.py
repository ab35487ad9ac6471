"""Profiles are measured once for a preset and a machine, and then read."""

import dataclasses

from train.runtime import machine
from train.study.paper.presets import PRESETS
from train.study.paper.profile import Profile
from train.study.paper.runs import Data, Models
from train.study.paper.stored_profiles import Measured, measured


def test_profiles_are_read_until_the_preset_or_the_machine_changes(tmp_path, monkeypatch):
    models = Models(PRESETS["small"], tmp_path / "runs", (0,), Data(None))
    found = Measured({"row": Profile(0.5, None, 2.0, 0.1, 10), "large": Profile(None)}, {"row": 1})
    count = []

    def measure():
        count.append(1)
        return found

    for _ in range(2):
        assert measured(models, "table", "500", measure) == found
    assert len(count) == 1
    measured(models, "table", "1000", measure)
    paper = dataclasses.replace(models, preset=PRESETS["paper"])
    measured(paper, "table", "500", measure)
    monkeypatch.setattr(machine, "processor", lambda: "another")
    measured(paper, "table", "500", measure)
    assert len(count) == 4
