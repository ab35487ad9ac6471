"""Working through many problems a few at a time.

A layer is ``batch x heads`` independent problems. On a CPU it pays to finish a few of them, whose
kernels fit the cache, before the next; memory then holds a few kernels instead of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ELEMENTS = {"cpu": 2**19}
"""Kernel entries of the problems done at a time, by backend (2 MiB in float32): on CPUs fewer leave
small problems too short for the cores, more leave the cache. Other backends do all at once."""


def group_sizes(
    lead: tuple[int, ...], kernel_size: int, limit: int | None = None
) -> tuple[int, ...]:
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
    room = (limit or ELEMENTS.get(jax.default_backend(), math.inf)) / max(kernel_size, 1)
    result = []
    for n in reversed(lead):
        fitting = [d for d in range(1, n + 1) if n % d == 0 and d <= max(room, 1)]
        size = n if n <= room else fitting[-1]
        room = room / max(n, 1) if size == n else 1
        result.append(size)
    return tuple(reversed(result))


def map_groups(
    function: Callable[..., jax.Array],
    trees: tuple[Any, ...],
    lead: tuple[int, ...],
    step: tuple[int, ...],
) -> jax.Array:
    """``function(*trees)``, computed ``step`` problems at a time.

    Args:
      function: from pytrees with leading axes ``step`` to one such array; pure. In reverse mode
        it stores what it wants: wrap it in ``jax.checkpoint`` so that no kernel outlives its group.
      trees: pytrees of arrays with leading axes ``lead``, or 1 where an array is shared.
      lead: the leading axes of the result.
      step: from ``group_sizes``.
    """
    split = [i for i, (n, size) in enumerate(zip(lead, step, strict=True)) if size < n]
    if not split:
        return function(*trees)
    axis = split[0]
    size, inner = step[axis], (*lead[:axis], step[axis], *lead[axis + 1 :])
    leaves, structure = jax.tree.flatten(trees)
    mapped = [a.shape[axis] != 1 for a in leaves]

    # XLA copies an array when an axis is moved across an axis of size 1, so none goes through.
    ones = axis if all(n == 1 for n in lead[:axis]) else 0
    at, own = axis - ones, (size,) if size > 1 else ()

    def cut(a):
        shape = (*a.shape[ones:axis], lead[axis] // size, *own, *a.shape[axis + 1 :])
        return jnp.moveaxis(a.reshape(shape), at, 0)

    def group(slices):
        slices = iter(slices)
        whole = lambda a: next(slices).reshape(*a.shape[:axis], size, *a.shape[axis + 1 :])
        parts = [whole(a) if m else a for m, a in zip(mapped, leaves, strict=True)]
        out = map_groups(function, jax.tree.unflatten(structure, parts), inner, step)
        return out.reshape(*out.shape[ones:axis], *own, *out.shape[axis + 1 :])

    out = jax.lax.map(group, tuple(cut(a) for m, a in zip(mapped, leaves, strict=True) if m))
    out = jnp.moveaxis(out, 0, at)
    return out.reshape(*lead[: axis + 1], *out.shape[at + 1 + len(own) :])
