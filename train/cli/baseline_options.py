"""Command-line options of the attention baselines as their papers ran them."""

import argparse
import dataclasses
from typing import Any

from train.recipes.schema import ESP_FAMILIES, Recipe
from train.runtime.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of ESP attention, and the gradient of released Sinkformer code."""
    group = parser.add_argument_group("baselines as they were run")
    group.add_argument(
        "--esp-slices",
        type=int,
        metavar="L",
        help="ESP: number of random slice directions (default: the recipe's, usually the "
        "coordinate axes of a head)",
    )
    group.add_argument(
        "--inverse-temperature",
        type=float,
        metavar="T",
        help="ESP: inverse temperature of the average over slices (default: the recipe's)",
    )
    group.add_argument(
        "--detach-key-dual",
        action="store_true",
        help="Sinkhorn: no gradient through the key dual, as in the released code of Sinkformers "
        "for text",
    )


def read(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """The changes of the command line to the fields of ``recipe``.

    Raises:
      UserError: a setting of ESP for another attention.
      ValueError: a setting out of range.
    """
    values = {"slices": options.esp_slices, "inverse_temperature": options.inverse_temperature}
    values = {name: value for name, value in values.items() if value is not None}
    changes: dict[str, Any] = {}
    if values and recipe.attention not in ESP_FAMILIES:
        flag = "--esp-slices" if "slices" in values else "--inverse-temperature"
        raise UserError(
            f"{flag} is for --attention {' or '.join(ESP_FAMILIES)}, got {recipe.attention!r}"
        )
    if values:
        changes["esp"] = dataclasses.replace(recipe.esp, **values)
    if options.detach_key_dual:
        changes["detach_key_dual"] = True
    return changes
