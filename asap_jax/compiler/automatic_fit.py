"""The automatic choice: each layer's best candidate, compared on batches that no fit has seen."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from asap_jax import checks
from asap_jax.attention import functions
from asap_jax.attention.flax_call import Call, Result
from asap_jax.compiler import progress
from asap_jax.compiler.fit import Fit, check_steps, is_held_out, number_of_closures
from asap_jax.compiler.report import SAME_ENDING, Ladder, Rung
from asap_jax.compiler.single_fit import CANDIDATES, Candidate, StoringFit
from asap_jax.fitting import fidelity
from asap_jax.predictor.predictor import Predictor
from asap_jax.records import Record, unstack
from asap_jax.spec import SinkhornSpec

LADDER = (1, 2, 3)
MARGIN = 0.03  # a candidate that costs more to run must be better by this share
REPEATS = 5  # timed calls of an operator


@dataclasses.dataclass(frozen=True)
class AutoFit(Fit["AutomaticLayerFit"]):
    """Fits several candidates to every layer and chooses the best on held-out batches.

    The report is measured on other batches. The records of all batches of the fit (queries, keys,
    values, biases and masks of every layer) are stored, up to ``memory_limit``. All candidates are
    compared at the same number of closures, the budget: by the rel-l2 of the weights, or for
    ``ending="row"`` by that of the head outputs.

    Attributes:
      candidates: the candidates to try, cheapest to run first; ``CANDIDATES`` when None.
        ``THOROUGH`` has more.
      time_limit: reject candidates whose measured run time is more than this many times that of
        the teacher. If all are slower, the fastest is chosen, and the report says so. None:
        choose by fidelity alone.
      ladder: numbers of closures to compare in the report, in addition to the budget. When None,
        1, 2 and 3, except those for which the teacher has too few steps (the report says which).
      memory_limit: most GiB of activations that the fit may store over all layers.
      guard: shrink tokens far larger than those of the calibration before the layer predicts.

    Raises:
      ValueError, TypeError: a setting out of range or of the wrong type.
    """

    candidates: Sequence[Candidate] | None = None
    time_limit: float | None = 1.0
    ladder: Sequence[int] | None = None

    def __post_init__(self):
        super().__post_init__()
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
        names = [candidate.name for candidate in self.tries]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"candidates must be one or more Candidates of different names, got {names}"
            )

    @property
    def tries(self) -> Sequence[Candidate]:
        """The candidates to try."""
        return CANDIDATES if self.candidates is None else self.candidates

    @property
    def rungs(self) -> Sequence[int]:
        """The numbers of closures in the ladder, if the teacher has enough steps."""
        return LADDER if self.ladder is None else self.ladder

    def check_closures(self, closures: str | int) -> None:
        """Raises ValueError for a name, or a number that no candidate suits."""
        number = number_of_closures(closures)
        suits = lambda c: c.suits(number, masked=False, continued=True)
        if not any(suits(candidate) for candidate in self.tries):
            names = [candidate.name for candidate in self.tries]
            raise ValueError(f"no candidate of {names} suits closures={number}")

    def check_teacher(
        self, path: str, spec: SinkhornSpec, closures: str | int | None, ending: str
    ) -> None:
        """Raises ValueError also for a ladder beyond the teacher's steps."""
        super().check_teacher(path, spec, closures, ending)
        check_steps("ladder", self.ladder, path, spec, ending)
        continued = spec.ended(ending)
        number = number_of_closures(self.default(ending) if closures is None else closures)
        number = min(number, continued.num_steps - 1)
        suits = lambda c: c.suits(number, masked=True, continued=continued != spec)
        if not any(suits(candidate) for candidate in self.tries):
            names = [candidate.name for candidate in self.tries]
            raise ValueError(
                f"no candidate of {names} suits closures={number} and ending={ending!r} of layer "
                f"{path!r} with num_steps={spec.num_steps}"
            )

    def left_out(self, spec: SinkhornSpec, closures: str | int | None) -> tuple[int, ...]:
        """Numbers of the default budget and ladder for which the teacher has too few steps."""
        counts = {*super().left_out(spec, closures), *self.rungs}
        return tuple(n for n in sorted(counts) if n >= spec.num_steps)

    def layer_kind(self) -> type[AutomaticLayerFit]:
        """Records of the layer, and every candidate's fit."""
        return AutomaticLayerFit


