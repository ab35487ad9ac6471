"""The implementations of a plan's closures, by name.

A new one is a file with a function ``apply`` like ``log_domain.apply``, and a line here. They never
change what is computed, up to rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from asap_jax.problem import Problem
from asap_jax.solvers import log_domain, matrix_scaling, tiled
from asap_jax.solvers.closures import Closures

LARGEST_KERNEL = 2**26
"""Entries of a kernel (256 MiB in float32) from which ``"auto"`` works tile by tile."""


class Apply(Protocol):
    """The weights after the closures, or with ``mix`` their product with the values."""

    def __call__(
        self, p: Problem, start: jax.Array, log_target: jax.Array, closures: Closures, *, mix: bool
    ) -> jax.Array:
        """As ``log_domain.apply``."""


class Implementation(NamedTuple):
    """How to apply closures, and the query rows of a kernel that are held at a time (None: all)."""

    apply: Apply
    block: int | None = None


IMPLEMENTATIONS = {
    "log": Implementation(log_domain.apply),
    "scaling": Implementation(matrix_scaling.apply),
    "streaming": Implementation(tiled.apply, tiled.BLOCK),
}
NAMES = ("auto", *IMPLEMENTATIONS)


def choose(name: str, num_queries: Any, num_keys: Any) -> str:
    """The implementation that ``"auto"`` stands for at this size; any other name as it is.

    Tiles where a kernel is too large to be stored, else scaling: on CPUs a few problems at a time
    by scaling run 1.5 to 3 times faster than tiles for two closures and more
    (``python -m train bench memory``). Sizes may be symbolic, as in ``jax.export``: then scaling.
    """
    if name != "auto":
        return name
    known = isinstance(num_queries, int) and isinstance(num_keys, int)
    return "streaming" if known and num_queries * num_keys >= LARGEST_KERNEL else "scaling"
