"""Training through compiled layers: the refresh of a training state, and the compiled variables."""

from typing import Any

import jax
import numpy as np

import asap_jax as aj
from train.recipes.schema import Recipe
from train.training import factory
from train.training.step import TrainState


def training(recipe: Recipe) -> aj.linen.AmortizedTraining | None:
    """The library's object for the model of a recipe, or None if the recipe does not amortize."""
    settings = recipe.amortize
    if settings is None:
        return None
    return aj.linen.AmortizedTraining(
        factory.build(recipe),
        fit=settings.fit,
        closures=settings.closures,
        ending=settings.ending,
        decay=settings.decay,
    )


def refresh(
    state: TrainState,
    inputs: jax.Array,
    *,
    amortized: aj.linen.AmortizedTraining,
    axis_name: str | None = None,
    accumulate: int = 1,
) -> TrainState:
    """The training state with compiled layers that are fitted again, a pure function.

    Args:
      state: of a run that amortizes.
      inputs: ``(batch, ...)``; if a step computes the batch in parts, only one part is used, so
        that a refresh needs no more memory than a step.
      amortized: see ``training``.
      axis_name: add up the sums over this mapped axis (``jax.pmap``).
      accumulate: number of parts of a batch, see ``train_step``.
    """
    params = {"params": state.params}
    refreshed = amortized.refresh(
        state.amortized, params, inputs[::accumulate], axis_name=axis_name
    )
    return state.replace(amortized=refreshed)


def distances(state: Any) -> dict[str, float]:
    """``rel_l2`` and ``rel_l2_before`` of the latest refresh, mean over the layers.

    Args:
      state: an ``aj.AmortizedState`` of host arrays.
    """
    mean = lambda tree: float(np.mean(jax.tree.leaves(tree)))
    return {"rel_l2": mean(state.rel_l2), "rel_l2_before": mean(state.rel_l2_before)}


def compiled_variables(recipe: Recipe, state: TrainState) -> dict | None:
    """Variables with the compiled layers that a run trained through, or None."""
    amortized = training(recipe)
    if amortized is None:
        return None
    return amortized.variables(state.amortized, {"params": state.params})
