"""The compiled program of a forward pass, shared between compiles of equal models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.cache
def _shared(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, static_argnums=0)


def bind(function: Callable[..., Any], run: Any, *, share: bool) -> Callable[..., Any]:
    """``function`` with ``run`` as its first argument, under ``jax.jit``.

    With ``share``, calls with equal ``run`` share their programs, which JAX then keeps. Without it,
    or if ``run`` has no hash (a model with arrays), the programs live as long as the result.
    """
    try:
        hash(run)
    except TypeError:
        share = False
    if share:
        return functools.partial(_shared(function), run)
    return jax.jit(functools.partial(function, run))
