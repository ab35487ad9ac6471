"""Profiles that are measured once and then read, so that a table that was stopped continues."""

import dataclasses
from collections.abc import Callable

from train.runtime import machine
from train.study import cache
from train.study.paper.profile import Profile
from train.study.paper.runs import Models

FOLDER = "profiles"  # in the folder of the run folders


@dataclasses.dataclass(frozen=True)
class Measured:
    """The profiles of all rows at one size, and the seconds of the fits behind them."""

    profiles: dict[str, Profile]
    fit_seconds: dict[str, float] = dataclasses.field(default_factory=dict)


def measured(models: Models, table: str, size: str, measure: Callable[[], Measured]) -> Measured:
    """What ``measure`` gives, or what it gave before on this machine with this preset.

    Args:
      models: their folder holds the files, and their preset the sizes.
      table, size: name the file.
      measure: compiles and runs the programs.
    """
    facts = machine.facts()
    settings = {name: facts[name] for name in ("machine", "device", "versions")}
    settings |= {"preset": repr(models.preset), "seed": models.seeds[0]}
    folder = models.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return cache.cached(folder / f"{table}-{size}.json", settings, measure, _read, again=False)


def _read(stored: dict) -> Measured:
    profiles = {name: Profile(**values) for name, values in stored["profiles"].items()}
    return Measured(profiles, stored["fit_seconds"])
