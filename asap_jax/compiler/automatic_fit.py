"""The automatic choice: every layer's best candidate, on batches that no fit has seen."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from asap_jax import checks
from asap_jax.attention import functions
from asap_jax.compiler.fit import Fit, Ladder, Solved, check_steps, is_held_out
from asap_jax.compiler.report import SAME_ENDING, Rung
from asap_jax.compiler.single_fit import CANDIDATES, Candidate, RecordsFit
from asap_jax.fitting import fidelity
from asap_jax.predictor.predictor import Predictor
from asap_jax.records import Record, unstack
from asap_jax.spec import SinkhornSpec

LADDER = (1, 2, 3)
MARGIN = 0.03  # a candidate that costs more to run must be better by this share
REPEATS = 5  # timed calls of a rung


@dataclasses.dataclass(frozen=True)
class AutoFit(Fit):
    """Fits several candidates to every layer and takes the best on held-out batches.

    Those batches are not the ones of the report. Calibration records stay in memory. The number
    of closures is the budget.

    Attributes:
      candidates: the ``Candidate`` s to try, cheapest to run first; ``CANDIDATES`` when None,
        ``THOROUGH`` has more.
      time_limit: take no candidate that needs longer, measured while compiling, than this times
        the teacher (the fastest, and the report says so, if all do); None for fidelity alone,
        whatever it takes.
      ladder: numbers of closures that the report compares, beside the budget; when None those of
        1, 2 and 3 that the teacher has steps for, and the report says which not.

    Raises:
      ValueError, TypeError: a setting out of range or of the wrong type.
    """

    candidates: Sequence[Candidate] | None = None
    time_limit: float | None = 1.0
    ladder: Sequence[int] | None = None

    def __post_init__(self):
        for name in ("candidates", "ladder"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.items(name, getattr(self, name)))
        for rung in self.ladder or ():
            checks.positive_int("ladder", rung)
        if self.time_limit is not None:
            limit = checks.positive_float("time_limit", self.time_limit)
            object.__setattr__(self, "time_limit", limit)
        for candidate in self.tries:
            checks.instance("candidates", candidate, Candidate, "Candidates in a tuple")
        names = self._names
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"candidates must be one or more Candidates of different names, got {names}"
            )

    @property
    def tries(self) -> tuple[Candidate, ...]:
        """The candidates to try."""
        return CANDIDATES if self.candidates is None else self.candidates

    @property
    def _names(self) -> list[str]:
        return [candidate.name for candidate in self.tries]

    @property
    def rungs(self) -> tuple[int, ...]:
        """The numbers of closures that the ladder compares where the teacher has the steps."""
        return LADDER if self.ladder is None else self.ladder

    def check_closures(self, closures: str | int) -> None:
        """Raises ValueError for a name, or a number that no candidate suits."""
        super().check_closures(closures)
        if not any(c.suits(closures, masked=False) for c in self.tries):
            raise ValueError(f"no candidate of {self._names} suits closures={closures}")

    def check_teacher(self, path: str, spec: SinkhornSpec, closures: str | int | None) -> None:
        """Raises ValueError also for a ladder beyond the teacher's steps."""
        super().check_teacher(path, spec, closures)
        check_steps("ladder", self.ladder, path, spec)

    def left_out(self, spec: SinkhornSpec, closures: int | None) -> tuple[int, ...]:
        """What the default budget and ladder ask for, but the teacher has too few steps for."""
        counts = {*super().left_out(spec, closures), *self.rungs}
        return tuple(n for n in sorted(counts) if n >= spec.num_steps)

    def layer_kind(self) -> type[AutomaticLayerFit]:
        """Records of the layer, and every candidate's fit."""
        return AutomaticLayerFit