class AutomaticLayerFit(StoringFit):
    """Stores one layer's records, fits every candidate, and chooses the best.

    The share ``holdout`` of the records is left out of the fits, and the candidates are compared
    on it. The chosen one is then fitted again to all records. The layers of a stack share a
    candidate, but are fitted separately.

    Attributes:
      chosen: name of the best candidate, None before ``solve``.
      fitted: candidate name and number of closures to predictor and figures, per layer.
    """

    fit: AutoFit
    chosen: str | None = None

    def __init__(self, path: str, record: Record, fit: AutoFit, **settings: Any):
        super().__init__(path, record, fit, **settings)
        self.fitted: dict[tuple[str, int], list[tuple[Predictor, dict[str, Any]]]] = {}

    def _solve_layers(self) -> list[tuple[Predictor, dict[str, Any]]]:
        records, self.records = self.records, []
        if not records:
            raise ValueError("no active token in the calibration batches")
        choice = [r for i, r in enumerate(records) if is_held_out(i, self.holdout)]
        training = [r for i, r in enumerate(records) if not is_held_out(i, self.holdout)]
        self._fit_all(training)
        names = [name for name, rung in self.fitted if rung == self.closures]
        progress.begin(f"layer {self.path!r}, choose among {len(names)} candidates")
        scores = {name: self._scores(name, choice or training) for name in names}
        chosen, too_slow = self._choose(scores, training[0][0])
        progress.begin(f"layer {self.path!r}, {chosen} on all batches")
        if choice:  # the choice is final, so refit on the choice batches too
            (candidate,) = (c for c in self.fit.tries if c.name == chosen)
            refitted = self.fit_stack(candidate, training + choice, self.closures)
            self.fitted[chosen, self.closures] = refitted
        self.chosen = chosen
        common = dict(candidate=chosen, too_slow=tuple(too_slow), chosen_in_sample=not choice)
        common["ending"] = self.ending
        solved = []
        for i, (predictor, figures) in enumerate(self.fitted[chosen, self.closures]):
            values = {name: values[i] for name, values in scores.items()}
            solved.append((predictor, dict(figures, **common, choice=values)))
        return solved

    def _chosen(self) -> Candidate:
        """The chosen candidate."""
        (candidate,) = (c for c in self.fit.tries if c.name == self.chosen)
        return candidate

    def calibration_scales(self) -> Sequence[float]:
        """Those of the chosen candidate."""
        return self._chosen().scales

    def guarded(self) -> bool:
        """Whether the fit or the chosen candidate asks for a guard."""
        return self.fit.guard or self._chosen().guard

    def setting(self) -> str:
        """The chosen candidate's name."""
        return self.chosen or super().setting()

    @property
    def num_steps(self) -> int:
        """The layer, every candidate at every number of closures, the choice, the last fit."""
        return 3 + len(self._tries(self.records))

    def _tries(self, records: list[list[Record]]) -> list[tuple[Candidate, int]]:
        """Every candidate at every number of closures that it suits."""
        rungs = {n for n in (*self.fit.rungs, self.closures) if n < self.target.num_steps}
        continued = self.target != self.spec
        masked = bool(records) and records[0][0].mask is not None
        return [
            (candidate, rung)
            for candidate in self.fit.tries
            for rung in sorted(rungs)
            if candidate.suits(rung, masked=masked, continued=continued)
        ]

    def _fit_all(self, records: list[list[Record]]) -> None:
        """Fits every candidate at every number of closures that it suits."""
        for candidate, rung in self._tries(records):
            closures = f"{rung} closure{'s' if rung > 1 else ''}"
            progress.begin(f"layer {self.path!r}, {candidate.name}, {closures}")
            self.fitted[candidate.name, rung] = self.fit_stack(candidate, records, rung)
        if not any(rung == self.closures for _, rung in self.fitted):
            raise ValueError(
                f"no candidate suits closures={self.closures} on batches without a mask, for a "
                f"teacher with num_steps={self.spec.num_steps} and ending={self.ending!r}"
            )

    def _scores(self, name: str, records: list[list[Record]]) -> list[float]:
        """Mean rel-l2 of a candidate at the budget on ``records``, per layer of the stack."""
        return [
            float(np.mean([self._rel_l2(batch[i], predictor, self.closures) for batch in records]))
            for i, (predictor, _) in enumerate(self.fitted[name, self.closures])
        ]

    def _choose(self, scores: dict[str, list[float]], record: Record) -> tuple[str, list[str]]:
        """The best candidate within the time limit, and the names of slower ones, fastest first."""
        too_slow: list[str] = []
        if self.fit.time_limit is not None:
            limit = self.fit.time_limit * _seconds(_teacher, record, self.spec)
            times = {name: self._time(record, name, self.closures, 0) for name in scores}
            too_slow = sorted((n for n in scores if times[n] > limit), key=times.__getitem__)
        fast = [name for name in scores if name not in too_slow] or too_slow[:1]
        costs = {candidate.name: candidate.cost for candidate in self.fit.tries}
        means = {name: float(np.mean(scores[name])) for name in fast}
        return cheapest_good(means, costs), too_slow

    def _rel_l2(self, record: Record, predictor: Predictor, closures: int) -> float:
        settings = dict(spec=self.spec, closures=closures, ending=self.ending, predictor=predictor)
        return self._error(record, functions.asap_attention, **settings)

    def _error(self, record: Record, function: Any, **settings: Any) -> float:
        """The error that the choice goes by: of the weights, or of the outputs for a row ending."""
        record = dataclasses.replace(record, spec=self.spec)
        of_outputs = self.ending == "row"
        return float(fidelity.rel_l2(record, function, of_outputs=of_outputs, **settings))

    def _time(self, record: Record, name: str, rung: int, index: int) -> float:
        predictor, _ = self.fitted[name, rung][index]
        return _seconds(_compiled, record, self.spec, predictor, rung, self.ending)

    def ladder(self, record: Record, *, timed: bool) -> list[Ladder]:
        """Fidelity, and time if ``timed``, of every operator on one record, layer by layer."""
        return [self._one_ladder(i, layer, timed) for i, layer in enumerate(unstack(record))]

    def _one_ladder(self, index: int, record: Record, timed: bool) -> Ladder:
        rows: Ladder = {}
        teacher_seconds = lambda spec: _seconds(_teacher, record, spec) if timed else math.nan
        for (name, rung), layers in self.fitted.items():
            error = self._rel_l2(record, layers[index][0], rung)
            seconds = self._time(record, name, rung, index) if timed else math.nan
            rows.setdefault(name, {})[rung] = Rung(error, seconds)
        for rung in sorted({rung for _, rung in self.fitted}):
            settings = dict(ending=self.ending, of_outputs=self.ending == "row")
            from_zero = lambda n, settings=settings: float(
                fidelity.zero_rel_l2(record, closures=n, **settings)
            )
            # Sinkhorn with at most as many attention calls, or with the teacher's ending.
            steps = rung - (rung + 1) % 2 if self.ending == "row" else rung
            steps += (self.target.num_steps - steps) % 2
            if steps < self.spec.num_steps:
                spec = dataclasses.replace(self.spec, num_steps=steps)
                rows.setdefault(SAME_ENDING, {})[rung] = Rung(
                    from_zero(steps), teacher_seconds(spec)
                )
            rows.setdefault("closures from zero", {})[rung] = Rung(from_zero(rung), math.nan)
        rows["teacher"] = {self.spec.num_steps: Rung(0.0, teacher_seconds(self.spec))}
        return rows


def cheapest_good(scores: dict[str, float], costs: Mapping[str, tuple[int, ...]]) -> str:
    """The name with the lowest score; a costlier one must beat the best so far by ``MARGIN``."""
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
            n: Rung(float(np.mean([ladder[name][n].rel_l2 for ladder in ladders])), first.seconds)
            for n, first in row.items()
        }
        for name, row in ladders[0].items()
    }


@functools.partial(jax.jit, static_argnums=(3, 4))
def _compiled(
    record: Record, spec: SinkhornSpec, predictor: Predictor, closures: int, ending: str
) -> Result:
    settings = dict(predictor=predictor, spec=spec, closures=closures, ending=ending)
    return functions.asap_attention.core(Call(*record.tokens), **settings)


@jax.jit
def _teacher(record: Record, spec: SinkhornSpec) -> Result:
    return functions.sinkhorn_attention.core(Call(*record.tokens), spec=spec)


def _seconds(jitted: Callable[..., Any], *args: Any) -> float:
    """Median wall clock of a jitted call."""
    jax.block_until_ready(jitted(*args))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(jitted(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times))
