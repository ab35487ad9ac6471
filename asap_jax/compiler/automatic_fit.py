"""The automatic recipe: every layer's best candidate, chosen on batches that no fit has seen."""

from __future__ import annotations

import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import metrics
from asap_jax.attention import functions
from asap_jax.compiler import paper_fit
from asap_jax.compiler.options import Options
from asap_jax.compiler.report import SAME_ENDING, Rung
from asap_jax.fitting import candidates, targets
from asap_jax.predictor.predictor import Predictor
from asap_jax.records import CompiledState, Record, stack_mark
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import Closures
from asap_jax.spec import SinkhornSpec

MARGIN = 0.03  # a candidate that costs more to run must be better by this share
REPEATS = 5  # timed calls of a rung


class AutomaticFit:
    """Keeps one layer's records, fits every candidate, and takes the best.

    A share of the records, the one ``holdout`` gives of them, is kept out of the fits and the
    candidates are compared on it; the one chosen is then fitted again with that share. Report
    batches are others again. A layer stack of a scan is one AutomaticFit: its layers are fitted
    apart and share a candidate.
    """

    def __init__(self, path: str, record: Record, options: Options):
        options.refuse(path, record.spec)
        self.path, self.options = path, options
        self.spec, self.stack = record.spec, record.stack
        self.records: list[Record] = []
        self.predictors: dict[tuple[str, int], list[Predictor]] = {}

    @property
    def num_closures(self) -> int:
        """The budget; a default one, at most as many closures as the teacher has steps to save."""
        return min(int(self.options.closures), self.spec.num_steps - 1)

    def add(self, record: Record, where: str) -> None:
        """Keeps one batch; ``where`` names it in errors. Batches of no active token are dropped.

        Raises:
          ValueError: the batch gives a value that is not finite, or a mask of other values.
        """
        paper_fit.check(record, self.path, where)
        mass = np.asarray(targets.layer_balance(record))
        if not np.isfinite(mass).all():
            raise ValueError(
                f"{where} gives a value that is not finite at layer {self.path!r} (query of shape "
                f"{record.query.shape})"
            )
        if (mass > 0).all():
            self.records.append(record)

    def solve(self, stream=None, shared=None) -> tuple[CompiledState, list[dict]]:
        """The layer's state under its best candidate, and figures of each layer's fit.

        Raises:
          ValueError: no active token was seen.
        """
        del stream, shared
        if not self.records:
            raise ValueError(f"layer {self.path!r} saw no active token in the calibration batches")
        share = self.options.holdout
        held = [paper_fit.is_held_out(i, share) for i in range(len(self.records))]
        fit = [paper_fit.unstack(r) for r, h in zip(self.records, held, strict=True) if not h]
        choice = [paper_fit.unstack(r) for r, h in zip(self.records, held, strict=True) if h]
        self.records = []
        scores, figures = {}, {}
        for name, rung, layers in self._fits(fit):
            self.predictors[name, rung] = [predictor for predictor, _ in layers]
            if rung == self.num_closures:
                figures[name] = [numbers for _, numbers in layers]
                scores[name] = [
                    np.mean([_rel_l2(records[i], predictor, rung) for records in choice or fit])
                    for i, (predictor, _) in enumerate(layers)
                ]
        slow = self._too_slow(fit[0][0], list(scores))
        fast = [name for name in scores if name not in slow] or slow[:1]
        costs = {candidate.name: candidate.cost for candidate in self._candidates()}
        chosen = _cheapest_good({name: float(np.mean(scores[name])) for name in fast}, costs)
        if choice:  # the choice is made: its batches are data like the others now
            (candidate,) = (c for c in self._candidates() if c.name == chosen)
            layers = self._fit(candidate, fit + choice, self.num_closures)
            self.predictors[chosen, self.num_closures] = [predictor for predictor, _ in layers]
            figures[chosen] = [numbers for _, numbers in layers]
        layers = self.predictors[chosen, self.num_closures]
        stacked = jax.tree.map(
            lambda *x: jnp.stack(x).reshape(*self.stack, *jnp.shape(x[0])), *layers
        )
        mark = stack_mark(self.stack)
        state = CompiledState(stacked, self.spec, self.num_closures, mark)
        told = [
            dict(
                numbers,
                candidate=chosen,
                choice={name: float(s[i]) for name, s in scores.items()},
                too_slow=tuple(slow),
                chosen_in_sample=not choice,
                left_out=self._left_out(),
            )
            for i, numbers in enumerate(figures[chosen])
        ]
        return state, told

    def _left_out(self) -> tuple[int, ...]:
        """What of the default budget and ladder needs more steps than the teacher has."""
        wanted = {int(self.options.closures), *self.options.rungs}
        return tuple(n for n in sorted(wanted) if n >= self.spec.num_steps)

    def _too_slow(self, record: Record, names: list[str]) -> list[str]:
        """Those of ``names`` that run beyond the time limit, the fastest first."""
        limit = self.options.time_limit
        if limit is None:
            return []
        limit *= _seconds(functools.partial(_teacher, record, spec=self.spec))
        times = {name: self._time(record, name, self.num_closures, 0) for name in names}
        return sorted((name for name in names if times[name] > limit), key=times.get)

    def _time(self, record, name, rung, index) -> float:
        predictor = self.predictors[name, rung][index]
        run = functools.partial(_compiled, record, closures=rung, spec=self.spec)
        return _seconds(functools.partial(run, predictor=predictor))

    def _fits(self, records):
        """``(name, number of closures, [(predictor, figures), ...])`` of every candidate."""
        rungs = {n for n in (*self.options.rungs, self.num_closures) if n < self.spec.num_steps}
        masked = records[0][0].mask is not None
        for candidate in self._candidates():
            for rung in sorted(rungs):
                if candidate.suits(rung, masked=masked):
                    yield candidate.name, rung, self._fit(candidate, records, rung)

    def _candidates(self):
        return self.options.candidates or candidates.CANDIDATES

    def _fit(self, candidate, records, rung):
        """``[(predictor, figures), ...]`` of the layers."""
        try:
            return [
                candidates.fit(candidate, [r[i] for r in records], rung, seed=self.options.seed)
                for i in range(math.prod(self.stack))
            ]
        except ValueError as error:
            raise ValueError(
                f"layer {self.path!r}, candidate {candidate.name!r}: {error}"
            ) from error

    def ladder(self, record: Record, *, timed: bool) -> list[dict[str, dict[int, Rung]]]:
        """Fidelity, and time if ``timed``, of every operator on one record, layer by layer."""
        return [self._one_ladder(i, one, timed) for i, one in enumerate(paper_fit.unstack(record))]

    def _one_ladder(self, index, record, timed) -> dict[str, dict[int, Rung]]:
        rows: dict[str, dict[int, Rung]] = {}
        seconds = lambda run: _seconds(run) if timed else math.nan
        for (name, rung), layers in self.predictors.items():
            error = _rel_l2(record, layers[index], rung)
            time_of = self._time(record, name, rung, index) if timed else math.nan
            rows.setdefault(name, {})[rung] = Rung(error, time_of)
        for rung in sorted({rung for _, rung in self.predictors}):
            steps = rung + (self.spec.num_steps - rung) % 2
            spec = SinkhornSpec(
                steps, self.spec.epsilon, self.spec.key_mass, self.spec.padding, self.spec.scale
            )
            if steps < self.spec.num_steps:
                run = functools.partial(_teacher, record, spec=spec)
                error = float(_sinkhorn_rel_l2(record, small=spec))
                rows.setdefault(SAME_ENDING, {})[rung] = Rung(error, seconds(run))
            rows.setdefault("closures from zero", {})[rung] = Rung(
                float(_zero_rel_l2(record, closures=rung)), math.nan
            )
        run = functools.partial(_teacher, record, spec=self.spec)
        rows["teacher"] = {self.spec.num_steps: Rung(0.0, seconds(run))}
        return rows


