"""The implementations of closures, by name.

To add one, write a file with a function like ``log_domain.apply`` and list it here. All give the
same result up to rounding. The fused kernels compute in the dtype of the inputs, the others in
float32 at least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from asap_jax.problem import Problem
from asap_jax.solvers import batching, log_domain, matrix_scaling, tiled
from asap_jax.solvers.closures import Closures
from asap_jax.solvers.flash import choice, loop, reference

LARGEST_KERNEL = 2**26
"""Number of kernel entries (256 MiB in float32) from which ``"auto"`` means tiles."""


class Implementation(NamedTuple):
    """A function like ``log_domain.apply``, and what it holds in memory.

    Attributes:
      apply: the function.
      block: how many query rows of a kernel it holds; None for all.
      recompute: reverse mode computes a group of problems again rather than store what it holds.
    """

    apply: Callable[..., jax.Array]
    block: int | None = None
    recompute: bool = True


def _by_tiles(p: Problem, *args: Any) -> jax.Array:
    if p.axis_name is None:
        return tiled.apply(p, *args)
    # A call of a kernel rounds its arrays to ``dtype``; tiles do not.
    wide = dataclasses.replace(p, dtype=p.q.dtype)
    return loop.apply(reference.kernel(p.precision), wide, *args)


def _fused(backend: choice.Backend) -> Implementation:
    apply = lambda *args: loop.apply(backend.kernel(), *args)
    return Implementation(apply, block=1, recompute=False)


IMPLEMENTATIONS = {
    "log": Implementation(log_domain.apply),
    "scaling": Implementation(matrix_scaling.apply),
    "streaming": Implementation(_by_tiles, tiled.BLOCK),
    **{name: _fused(backend) for name, backend in choice.BACKENDS.items()},
}
NAMES = ("auto", *IMPLEMENTATIONS, choice.FUSED)


def choose(name: str, p: Problem, closures: Closures, *, weights: bool = False) -> str:
    """The implementation that ``name`` means for these problems, decided while tracing.

    ``"auto"`` is ``"streaming"`` for kernels too large to store, and ``"scaling"`` for the others,
    for symbolic sizes (``jax.export``) and for ``weights``, which are stored anyway. On CPUs,
    groups of problems by scaling are 1.5 to 2.4 times faster than tiles for two or three closures
    (``python -m train bench memory``). No fused kernel has run on a card yet, so ``"auto"`` takes
    none.

    Raises:
      ValueError: a fused kernel that cannot compute the problems; weights, or an implementation
        that stores scores, for tokens shared by several devices.
    """
    if p.axis_name is not None and weights:
        raise ValueError(
            f"axis_name={p.axis_name!r} computes no weights, so dropout, return_weights and sown "
            f"weights are not supported"
        )
    if name == choice.FUSED or name in choice.BACKENDS:
        return choice.choose(name, p, closures.num_calls)
    if p.axis_name is not None:
        if name not in ("auto", "streaming"):
            raise ValueError(
                f"implementation={name!r} stores the scores of all tokens; with "
                f"axis_name={p.axis_name!r} use 'auto', 'streaming' or a fused kernel"
            )
        return "streaming"
    if name != "auto":
        return name
    n, m = p.q.shape[-2], p.k.shape[-2]
    known = isinstance(n, int) and isinstance(m, int) and not weights
    return "streaming" if known and n * m >= LARGEST_KERNEL else "scaling"


def largest_group(name: str, p: Problem, closures: Closures) -> float | None:
    """Largest number of kernel entries to compute at once; None for no limit."""
    softmax = name == "scaling" and matrix_scaling.is_small_softmax(p, closures)
    limits = batching.SOFTMAX_ELEMENTS if softmax else batching.ELEMENTS
    return limits.get(jax.default_backend())
