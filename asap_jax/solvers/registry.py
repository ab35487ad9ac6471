"""The implementations of closures, by name.

To add one, write a file with a function like ``log_domain.apply`` and list it here. All give the
same result up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from asap_jax.solvers import log_domain, matrix_scaling, tiled

LARGEST_KERNEL = 2**26
"""Number of kernel entries (256 MiB in float32) from which ``"auto"`` means tiles."""


class Implementation(NamedTuple):
    """A function like ``log_domain.apply``, and how many query rows it holds; None for all."""

    apply: Callable[..., jax.Array]
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