class AutomaticLayerFit(RecordsFit):
    """Holds one layer's records, fits every candidate, and takes the best.

    One in every few records is left out of the fits and the candidates are compared on it; the
    one chosen is then fitted again with that share. Report batches are others again. The layers
    of a stack are fitted apart and share a candidate.
    """

    def __init__(self, path: str, record: Record, *settings: Any):
        super().__init__(path, record, *settings)
        self.predictors: dict[tuple[str, int], list[Predictor]] = {}

    def solve(self) -> Solved:
        """The layer's state under its best candidate, and figures of each layer's fit.

        Raises:
          ValueError: no active token was seen, or values that are not finite.
        """
        share, records = self.holdout, self.records
        if not records:
            raise ValueError(f"layer {self.path!r}: no active token in the calibration batches")
        self.records = []
        choice = [r for i, r in enumerate(records) if is_held_out(i, share)]
        fit = [r for i, r in enumerate(records) if not is_held_out(i, share)]
        figures = self._fit_all(fit)
        scores = {name: self._score(name, choice or fit) for name in figures}
        chosen, slow = self._choose(scores, fit[0][0])
        if choice:  # the choice is final, so refit on the choice batches too
            (candidate,) = (c for c in self.fit.tries if c.name == chosen)
            figures[chosen] = self._fit_stack(candidate, fit + choice, self.closures)
        common = dict(
            candidate=chosen,
            too_slow=tuple(slow),
            chosen_in_sample=not choice,
            left_out=self.left_out,
        )
        figures_per_layer = [
            dict(numbers, **common, choice={name: float(s[i]) for name, s in scores.items()})
            for i, numbers in enumerate(figures[chosen])
        ]
        return self.state(self.predictors[chosen, self.closures]), figures_per_layer

    def _fit_all(self, records: list[list[Record]]) -> dict[str, list[dict[str, Any]]]:
        """Fits every candidate at every rung; figures of those at the budget, by name."""
        rungs = {n for n in (*self.fit.rungs, self.closures) if n < self.spec.num_steps}
        masked = records[0][0].mask is not None
        figures = {}
        for candidate in self.fit.tries:
            for rung in sorted(rungs):
                if candidate.suits(rung, masked=masked):
                    numbers = self._fit_stack(candidate, records, rung)
                    if rung == self.closures:
                        figures[candidate.name] = numbers
        if not figures:
            raise ValueError(
                f"layer {self.path!r}: no candidate suits closures={self.closures}, all that "
                f"a teacher with num_steps={self.spec.num_steps} allows"
            )
        return figures

    def _fit_stack(
        self, candidate: Candidate, records: list[list[Record]], rung: int
    ) -> list[dict[str, Any]]:
        """Fits the layers of the stack; figures of each."""
        try:
            fitted = [self.fit_one(candidate, records, rung, i) for i in range(self.depth)]
        except ValueError as error:
            raise ValueError(f"layer {self.path!r}, {error}") from error
        self.predictors[candidate.name, rung] = [predictor for predictor, _ in fitted]
        return [figures for _, figures in fitted]

    def _score(self, name: str, records: list[list[Record]]) -> list[float]:
        """Mean rel-l2 of a candidate at the budget on ``records``, one a layer of the stack."""
        return [
            np.mean([_rel_l2(record[i], predictor, self.closures) for record in records])
            for i, predictor in enumerate(self.predictors[name, self.closures])
        ]

    def _choose(self, scores: dict[str, list[float]], record: Record) -> tuple[str, list[str]]:
        """The best candidate within the time limit, and the names of those beyond it."""
        slow = self._too_slow(record, list(scores))
        fast = [name for name in scores if name not in slow] or slow[:1]
        costs = {candidate.name: candidate.cost for candidate in self.fit.tries}
        return cheapest_good({name: float(np.mean(scores[name])) for name in fast}, costs), slow

    def _too_slow(self, record: Record, names: list[str]) -> list[str]:
        """Those of ``names`` that run beyond the time limit, the fastest first."""
        limit = self.fit.time_limit
        if limit is None:
            return []
        limit *= _seconds(functools.partial(_teacher, record, spec=self.spec))
        times = {name: self._time(record, name, self.closures, 0) for name in names}
        return sorted((name for name in names if times[name] > limit), key=times.get)

    def _time(self, record: Record, name: str, rung: int, index: int) -> float:
        predictor = self.predictors[name, rung][index]
        run = functools.partial(_compiled, record, closures=rung, spec=self.spec)
        return _seconds(functools.partial(run, predictor=predictor))

    def ladder(self, record: Record, *, timed: bool) -> list[Ladder]:
        """Fidelity, and time if ``timed``, of every operator on one record, layer by layer."""
        return [self._one_ladder(i, one, timed) for i, one in enumerate(unstack(record))]

    def _one_ladder(self, index: int, record: Record, timed: bool) -> Ladder:
        rows: Ladder = {}
        seconds = lambda run: _seconds(run) if timed else math.nan
        for (name, rung), layers in self.predictors.items():
            error = _rel_l2(record, layers[index], rung)
            time_of = self._time(record, name, rung, index) if timed else math.nan
            rows.setdefault(name, {})[rung] = Rung(error, time_of)
        for rung in sorted({rung for _, rung in self.predictors}):
            steps = rung + (self.spec.num_steps - rung) % 2
            spec = dataclasses.replace(self.spec, num_steps=steps)
            if steps < self.spec.num_steps:
                run = functools.partial(_teacher, record, spec=spec)
                error = float(fidelity.sinkhorn_rel_l2(record, small=spec))
                rows.setdefault(SAME_ENDING, {})[rung] = Rung(error, seconds(run))
            error = float(fidelity.zero_rel_l2(record, closures=rung))
            rows.setdefault("closures from zero", {})[rung] = Rung(error, math.nan)
        run = functools.partial(_teacher, record, spec=self.spec)
        rows["teacher"] = {self.spec.num_steps: Rung(0.0, seconds(run))}
        return rows


def cheapest_good(scores: dict[str, float], costs: dict[str, tuple[int, ...]]) -> str:
    """The best of ``scores``; a costlier candidate must beat the best so far by ``MARGIN``."""
    best, *others = scores
    for name in others:
        limit = scores[best] * (1 - MARGIN if costs[name] > costs[best] else 1)
        if scores[name] < limit or not math.isfinite(scores[best]):
            best = name
    return best


def mean_ladder(ladders: list[Ladder]) -> Ladder:
    """Mean fidelity over the ladders of one layer, and the times of the first."""
    return {
        name: {
            rung: Rung(
                float(np.mean([ladder[name][rung].rel_l2 for ladder in ladders])), first.seconds
            )
            for rung, first in row.items()
        }
        for name, row in ladders[0].items()
    }


def _rel_l2(record: Record, predictor: Predictor, closures: int) -> float:
    return float(fidelity.rel_l2(record, predictor, closures=closures))


@functools.partial(jax.jit, static_argnames=("closures", "spec"))
def _compiled(
    record: Record, *, predictor: Predictor, closures: int, spec: SinkhornSpec
) -> jax.Array:
    settings = dict(predictor=predictor, spec=spec, closures=closures)
    return functions.asap_attention(*record.tokens, **settings)


@functools.partial(jax.jit, static_argnames="spec")
def _teacher(record: Record, *, spec: SinkhornSpec) -> jax.Array:
    return functions.sinkhorn_attention(*record.tokens, spec=spec)


def _seconds(run: Callable[[], Any]) -> float:
    """Median wall clock of a compiled call."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times))
