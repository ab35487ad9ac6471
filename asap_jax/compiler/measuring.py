"""Measures the compiled layers on the batches of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from asap_jax.compiler import progress
from asap_jax.compiler.automatic_fit import mean_ladder
from asap_jax.compiler.fit import LayerFit, Solved
from asap_jax.compiler.report import Ladder, LayerReport
from asap_jax.fitting import fidelity
from asap_jax.records import Record

BUDGETS = (1, 2, 3, 4, 5)


class Measurement:
    """Collects the fidelity of every layer, batch by batch."""

    def __init__(self, solved: Mapping[str, Solved], fits: Mapping[str, LayerFit]):
        self.solved, self.fits = solved, fits
        self.cases: dict[str, list[Any]] = {path: [] for path in solved}
        self.ladders: dict[str, list[list[Ladder]]] = {path: [] for path in solved}

    def add(self, recorded: Mapping[str, Record], batch: str) -> None:
        """Measures every layer on its record of one batch, which progress names ``batch``."""
        for path, (state, _) in self.solved.items():
            progress.begin(f"{batch}, layer {path!r}")
            if path not in recorded:  # an optional branch that this batch did not take
                continue
            budgets = tuple(s for s in BUDGETS if s < state.spec.num_steps)
            case = fidelity.layer_fidelity(recorded[path], state, budgets=budgets)
            self.cases[path].append(
                jax.tree.map(lambda x: np.asarray(x, np.float64).reshape(-1), case)
            )
            ladder = self.fits[path].ladder(recorded[path], timed=not self.ladders[path])
            if ladder is not None:
                self.ladders[path].append(ladder)

    def reports(self) -> dict[str, LayerReport]:
        """Mean fidelity over the batches: one LayerReport per layer, also within a stack."""
        found = {}
        for path in (path for path in self.solved if self.cases[path]):
            means = jax.tree.map(lambda *x: np.mean(x, 0), *self.cases[path])
            for i in range(self.fits[path].depth):
                name = f"{path}[{i}]" if self.fits[path].stack else path
                found[name] = self._report(name, path, means, i)
        return found

    def _report(self, name: str, path: str, means: Mapping[str, Any], i: int) -> LayerReport:
        """The report of layer ``i`` of a stack."""
        state, figures = self.solved[path]
        # A jitted function returns a dict in the order of its sorted keys.
        rank = lambda row: (row == "teacher", row.startswith("Sinkhorn"), row)
        rows = {
            row: {metric: float(x[i]) for metric, x in means[row].items()}
            for row in sorted(means, key=rank)
        }
        fit = {**rows.pop("fit"), **figures[i]}
        own = [ladder[i] for ladder in self.ladders[path]]
        ladder = mean_ladder(own) if own else None
        settings = state.closures, state.spec.num_steps, state.ending
        return LayerReport(name, rows, fit, ladder, *settings)
