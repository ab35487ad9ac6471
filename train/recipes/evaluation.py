"""The settings of evaluation while a model trains (``python -m train train --held-out``)."""

import dataclasses

KEPT = ("last", "best")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A part of the training split that is not trained on, and how often it is evaluated.

    Attributes:
      held_out: share of the training split, in (0, 1): the last examples of every class.
      every: epochs from one evaluation to the next; the last step is always evaluated.
      keep: the parameters that are the result of the run: ``"last"``, or ``"best"`` for those with
        the highest accuracy on the held-out part, the earliest of equals.
    """

    held_out: float = 0.1
    every: int = 1
    keep: str = "last"

    def __post_init__(self):
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out {self.held_out} must be in (0, 1)")
        if self.every < 1:
            raise ValueError(f"evaluate: every={self.every} must be at least 1")
        if self.keep not in KEPT:
            raise ValueError(f"evaluate: keep {self.keep!r} must be one of {KEPT}")
