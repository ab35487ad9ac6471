"""What every feature family shares: the register of names, and concatenation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

FAMILIES: dict[str, type] = {}


def register(name: str):
    """Class decorator: makes a feature family known to artefacts and options under ``name``."""

    def add(cls):
        FAMILIES[name] = cls
        cls.family = name
        return cls

    return add


def concatenate(
    families: tuple[Any, ...], q, k, *, scale=None, query_valid=None, key_valid=None
) -> jax.Array:
    """All features of ``families`` side by side, ``(..., N, F)``."""
    columns = [
        family(q, k, scale=scale, query_valid=query_valid, key_valid=key_valid)
        for family in families
    ]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1)