def _cheapest_good(scores: dict[str, float], costs: dict[str, tuple]) -> str:
    """The best of ``scores``, where one of higher cost than the best so far must earn it."""
    best, *others = scores
    for name in others:
        wanted = scores[best] * (1 - MARGIN if costs[name] > costs[best] else 1)
        if scores[name] < wanted or not math.isfinite(scores[best]):
            best = name
    return best


def mean_ladder(ladders: list[dict[str, dict[int, Rung]]]) -> dict[str, dict[int, Rung]]:
    """Mean fidelity over the ladders of one layer, and the times of the first."""
    return {
        name: {
            rung: Rung(
                float(np.mean([ladder[name][rung].rel_l2 for ladder in ladders])),
                first.seconds,
            )
            for rung, first in row.items()
        }
        for name, row in ladders[0].items()
    }


def _rel_l2(record, predictor, closures) -> float:
    return float(candidates.rel_l2(record, predictor, closures=closures))


@functools.partial(jax.jit, static_argnames="small")
def _sinkhorn_rel_l2(record, *, small: SinkhornSpec):
    _, reference = targets.call(record, functions.sinkhorn_attention, spec=record.spec)
    _, weights = targets.call(record, functions.sinkhorn_attention, spec=small)
    return metrics.attention_rel_l2(weights, reference)


@functools.partial(jax.jit, static_argnames="closures")
def _zero_rel_l2(record, *, closures: int):
    """As many closures, from the dual 0 on the side that makes them end as the teacher does."""
    p, spec = targets.problem(record), record.spec
    side = spec.side_before_end(closures)
    zero = jnp.zeros_like(p.tokens(side, spec.padding).own[..., 0])
    taken = Closures(side, closures, spec.epsilon)
    weights = log_domain.weights_after(p, zero, p.log_key_target(spec.key_mass), taken)
    _, reference = targets.call(record, functions.sinkhorn_attention, spec=spec)
    return metrics.attention_rel_l2(weights, reference)


@functools.partial(jax.jit, static_argnames=("closures", "spec"))
def _compiled(record, *, predictor, closures, spec):
    tokens = (record.query, record.key, record.value, record.bias, record.mask)
    return functions.asap_attention(*tokens, predictor=predictor, spec=spec, closures=closures)


@functools.partial(jax.jit, static_argnames="spec")
def _teacher(record, *, spec):
    tokens = (record.query, record.key, record.value, record.bias, record.mask)
    return functions.sinkhorn_attention(*tokens, spec=spec)


def _seconds(run) -> float:
    """Median wall clock of a compiled call."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times))
