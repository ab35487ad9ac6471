"""The settings of training through compiled layers (``python -m train train --amortize``)."""

import dataclasses

import asap_jax as aj
from asap_jax.compiler.amortized import check_sums


@dataclasses.dataclass(frozen=True)
class Amortization:
    """How often the Sinkhorn loop runs in training, and what runs otherwise.

    Attributes:
      every: steps from one refresh to the next; the first refresh is before the first step.
      closures: closures of a compiled layer; None for 2, or 1 if it ends on rows.
      ending: see ``aj.Options``.
      decay: factor of the running sums at every refresh, in [0, 1].
      fit: name of a candidate that needs sums only.
    """

    every: int
    closures: int | None = None
    ending: str = "teacher"
    decay: float = 0.8
    fit: str = "moments"

    def check(self, attention: str, spec: aj.SinkhornSpec) -> None:
        """Raises ValueError unless a model with this attention can train this way."""
        if self.every < 1:
            raise ValueError(f"amortize: every={self.every} must be at least 1")
        if attention != "sinkhorn":
            raise ValueError(f"amortize is for sinkhorn attention, got attention {attention!r}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"amortize: decay={self.decay} must be in [0, 1]")
        fit = check_sums(aj.Options(self.fit, self.closures, self.ending).fit)
        fit.check_teacher("attention", spec, self.closures, self.ending)
