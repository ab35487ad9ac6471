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
    cut = [i for i, (n, size) in enumerate(zip(lead, step, strict=True)) if size < n]
    if not cut:
        return function(*arrays)
    axis = cut[0]
    size, inner = step[axis], (*lead[:axis], step[axis], *lead[axis + 1 :])
    mapped = [a is not None and a.shape[axis] != 1 for a in arrays]

    # No axis of size 1 goes through the loop: XLA copies what is moved over one.
    ones = axis if all(n == 1 for n in lead[:axis]) else 0
    at, kept = axis - ones, (size,) if size > 1 else ()

    def split(a):
        shape = (*a.shape[ones:axis], lead[axis] // size, *kept, *a.shape[axis + 1 :])
        return jnp.moveaxis(a.reshape(shape), at, 0)

    def part(slices):
        slices = iter(slices)
        whole = lambda a: next(slices).reshape(*a.shape[:axis], size, *a.shape[axis + 1 :])
        given = tuple(whole(a) if m else a for m, a in zip(mapped, arrays, strict=True))
        out = each(function, given, inner, step)
        return out.reshape(*out.shape[ones:axis], *kept, *out.shape[axis + 1 :])

    out = jax.lax.map(part, tuple(split(a) for m, a in zip(mapped, arrays, strict=True) if m))
    out = jnp.moveaxis(out, 0, at)
    return out.reshape(*lead[: axis + 1], *out.shape[at + 1 + len(kept) :])
