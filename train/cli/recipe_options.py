"""The recipe that a command line of ``python -m train train`` asks for."""

import argparse
import dataclasses

from train.cli import amortize_options, baseline_options, evaluate_options
from train.recipes import catalogue
from train.recipes.schema import Recipe
from train.runtime.errors import UserError


def read(options: argparse.Namespace) -> Recipe:
    """The recipe, with the changes that the command line asks for.

    Raises:
      UserError: an option that does not fit the recipe, or a value out of range.
    """
    recipe = catalogue.find(options.recipe, options.preset)
    names = ("train_share", "epochs", "batch_size", "learning_rate", "compute_dtype", "accumulate")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.patch_size is not None and recipe.is_text:
        raise UserError(f"recipe {recipe.name!r} reads texts: --patch-size is for image recipes")
    if options.length is not None and not recipe.is_text:
        raise UserError(f"recipe {recipe.name!r} reads images: --length is for text recipes")
    try:
        if options.attention is not None:
            recipe = recipe.with_attention(options.attention)
        amortize = amortize_options.read(options)
        changes |= {} if amortize is None else {"amortize": amortize}
        changes |= baseline_options.read(options, recipe)
        changes["evaluate"] = evaluate_options.read(options, recipe.evaluate)
        for part, name, value in (
            ("spec", "num_steps", options.num_steps),
            ("model", "patch_size", options.patch_size),
            ("inputs", "length", options.length),
        ):
            if value is not None:
                changes[part] = dataclasses.replace(getattr(recipe, part), **{name: value})
        return dataclasses.replace(recipe, **changes)
    except ValueError as fault:
        raise UserError(str(fault)) from fault
