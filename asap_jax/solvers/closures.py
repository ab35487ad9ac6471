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
        """Softmax-attention calls of a layer that stores no N x M array.

        Every closure is one call. Closures that end on rows have the output from the last one;
        those that end on columns need one more.
        """
        ends_on_rows = (self.side == "key") == (self.num_steps % 2 == 1)
        return self.num_steps + (0 if ends_on_rows else 1)
