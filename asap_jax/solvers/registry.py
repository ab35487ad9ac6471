"""The implementations of closures, by name.

To add one, write a file with a function like ``log_domain.apply`` and list it here. All give the
same result up to rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from asap_jax.problem import Problem
from asap_jax.solvers import log_domain, matrix_scaling, tiled
from asap_jax.solvers.closures import Closures

LARGEST_KERNEL = 2**26
"""Number of kernel entries (256 MiB in float32) from which ``"auto"`` means tiles."""


class Apply(Protocol):
    """The type of ``log_domain.apply``."""

    def __call__(
        self, p: Problem, start: jax.Array, log_target: jax.Array, closures: Closures, *, mix: bool
    ) -> jax.Array:
        """Arguments and result as ``log_domain.apply``."""


class Implementation(NamedTuple):
    """``apply``, and how many query rows of a kernel it holds in memory at a time; None for all."""

    apply: Apply
    block: int | None = None


IMPLEMENTATIONS = {
    "log": Implementation(log_domain.apply),
    "scaling": Implementation(matrix_scaling.apply),
    "streaming": Implementation(tiled.apply, tiled.BLOCK),
}
NAMES = ("auto", *IMPLEMENTATIONS)


def choose(name: str, num_queries: Any, num_keys: Any) -> str:
    """The implementation that ``"auto"`` means for a kernel of this size; other names unchanged.

    ``"streaming"`` for kernels too large to store, ``"scaling"`` for the others and for symbolic
    sizes (``jax.export``). On CPUs, groups of problems by scaling are 1.5 to 3 times faster than
    tiles for two or more closures (``python -m train bench memory``).
    """
    if name != "auto":
        return name
    known = isinstance(num_queries, int) and isinstance(num_keys, int)
    return "streaming" if known and num_queries * num_keys >= LARGEST_KERNEL else "scaling"
