"""Which closures a plan takes: a static description that every implementation reads.

A *closure* is one half-normalisation: the c-transform of the dual on one side, which makes the
sums over that side exact. Sinkhorn itself is S closures from the key dual 0; the compiled layer
is a few closures from a predicted dual.
"""

from __future__ import annotations

from typing import NamedTuple

AXIS = {"query": -2, "key": -1}
"""The axis that a closure *from* a side sums over."""
OTHER = {"query": "key", "key": "query"}


class Closures(NamedTuple):
    """``num_steps`` closures from a log scaling on ``side``.

    Attributes:
      side: ``"query"`` or ``"key"``: the side of the scaling that is given.
      num_steps: how many; the first gives the other side's scaling.
      epsilon: entropic regularisation.
    """

    side: str
    num_steps: int
    epsilon: float = 1.0
