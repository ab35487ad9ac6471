"""How many batches it takes to save the time of a fit (paper, "Online and Offline Cost")."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """The time that one compiled operator saves compared with one baseline.

    Attributes:
      operator, baseline: row names.
      closures: R, the number of c-transforms in one forward pass.
      fit_seconds: time of one fit of all layers, including the teacher's forward passes.
      saved_milliseconds: time of the baseline minus time of the operator, per batch; negative if
        the operator is slower.
      batches: number of batches after which the saved time equals the time of the fit; infinite if
        the operator is not faster.
    """

    operator: str
    baseline: str
    closures: int
    fit_seconds: float
    saved_milliseconds: float
    batches: float

    def __str__(self) -> str:
        saved = f"{self.saved_milliseconds:+.2f} ms a batch against {self.baseline}"
        when = (
            "never pays on this machine at this length"
            if math.isinf(self.batches)
            else f"pays after {self.batches:,.0f} batches"
        )
        return f"{self.operator} (R={self.closures}): fit {self.fit_seconds:.1f} s, {saved}: {when}"


def break_even(
    operator: str, baseline: str, closures: int, fit_seconds: float, saved_milliseconds: float
) -> BreakEven:
    """The break-even point of one operator; the arguments are the fields of ``BreakEven``."""
    pays = saved_milliseconds > 0
    batches = 1e3 * fit_seconds / saved_milliseconds if pays else math.inf
    return BreakEven(operator, baseline, closures, fit_seconds, saved_milliseconds, batches)
