"""Builds the model of a recipe, with any family of attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import asap_jax as aj
from train.models.text_encoder import TextEncoder
from train.models.vit import AttentionFactory, VisionTransformer
from train.recipes.esp import Esp
from train.recipes.schema import ESP_FAMILIES, Recipe

ESP_SCHEDULES = {"esp": "init", "esp_annealed": "sharp"}
"""From a family to the name of the schedule of SoftSort's temperature in training."""


@functools.cache  # so that equal models share their compiled programs
def attention(
    family: str,
    spec: aj.SinkhornSpec,
    *,
    esp: Esp | None = None,
    head_dim: int | None = None,
    detach_key_dual: bool = False,
) -> AttentionFactory:
    """The factory of a model's attention functions at evaluation.

    Args:
      family: ``"sinkhorn"`` (a module that records and can be compiled), ``"softmax"``,
        ``"diff"``, ``"esp"`` or ``"esp_annealed"`` (both sort exactly).
      spec: settings of Sinkhorn attention; ESP uses its ``padding``.
      esp, head_dim: settings of ESP attention, and the width of a head; for ESP only.
      detach_key_dual: see ``aj.sinkhorn_attention``; for Sinkhorn only.
    """
    if family in ESP_FAMILIES:
        return lambda layer: _esp(esp, head_dim, spec.padding, mode="hard")
    return {
        "softmax": lambda layer: aj.softmax_attention,
        "sinkhorn": lambda layer: aj.linen.SinkhornAttention(spec, detach_key_dual=detach_key_dual),
        "diff": lambda layer: aj.linen.DiffAttention(depth=layer),
    }[family]


def esp(recipe: Recipe, **settings: Any) -> aj.linen.EspAttention:
    """ESP attention as the recipe has it; ``settings`` are further ones of the module."""
    return _esp(recipe.esp, recipe.model.head_dim, recipe.spec.padding, **settings)


def _esp(esp, head_dim, padding, **settings) -> aj.linen.EspAttention:
    directions = None if esp.slices is None else aj.slice_directions(0, esp.slices, head_dim)
    return aj.linen.EspAttention(
        directions=directions,
        inverse_temperature=esp.inverse_temperature,
        padding=padding,
        **settings,
    )


def build(
    recipe: Recipe, factory: AttentionFactory | None = None
) -> VisionTransformer | TextEncoder:
    """The model of a recipe.

    Args:
      recipe: the recipe of the teacher.
      factory: replaces the recipe's attention. The parameter tree stays the same.
    """
    factory = factory or attention(
        recipe.attention,
        recipe.spec,
        esp=recipe.esp,
        head_dim=recipe.model.head_dim,
        detach_key_dual=recipe.detach_key_dual,
    )
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
    temperature = esp_temperature(recipe, num_steps)
    return lambda step: build(recipe, lambda layer: esp(recipe, temperature=temperature(step)))


def esp_temperature(recipe: Recipe, num_steps: int) -> optax.Schedule:
    """The temperature of SoftSort at every step of a run of ``num_steps`` steps."""
    return aj.esp_temperature_schedule(ESP_SCHEDULES[recipe.attention], num_steps=num_steps)
