"""The presets of one recipe, and where every setting of them comes from."""

import dataclasses
from typing import Any

from train.recipes.schema import Recipe
from train.reporting.table import Table

KINDS = ("paper", "data", "assumed")
"""Sources of a setting: the paper states it; it follows from the data set; it is our choice."""
DESCRIPTIONS = ("name", "summary", "cost", "expected", "preset")
"""Fields of a recipe that are not settings of a run."""
OPTIONS = (
    "packaged",
    "compute_dtype",
    "accumulate",
    "amortize",
    "evaluate",
    "esp",
    "detach_key_dual",
)
"""Settings that exist for this program only; always our choice."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """The source of every setting of a recipe.

    A name stands for a setting, such as ``"model.width"``, or for all settings below it, such as
    ``"model"``. If several names fit a setting, the longest counts.

    Attributes:
      paper: what the paper states.
      data: what follows from the data set.
      assumed: what we chose, in addition to ``OPTIONS``.
    """

    paper: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def names(self) -> dict[str, str]:
        """From every name to its source. Raises ValueError for a name with two sources."""
        result = dict.fromkeys(OPTIONS, "assumed")
        for kind in KINDS:
            for name in getattr(self, kind):
                if name in result:
                    raise ValueError(f"{name!r} has the sources {result[name]!r} and {kind!r}")
                result[name] = kind
        return result

    def of(self, setting: str) -> str:
        """The source of a setting. Raises ValueError if it has none."""
        names, name = self.names(), setting
        while name not in names:
            if "." not in name:
                raise ValueError(f"the setting {setting!r} has no source")
            name = name.rpartition(".")[0]
        return names[name]


@dataclasses.dataclass(frozen=True)
class Presets:
    """One recipe in one or two sizes.

    Attributes:
      sources: of the settings of the paper's size, or of the small size if it is the only one.
      paper: the paper's size, or None.
      small: the size for two CPU cores, or None.
    """

    sources: Sources
    paper: Recipe | None = None
    small: Recipe | None = None

    def recipes(self) -> list[Recipe]:
        """The presets that exist, the paper's size first."""
        return [recipe for recipe in (self.paper, self.small) if recipe is not None]

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.recipes()[0].name

    def tags(self, recipe: Recipe) -> dict[str, str]:
        """From every setting of one of the presets to its source.

        A setting of the small preset that differs from the paper's size is our choice.
        """
        first = settings(self.recipes()[0])
        return {
            name: self.sources.of(name) if first.get(name) == value else "assumed"
            for name, value in settings(recipe).items()
        }


def settings(recipe: Recipe) -> dict[str, Any]:
    """All settings of a run by dotted name, such as ``"model.width"``."""
    result = {}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in DESCRIPTIONS:
            continue
        if dataclasses.is_dataclass(value):
            for part in dataclasses.fields(value):
                result[f"{field.name}.{part.name}"] = getattr(value, part.name)
        else:
            result[field.name] = value
    return result


def settings_table(presets: Presets, recipe: Recipe) -> Table:
    """Every setting of a recipe with its value and its source."""
    tags, values = presets.tags(recipe), settings(recipe)
    cells = [[name, str(value), tags[name]] for name, value in values.items()]
    return Table(["setting", "value", "source"], cells, num_names=3)
