"""When a fit has paid for itself (paper, Appendix "Online and Offline Cost")."""

import dataclasses
import math

from train.reporting.table import Table


def closures_per_pass(closures: str, last_step: str) -> int:
    """R: c-transforms of one forward pass; 1 for ASAP-0, 3 column-ending ASAP, 2 row-ending.

    Raises:
      ValueError: other closures.
    """
    counts = {("one_sided", "column"): 1, ("one_sided", "row"): 1}
    counts |= {("two_sided", "column"): 3, ("two_sided", "row"): 2}
    if (closures, last_step) not in counts:
        raise ValueError(f"no operation count for closures={closures!r} of a {last_step} teacher")
    return counts[closures, last_step]


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """What one compiled operator saves against one baseline.

    Attributes:
      operator, baseline: row names.
      closures: R of the operator.
      fit_seconds: one fit of all layers, teacher extraction included.
      saved_milliseconds: baseline less operator, a batch; negative when the operator is slower.
      batches: passes after which the fit is paid for; infinite when it never is.
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


def report(table: Table, fit_seconds: float, last_step: str) -> list[BreakEven]:
    """Break-even of ASAP-0 and ASAP against the teacher and the S=3 normalizer.

    Args:
      table: a fidelity table with rows ``"ASAP-0"``, ``"ASAP"``, ``"Sinkhorn S=3"``, ``"teacher"``.
      fit_seconds: of the compile.
      last_step: the teacher's, ``"row"`` or ``"column"``.
    """
    lines = []
    for name, closures in (("ASAP-0", "one_sided"), ("ASAP", "two_sided")):
        for baseline in ("teacher", "Sinkhorn S=3"):
            saved = table.row(baseline).milliseconds - table.row(name).milliseconds
            lines.append(
                BreakEven(
                    name,
                    baseline,
                    closures_per_pass(closures, last_step),
                    fit_seconds,
                    saved,
                    1e3 * fit_seconds / saved if saved > 0 else math.inf,
                )
            )
    return lines
