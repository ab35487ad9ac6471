"""The closures of a plan, as a static value that every implementation takes.

A *closure* is one half-normalisation: the c-transform of the dual of one side. It gives the dual
of the other side, with exact sums there. Sinkhorn is S closures from the key dual 0; the compiled
layer is a few closures from a predicted dual.
"""

from __future__ import annotations

from typing import NamedTuple

AXIS = {"query": -2, "key": -1}
"""The axis of the kernel over which a closure from this side sums."""
OTHER = {"query": "key", "key": "query"}


class Closures(NamedTuple):
    """``num_steps`` closures from a log scaling on ``side``.

    Attributes:
      side: ``"query"`` or ``"key"``: the side of the starting scaling.
      num_steps: number of closures; the first one gives the scaling of the other side.
      epsilon: entropic regularisation.
    """

    side: str
    num_steps: int
    epsilon: float = 1.0

    @property
    def num_calls(self) -> int:
        """The attention calls that the closures and the product with the values take.

        After a closure of the columns the product needs a call of its own.
        """
        ends_on_rows = (self.side == "key") == (self.num_steps % 2 == 1)
        return self.num_steps + (0 if ends_on_rows else 1)
