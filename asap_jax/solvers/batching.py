"""Computes many problems in groups.

A layer is ``batch x heads`` independent problems. Groups whose kernels fit the cache are faster on
a CPU, and memory holds the kernels of one group only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ELEMENTS: dict[str, float] = {"cpu": 2**19}
"""Largest number of kernel entries in one group, by backend. 2 MiB in float32 on CPUs: smaller
groups do not occupy all cores, larger ones leave the cache. Other backends use one group."""
SOFTMAX_ELEMENTS: dict[str, float] = {"cpu": 2**21}
"""The same for softmax attention, for which XLA on CPUs stores no kernel."""


def group_sizes(
    lead: tuple[int, ...], kernel_size: int, limit: float | None = None
) -> tuple[int, ...]:
    """The size of one group of problems along each leading axis.

    Args:
      lead: leading axes, ``(..., heads)``.
      kernel_size: number of entries of one problem's kernel.
      limit: largest number of kernel entries in a group, None for no limit. It changes speed, not
        results.

    Returns:
      One divisor per axis. Inner axes are whole as long as they fit; the axes outside them have
      size 1. If a size is symbolic (``jax.export``), all axes are whole.
    """
    if not all(isinstance(n, int) for n in (*lead, kernel_size)):
        return lead
    room = (limit or math.inf) / max(kernel_size, 1)
    result: list[int] = []
    for n in reversed(lead):
        divisors = [d for d in range(1, n + 1) if n % d == 0 and d <= max(room, 1)]
        size = n if n <= room else divisors[-1]
        room = room / max(n, 1) if size == n else 1
        result.append(size)
    return tuple(reversed(result))


def map_groups(
    function: Callable[..., jax.Array],
    trees: tuple[Any, ...],
    lead: tuple[int, ...],
    step: tuple[int, ...],
) -> jax.Array:
    """``function(*trees)``, computed one group of problems after the other.

    Args:
      function: pure, from pytrees with leading axes ``step`` to an array with these axes. Wrap it
        in ``jax.checkpoint``; otherwise reverse mode stores the kernels of all groups.
      trees: pytrees of arrays with leading axes ``lead``, or 1 for an axis that problems share.
      lead: the leading axes of the result.
      step: the size of a group, from ``group_sizes``.
    """
    split = [i for i, (n, size) in enumerate(zip(lead, step, strict=True)) if size < n]
    if not split:
        return function(*trees)
    axis = split[0]
    size, inner = step[axis], (*lead[:axis], step[axis], *lead[axis + 1 :])
    leaves, structure = jax.tree.flatten(trees)
    mapped = [a.shape[axis] != 1 for a in leaves]

    # XLA copies an array when an axis is moved across an axis of size 1, so drop those first.
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
