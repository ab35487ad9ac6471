"""All recipes: the paper's experiments at the paper's size, and presets for two CPU cores.

``python -m train recipes`` lists them with cost and expected accuracy.
"""

from train.recipes import ag_news, cats_vs_dogs, cifar, dbpedia, fashion_mnist, imdb, mnist, yelp
from train.recipes.fashion_mnist import DEMO
from train.recipes.presets import Presets
from train.recipes.schema import Recipe
from train.runtime.errors import UserError

__all__ = ["DEMO", "PRESETS", "RECIPES", "SMALL", "Recipe", "find", "listed", "presets"]

_FILES = (fashion_mnist, mnist, cats_vs_dogs, cifar, ag_news, imdb, dbpedia, yelp)
PRESETS = {entry.name: entry for file in _FILES for entry in file.PRESETS}
"""From the name of a recipe to its presets."""
RECIPES = {name: entry.recipes()[0] for name, entry in PRESETS.items()}
"""From the name of a recipe to its default size: the paper's, if there is one."""
SMALL = {name: entry.small for name, entry in PRESETS.items() if entry.small is not None}


def find(name: str, preset: str | None = None) -> Recipe:
    """The recipe with this name and size.

    Args:
      name: name on the command line.
      preset: ``"paper"``, ``"small"``, or None for paper if the recipe has both.

    Raises:
      UserError: there is no such recipe or size; the message lists those that exist.
    """
    if name not in RECIPES:
        raise UserError(f"no recipe {name!r}: choose one of {', '.join(sorted(RECIPES))}")
    recipe = SMALL.get(name) if preset == "small" else RECIPES[name]
    if recipe is None or preset not in (None, recipe.preset):
        known = sorted({size[name].preset for size in (RECIPES, SMALL) if name in size})
        raise UserError(f"recipe {name!r} has no preset {preset!r}, only {', '.join(known)}")
    return recipe


def presets(name: str) -> Presets:
    """The presets of a recipe. Raises UserError if there is no such recipe."""
    find(name)
    return PRESETS[name]


def listed() -> list[Recipe]:
    """Every recipe once, sorted by name, the paper's size first."""
    return [recipe for name in sorted(PRESETS) for recipe in PRESETS[name].recipes()]
