"""Builds the model of a recipe, with any family of attention."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import asap_jax as aj
from train.models.text_encoder import TextEncoder
from train.models.vit import AttentionFactory, VisionTransformer
from train.recipes.schema import Recipe

ESP_SCHEDULES = {"esp": "init", "esp_annealed": "sharp"}
"""From a family to the name of the schedule of SoftSort's temperature in training."""


@functools.cache  # so that equal models share their compiled programs
def attention(family: str, spec: aj.SinkhornSpec) -> AttentionFactory:
    """The factory of a model's attention functions at evaluation.

    Args:
      family: ``"sinkhorn"`` (a module that records and can be compiled), ``"softmax"``,
        ``"diff"``, ``"esp"`` or ``"esp_annealed"`` (both sort exactly).
      spec: settings of Sinkhorn attention; ESP uses its ``padding``.
    """
    if family in ESP_SCHEDULES:
        return lambda layer: aj.linen.EspAttention(mode="hard", padding=spec.padding)
    return {
        "softmax": lambda layer: aj.softmax_attention,
        "sinkhorn": lambda layer: aj.linen.SinkhornAttention(spec),
        "diff": lambda layer: aj.linen.DiffAttention(depth=layer),
    }[family]


def build(
    recipe: Recipe, factory: AttentionFactory | None = None
) -> VisionTransformer | TextEncoder:
    """The model of a recipe.

    Args:
      recipe: the recipe of the teacher.
      factory: replaces the recipe's attention. The parameter tree stays the same.
    """
    factory = factory or attention(recipe.attention, recipe.spec)
    dtype = jnp.dtype(recipe.compute_dtype)
    if recipe.is_text:
        vocabulary = recipe.inputs.vocab_size
        return TextEncoder(recipe.num_classes, vocabulary, recipe.model, factory, dtype)
    return VisionTransformer(recipe.num_classes, recipe.model, factory, dtype)


def training(
    recipe: Recipe, num_steps: int
) -> Callable[[jax.Array], VisionTransformer | TextEncoder]:
    """A function from the training step, which may be traced, to the model at that step.

    Only ESP attention is built differently in training: it sorts softly, and its temperature is
    constant (``"esp"``) or depends on the step (``"esp_annealed"``).

    Args:
      recipe: the recipe of the teacher.
      num_steps: steps of the whole run, over which the temperature is annealed.
    """
    if recipe.attention not in ESP_SCHEDULES:
        model = build(recipe)
        return lambda step: model
    name = ESP_SCHEDULES[recipe.attention]
    schedule = aj.esp_temperature_schedule(name, num_steps=num_steps)
    padding = recipe.spec.padding

    def at(step):
        soft = lambda layer: aj.linen.EspAttention(temperature=schedule(step), padding=padding)
        return build(recipe, soft)

    return at
