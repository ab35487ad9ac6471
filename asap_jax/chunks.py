"""Working through many problems a few at a time.

A layer is ``batch x heads`` independent problems. On a CPU it pays to finish a few of them, whose
kernels fit the cache, before the next; memory then holds a few kernels instead of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

ELEMENTS = {"cpu": 2**19}
"""Kernel entries of the problems done at a time, by backend (2 MiB in float32): on CPUs fewer leave
small problems too short for the cores, more leave the cache. Other backends do all at once."""


def sizes(lead: tuple[int, ...], kernel_size: int, limit: int | None = None) -> tuple[int, ...]:
    """How many problems of each leading axis are done at a time.

    Args:
      lead: leading axes, ``(..., heads)``.
      kernel_size: entries of one problem's kernel.
      limit: entries at a time; by the default backend when None. It decides speed, not results.

    Returns:
      One divisor per axis: innermost axes whole while they fit, the outer ones of size 1. All of
      them whole where a size is symbolic (``jax.export``).
    """
    if not all(isinstance(n, int) for n in (*lead, kernel_size)):
        return lead
    if limit is None:
        limit = ELEMENTS.get(jax.default_backend(), math.inf)
    room, result = limit / max(kernel_size, 1), []
    for n in reversed(lead):
        fitting = [d for d in range(1, n + 1) if n % d == 0 and d <= max(room, 1)]
        size = n if n <= room else fitting[-1]
        room = room / max(n, 1) if size == n else 1
        result.append(size)
    return tuple(reversed(result))


def over_problems(
    function: Callable, arrays: tuple, lead: tuple[int, ...], step: tuple[int, ...]
) -> jax.Array:
    """``function(*arrays)``, worked out ``step`` problems at a time.

    Args:
      function: from arrays with leading axes ``step`` to one such array; pure.
      arrays: each with leading axes ``lead``, or 1 where it is shared, or None.
      lead: the leading axes of the result.
      step: what ``sizes`` gave.

    In reverse mode each part is computed again, so that no kernel outlives its part.
    """
    return each(jax.checkpoint(function), arrays, lead, step)


def each(
    function: Callable, arrays: tuple, lead: tuple[int, ...], step: tuple[int, ...]
) -> jax.Array:
    """As ``over_problems``, but ``function`` decides itself what it keeps for reverse mode."""
    whole = [i for i, (n, size) in enumerate(zip(lead, step, strict=True)) if size < n]
    if not whole:
        return function(*arrays)
    axis = whole[0]
    size, inner = step[axis], (*lead[:axis], step[axis], *lead[axis + 1 :])
    mapped = [a is not None and a.shape[axis] != 1 for a in arrays]

    def part(slices):
        slices = iter(slices)
        given = tuple(next(slices) if m else a for m, a in zip(mapped, arrays, strict=True))
        return each(function, given, inner, step)

    split = tuple(_split(a, axis, size) for m, a in zip(mapped, arrays, strict=True) if m)
    out = jnp.moveaxis(jax.lax.map(part, split), 0, axis)
    return out.reshape(*out.shape[:axis], lead[axis], *out.shape[axis + 2 :])


def _split(a: jax.Array, axis: int, size: int) -> jax.Array:
    a = a.reshape(*a.shape[:axis], a.shape[axis] // size, size, *a.shape[axis + 1 :])
    return jnp.moveaxis(a, axis, 0)
