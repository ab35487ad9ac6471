"""Compiling trained Sinkhorn layers: calibrate, fit, report (paper, algorithm 1).

The framework adapters (``asap_jax.linen``, ``asap_jax.nnx``) say how a batch becomes the records
of every layer, and write the fitted states back into the model.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from asap_jax import checks
from asap_jax.compiler.automatic_fit import mean_ladder
from asap_jax.compiler.fit import Fit, LayerFit, Solved, check_finite, is_held_out
from asap_jax.compiler.options import Options
from asap_jax.compiler.report import CompileReport, LayerReport
from asap_jax.fitting import fidelity
from asap_jax.records import CompiledState, Record

BUDGETS = (2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """A compiled model and what it lost.

    Attributes:
      variables: linen variables with the ``"asap"`` collection, or None.
      model: the compiled nnx model, or None.
      states: layer path to its CompiledState.
      report: fidelity per layer; prints as a table.
    """

    states: dict[str, CompiledState]
    report: CompileReport
    variables: Any = None
    model: Any = None


class Calibration(abc.ABC):
    """Collects calibration data, batch by batch, and turns them into a compiled model.

    ``compile`` is ``run``: every batch through one frozen teacher. ``add`` may also be called
    while the teacher still trains; the fit then belongs to the sequence of teacher states that
    were seen, not exactly to the last one (paper, Appendix "Teacher Attention and Offline Fit").
    """

    def __init__(
        self,
        options: Options | None = None,
        apply_kwargs: Mapping[str, Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
    ):
        options = Options() if options is None else options
        checks.instance("options", options, Options, "an Options")
        if apply_kwargs is not None:
            checks.instance("apply_kwargs", apply_kwargs, Mapping, "a mapping of keywords")
        if forward is not None and not callable(forward):
            raise TypeError(f"forward must be a function, got {checks.told(forward)}")
        self.options = options
        self.apply_kwargs = dict(apply_kwargs or {})
        self.fits: dict[str, LayerFit] = {}
        self.num_batches = 0
        self.seconds = 0.0

    @abc.abstractmethod
    def records(self, teacher: Any, batch: Any) -> Mapping[str, Record]:
        """The records of every layer, by path, of one forward pass with dropout off."""

    @abc.abstractmethod
    def attach(self, teacher: Any, states: Mapping[str, CompiledState], batch: Any) -> dict:
        """The compiled teacher as keywords of CompileResult; ``batch`` checks that it switched."""

    def add(self, teacher: Any, batch: Any, index: int | None = None) -> None:
        """Adds one batch at the teacher's present state; activations are dropped after it.

        ``index`` names the batch in errors; by default batches are counted.

        Raises:
          ValueError: no such layer, a layer that cannot be compiled, values that are not finite.
          TypeError: a batch that holds other things than arrays.
        """
        start = time.perf_counter()
        where = f"calibration batch {self.num_batches if index is None else index}"
        check_batch(batch, where)
        options = self.options
        for path, record in select(self.records(teacher, batch), options.layers).items():
            if path not in self.fits:
                settings = options.fit, options.closures, options.seed, options.holdout
                self.fits[path] = options.fit.layer_kind()(path, record, *settings)
            self.fits[path].add(record, where)
        self.num_batches += 1
        self.seconds += time.perf_counter() - start

    def reduce(self, total: Callable[[Any], Any]) -> None:
        """Adds up what several processes added, each its own batches, before ``finish``.

        Every process must have added at least one batch, and then solves for the same
        coefficients; its report is of its own report batches.

        Args:
          total: from a pytree of arrays to its leaf-wise sums over all processes, for instance
            over ``jax.experimental.multihost_utils.process_allgather``.

        Raises:
          ValueError: nothing was added, or the fit holds activations and not sums: KL, several
            stages, the automatic choice.
        """
        if not self.fits:
            raise ValueError("batches holds no batch: every process needs at least one")
        for path in sorted(self.fits):
            self.fits[path].reduce(total)

    def finish(
        self,
        teacher: Any,
        report_batches: Sequence[Any],
        *,
        held_out: bool = True,
        fit_batches: Callable[[], Iterable[Any]] | None = None,
    ) -> CompileResult:
        """Solves every layer and measures the compiled ``teacher`` on ``report_batches``.

        Args:
          teacher: the state to be compiled.
          report_batches: at least one batch.
          held_out: whether the fit did not see them.
          fit_batches: gives the fit's batches again (KL with ``in_memory=False``).

        Raises:
          ValueError: nothing was added, no batch to report on, no active token, a layer that did
            not switch to its compiled operator.
          TypeError: batches that are no list, or hold other things than arrays.
        """
        checks.instance("report_batches", report_batches, (list, tuple), "a list of batches")
        for index, batch in enumerate(report_batches):
            check_batch(batch, f"report batch {index}")
        if not self.fits or not report_batches:
            raise ValueError("batches holds no batch: give at least one calibration batch")
        start = time.perf_counter()
        solved = self.options.fit.solve(
            self.fits, lambda path: self._again(path, teacher, fit_batches)
        )
        self.seconds += time.perf_counter() - start
        states = {path: state for path, (state, _) in solved.items()}
        compiled = self.attach(teacher, states, report_batches[0])
        layers = measure(
            functools.partial(self.records, teacher), report_batches, self.fits, solved
        )
        report = CompileReport(
            layers, held_out, self.num_batches, len(report_batches), self.seconds
        )
        return CompileResult(states, report, **compiled)

    def _again(
        self, path: str, teacher: Any, fit_batches: Callable[[], Iterable[Any]]
    ) -> Iterator[Record]:
        """The records of one layer, in one more pass over the batches of the fit."""
        for batch in fit_batches():
            records = self.records(teacher, batch)
            if path in records:
                yield records[path]

    def run(
        self,
        teacher: Any,
        batches: Iterable[Any],
        *,
        total: Callable[[Any], Any] | None = None,
    ) -> CompileResult:
        """Adds ``batches`` except the share held out, and finishes on that share.

        Batches that are held out are held until the report. ``total`` adds up the sums of several
        processes, see ``reduce``.

        Raises:
          TypeError: one batch instead of an iterable, a generator where batches are needed again.
          ValueError: as ``add`` and ``finish``.
        """
        share = self.options.holdout
        held, first = [], None
        for index, batch in enumerate(checked(batches, self.options.fit)):
            first = batch if first is None else first
            if is_held_out(index, share):
                check_batch(batch, f"calibration batch {index}")
                held.append(batch)
                for path, record in self.records(teacher, batch).items():
                    check_active(record, path, f"calibration batch {index}")
            else:
                self.add(teacher, batch, index)
        if total is not None:
            self.reduce(total)
        fit_batches = lambda: (b for i, b in enumerate(batches) if not is_held_out(i, share))
        report = held or ([] if first is None else [first])
        return self.finish(teacher, report, held_out=bool(held), fit_batches=fit_batches)


def select(recorded: Mapping[str, Record], layers: Sequence[str] | None) -> dict[str, Record]:
    """The records to compile; ValueError when there is none or a path is unknown."""
    if not recorded:
        raise ValueError(
            "no SinkhornAttention layer ran in the model: pass "
            "SinkhornAttention(spec) as attention_fn of its attention layers"
        )
    if layers is None:
        return {path: recorded[path] for path in sorted(recorded, key=_natural)}
    unknown = [path for path in layers if path not in recorded]
    if unknown:
        raise ValueError(
            f"layers={unknown} are not in the model; its Sinkhorn layers are {list(recorded)}"
        )
    return {path: recorded[path] for path in layers}


def check_batch(batch: Any, where: str) -> None:
    """Raises TypeError unless ``batch`` is made of arrays and numbers."""
    if batch is None:
        raise TypeError(f"{where} must be an array, or a tuple or dict of arrays, got None")
    for leaf in jax.tree.leaves(batch):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise TypeError(f"{where} must hold arrays only, got {checks.told(leaf)}") from None


def check_active(record: Record, path: str, where: str) -> None:
    """Raises ValueError when a held-out record has no active token or gives NaN duals."""
    mass = fidelity.layer_balance(record)
    check_finite(mass, record, path, where)
    if (np.asarray(mass) == 0).any():
        raise ValueError(f"{where} has no active token at layer {path!r}")


def measure(
    records: Callable[[Any], Mapping[str, Record]],
    batches: Sequence[Any],
    fits: Mapping[str, LayerFit],
    solved: Mapping[str, Solved],
) -> dict[str, LayerReport]:
    """Mean fidelity over ``batches``, one LayerReport a layer (each layer of a stack alone)."""
    cases: dict[str, list] = {path: [] for path in solved}
    ladders: dict[str, list] = {path: [] for path in solved}
    for batch in batches:
        recorded = records(batch)
        for path, (state, _) in solved.items():
            if path not in recorded:  # an optional branch that this batch did not take
                continue
            budgets = tuple(s for s in BUDGETS if s < state.spec.num_steps)
            case = fidelity.layer_fidelity(recorded[path], state, budgets=budgets)
            cases[path].append(jax.tree.map(lambda x: np.asarray(x, np.float64).reshape(-1), case))
            ladder = fits[path].ladder(recorded[path], timed=not ladders[path])
            if ladder is not None:
                ladders[path].append(ladder)
    reports = {}
    for path, (_, figures) in solved.items():
        if not cases[path]:
            continue
        means = jax.tree.map(lambda *x: np.mean(x, 0), *cases[path])
        for i, numbers in enumerate(figures):
            layer = f"{path}[{i}]" if fits[path].stack else path
            rows = {
                name: {metric: float(x[i]) for metric, x in row.items()}
                for name, row in means.items()
            }
            fit = {**rows.pop("fit"), **numbers}
            own = [ladder[i] for ladder in ladders[path]]
            reports[layer] = LayerReport(layer, rows, fit, mean_ladder(own) if own else None)
    return reports


def _natural(path: str) -> list:
    """Sort key that puts ``block_10`` after ``block_9``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path)
    ]


def checked(batches: Iterable[Any], fit: Fit) -> Iterable[Any]:
    """``batches`` as it is.

    Raises:
      TypeError: one batch, or not an iterable of batches, or a one-pass iterator
        where the fit must go through the data again.
    """
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"batches must be an iterable of batches, got {checks.told(batches)}")
    if isinstance(batches, (jax.Array, np.ndarray, Mapping, str)):
        raise TypeError(
            f"batches must be an iterable of batches, got one {type(batches).__name__}; for a "
            f"single batch give [batch]"
        )
    if fit.reads_batches_again and iter(batches) is batches:
        raise TypeError(
            "batches must be re-iterable (a list, not a generator) for objective='kl' with "
            "in_memory=False, which goes through them once an evaluation"
        )
    return batches
