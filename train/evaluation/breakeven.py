"""When a fit has paid for itself (paper, Appendix "Online and Offline Cost")."""

import dataclasses
import math

import asap_jax as aj
from train.evaluation.fidelity_table import FidelityTable


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """What one compiled operator saves against one baseline.

    Attributes:
      operator, baseline: row names.
      closures: R, c-transforms of one forward pass.
      fit_seconds: one fit of all layers, teacher extraction included.
      saved_milliseconds: baseline less operator, a batch; negative when the operator is slower.
      batches: passes after which the time saved equals the fit's; infinite when it never does.
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


def report(table: FidelityTable, fit_seconds: float, spec: aj.SinkhornSpec) -> list[BreakEven]:
    """Break-even of ASAP-0 and ASAP against the teacher and the S=3 normalizer.

    Args:
      table: a fidelity table with rows ``"ASAP-0"``, ``"ASAP"``, ``"Sinkhorn S=3"``, ``"teacher"``.
      fit_seconds: of the compile.
      spec: the teacher's.
    """
    lines = []
    for name, closures in (("ASAP-0", "one_sided"), ("ASAP", "two_sided")):
        for baseline in ("teacher", "Sinkhorn S=3"):
            saved = table.row(baseline).milliseconds - table.row(name).milliseconds
            lines.append(
                BreakEven(
                    name,
                    baseline,
                    aj.attention.num_closures(closures, "query", spec),
                    fit_seconds,
                    saved,
                    1e3 * fit_seconds / saved if saved > 0 else math.inf,
                )
            )
    return lines
