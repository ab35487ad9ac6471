"""The fidelity report of a compile: what was lost, layer by layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from asap_jax.compiler import verdict
from asap_jax.compiler.end_to_end import ModelReport

METRICS = ("calls", "rel_l2", "output_rel_l2", "output_rmse", "row_error", "column_error")
SAME_ENDING = "Sinkhorn, same ending"  # row of a ladder
HEADINGS = (
    "calls", "attention rel-l2", "output rel-l2", "output RMSE", "row error", "column error"
)  # fmt: skip


class Rung(NamedTuple):
    """An operator at one number of closures: rel-l2, and seconds per batch (NaN: not timed)."""

    rel_l2: float
    seconds: float


Ladder = dict[str, dict[int, Rung]]
"""Operator name to number of closures to Rung."""


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Fidelity of one layer to its teacher, means over the report's batches.

    Attributes:
      path: the layer's address; ``[i]`` is appended within a scanned stack.
      rows: operator name to ``{calls, rel_l2, output_rel_l2, output_rmse, row_error,
        column_error}``; calls are those of an attention kernel that stores no N x M array.
      fit: ``r_squared_fit`` (least squares, fit batches) and ``r_squared`` (report batches) of the
        predicted dual: the share of its variance that the prediction explains. ``num_rows`` of the
        regression; ``left_out``: default numbers of closures for which the teacher has too few
        steps; ``setting``: the class of the fit or the name of the candidate;
        ``num_coefficients``, and ``featureless_queries``: padded queries of the fit that took part
        in the closures without features. A KL fit adds ``kl_reason``,
        ``kl_converged``, ``kl_steps`` and ``plan_kl`` (mean per problem, fit batches). The
        automatic choice adds the chosen ``candidate``, ``choice`` (error of each candidate on the
        batches for the choice), the names of those ``too_slow``, ``chosen_in_sample``: whether the
        choice had to use the fit's own batches, and ``ending``: for ``"row"`` the errors of
        ``choice`` and ``ladder`` are those of the head outputs.
      ladder: comparison on the report batches, by the automatic choice only.
      closures, num_steps, ending: of the compiled layer and of its teacher.
    """

    path: str
    rows: dict[str, dict[str, float]]
    fit: dict[str, Any]
    ladder: Ladder | None = None
    closures: str | int = 2
    num_steps: int = 2
    ending: str = "teacher"

    @property
    def verdicts(self) -> list[verdict.Verdict]:
        """Each compiled operator against Sinkhorn with at most its number of attention calls."""
        return verdict.verdicts(self.rows, self.ending)

    def _judgement(self) -> list[str]:
        lines = [f"  verdict: {verdict.sentence(v, self.rows)}" for v in self.verdicts]
        # The last operator is the one that the layer runs.
        if self.verdicts and not self.verdicts[-1].closer:
            ways = verdict.advice(self.fit, self.closures, self.num_steps)
            lines.append(f"  what to try: {'; '.join(ways)}")
        return lines

    def _fit(self) -> str:
        fit = self.fit
        text = (
            f"the prediction explains {100 * fit['r_squared']:.1f} % of the variance of the "
            f"teacher's dual ({int(fit['num_rows'])} rows)"
        )
        if "kl_reason" in fit:
            state = "converged" if fit["kl_converged"] else "NOT converged"
            text += (
                f", KL {state} ({fit['kl_reason']}) in {fit['kl_steps']} steps, "
                f"plan KL {fit['plan_kl']:.3g}"
            )
        if "candidate" in fit:
            where = "the fit's own" if fit["chosen_in_sample"] else "held-out"
            text += f", {fit['candidate']!r} chosen of {len(fit['choice'])} on {where} batches"
            if fit["candidate"] in fit["too_slow"]:
                text += " (ALL beyond the time limit: this is the fastest)"
            elif fit["too_slow"]:
                text += f" (too slow: {', '.join(map(repr, fit['too_slow']))})"
        if fit.get("left_out"):
            counts = ", ".join(map(str, fit["left_out"]))
            text += f"; the teacher has too few steps for {counts} closures, left out"
        return text

    def _ladder(self, ladder: Ladder) -> list[str]:
        rungs = sorted({n for name, row in ladder.items() if name != "teacher" for n in row})
        width = max(map(len, ladder))
        time = lambda seconds: "-" if math.isnan(seconds) else f"{1e3 * seconds:.2f}"
        cell = lambda rung: (
            f"{rung.rel_l2:>9.4f} {time(rung.seconds):>8}" if rung else f"{'-':>9} {'-':>8}"
        )
        (num_steps,) = ladder["teacher"]
        ends_on_rows = self.fit.get("ending") == "row"
        extra = 0 if ends_on_rows or num_steps % 2 else 1  # a last column step needs one more call
        head = " ".join(f"{f'n={n}':>9} {'ms':>8}" for n in rungs)
        calls = " ".join(f"{n + extra:>9} {'':>8}" for n in rungs)
        error = "output rel-l2" if ends_on_rows else "rel-l2"
        width = max(width, 25, len(error) + 14)
        lines = [
            f"  {f'{error} at n closures':<{width}} {head}",
            f"  {'attention calls, compiled':<{width}} {calls}".rstrip(),
        ]
        for name, row in ladder.items():
            if name == "teacher":
                ((steps, rung),) = row.items()
                lines.append(f"  teacher S={steps}: {1e3 * rung.seconds:.2f} ms")
            else:
                lines.append(f"  {name:<{width}} {' '.join(cell(row.get(n)) for n in rungs)}")
        budget_steps = (
            "ends on rows too, after at most n steps"
            if ends_on_rows
            else "takes n steps, or n + 1 to end on the teacher's side"
        )
        lines.append(f"  (Sinkhorn {budget_steps}; ms: one layer on one batch)")
        names = self.fit.get("candidate", ""), SAME_ENDING
        chosen, budget = (ladder.get(name, {}) for name in names)
        same = lambda n: n % 2 == 1 if ends_on_rows else (num_steps - n) % 2 == 0
        equal = [n for n in rungs if n in chosen and n in budget and same(n)]
        lost = [str(n) for n in equal if chosen[n].rel_l2 > budget[n].rel_l2]
        if lost:
            lines.append(
                f"  WARNING: {self.fit['candidate']!r} is no closer than Sinkhorn with the "
                f"same number of steps at n={', '.join(lost)}; more calibration data may help"
            )
        return lines

    def __str__(self) -> str:
        width = max(len(name) for name in self.rows)
        head = " ".join(HEADINGS)
        lines = [f"{self.path}: {self._fit()}", f"  {'operator':<{width}} {head}"]
        for name, row in self.rows.items():
            columns = zip(METRICS, map(len, HEADINGS), strict=True)
            cells = " ".join(f"{row[m]:>{w}.3g}" for m, w in columns)
            lines.append(f"  {name:<{width}} {cells}")
        if self.ladder is not None:
            lines += self._ladder(self.ladder)
        return "\n".join([*lines, *self._judgement()])


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Fidelity of a compiled model, one entry per layer; prints as a table.

    Attributes:
      layers: path to LayerReport.
      held_out: whether the figures are from batches that the fit did not see.
      num_fit_batches, num_report_batches: number of batches for the fit and for the report.
      fit_seconds: wall clock from the call of ``compile`` to its return: recording the teacher,
        fitting, checking and measuring this report. Of a ``Calibration``, the time in its methods.
      compile_seconds: how much of it JAX spent on compiling programs; NaN if not measured.
      model: what changed at the output of the whole model; None if it was not measured.
    """

    layers: dict[str, LayerReport]
    held_out: bool
    num_fit_batches: int
    num_report_batches: int
    fit_seconds: float
    compile_seconds: float = math.nan
    model: ModelReport | None = None

    def _summary(self) -> list[str]:
        """Median and worst layer of every compiled operator that all layers have."""
        reports = list(self.layers.values())
        common = [name for name in reports[0].rows if all(name in r.rows for r in reports)]
        lines = []
        for name in filter(verdict.is_compiled, common):
            errors = {r.path: r.rows[name]["rel_l2"] for r in reports}
            worst = max(errors, key=errors.__getitem__)
            lines.append(
                f"{name!r}, attention rel-l2: median layer {np.median([*errors.values()]):.3g}, "
                f"worst layer {errors[worst]:.3g} ({worst})"
            )
        return lines

    def __str__(self) -> str:
        time = f"{self.fit_seconds:.1f} s"
        if not math.isnan(self.compile_seconds):
            time += f" ({self.compile_seconds:.1f} s of it compilation)"
        seen = "batch(es) that the fit has seen, so too good: give more, to hold some out"
        measured = "held-out batch(es)" if self.held_out else seen
        head = (
            f"{len(self.layers)} layer(s), fitted on {self.num_fit_batches} batch(es) in {time}; "
            f"figures on {self.num_report_batches} {measured}"
        )
        lines = [head]
        lines += self._summary() if len(self.layers) > 1 else []
        lines += [] if self.model is None else [str(self.model)]
        behind = [r.path for r in self.layers.values() if r.verdicts and not r.verdicts[-1].closer]
        if behind:
            lines.append(f"WARNING: no closer than Sinkhorn with as few calls: {', '.join(behind)}")
        errors = {r.path: r.verdicts[-1].error for r in self.layers.values() if r.verdicts}
        far = [f"{path} ({e:.2g})" for path, e in errors.items() if not e <= verdict.FAR]
        if far:
            lines.append(f"WARNING: error above {verdict.FAR:g}: {', '.join(far)}")
        return "\n".join([*lines, *map(str, self.layers.values())])
