"""Compiling trained Sinkhorn layers: calibrate, fit, report (paper, algorithm 1).

The adapters ``asap_jax.linen`` and ``asap_jax.nnx`` record every layer on a batch, and write the
fitted states back into the model.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar

import numpy as np

from asap_jax import checks
from asap_jax.compiler import progress
from asap_jax.compiler.batches import check_batch, check_concrete, checked, describe_batch, own
from asap_jax.compiler.clock import Clock, timed
from asap_jax.compiler.end_to_end import ModelReport, compare
from asap_jax.compiler.fit import LayerFit, Solved, check_finite, is_reported
from asap_jax.compiler.measuring import Measurement
from asap_jax.compiler.options import Options, named_fit
from asap_jax.compiler.report import CompileReport, LayerReport
from asap_jax.fitting import fidelity
from asap_jax.records import CompiledState, Passed, Record, fresh_probe, observe, split_batch


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """A compiled model and its report.

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
    """Collects calibration data, batch by batch, and compiles the model.

    ``compile`` calls ``run``, which passes every batch through one frozen teacher. ``add`` may also
    be called while the teacher still trains. The data of the fit are then from all these states of
    the teacher, not only the last (paper, Appendix "Teacher Attention and Offline Fit").
    """

    hint: ClassVar[str]  # how to pass the layers' state through a transform of the framework

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
            raise TypeError(f"forward must be a function, got {checks.describe(forward)}")
        self.options, self.fit = options, named_fit(options.fit)
        self.apply_kwargs = dict(apply_kwargs or {})
        self.fits: dict[str, LayerFit] = {}
        self.num_batches = 0
        self.clock = Clock()

    @abc.abstractmethod
    def teacher(self, model: Any) -> Any:
        """The model without compiled layers."""

    @abc.abstractmethod
    def passed(self, model: Any, batch: Any) -> Passed:
        """One forward pass with dropout off; compiled layers of ``model`` run compiled."""

    def records(self, teacher: Any, batch: Any) -> Mapping[str, Record]:
        """The records of every layer, by path, of one forward pass of the teacher."""
        return self.passed(self.teacher(teacher), batch).records

    @abc.abstractmethod
    def _trace(self, teacher: Any, states: Mapping[str, CompiledState], batch: Any) -> None:
        """Traces one forward pass of the compiled teacher; its layers note that they ran."""

    @abc.abstractmethod
    def compiled(self, teacher: Any, states: Mapping[str, CompiledState]) -> dict[str, Any]:
        """The compiled teacher, as a keyword of CompileResult."""

    def check_switched(self, teacher: Any, states: Mapping[str, CompiledState], batch: Any) -> None:
        """Raises ValueError if a layer ignores its state; layers that did not run are skipped."""
        probe = fresh_probe()
        probed = {path: dataclasses.replace(s, probe=probe) for path, s in states.items()}
        ran = self.records(teacher, batch)
        with observe() as observer:
            self._trace(teacher, probed, batch)
        missing = [path for path in states if path in ran and path not in observer.compiled]
        if missing:
            raise ValueError(
                f"layers {missing} did not switch to the compiled operator: a transform around "
                f"them drops their state, or forward did not run them on its own argument. "
                f"{self.hint}"
            )

    @timed
    def add(self, teacher: Any, batch: Any, index: int | None = None) -> None:
        """Adds one batch at the teacher's present state.

        ``index`` names the batch in errors; by default batches are counted.

        Raises:
          ValueError: no such layer, a layer that cannot be compiled, values that are not finite,
            more activations than ``memory_limit`` allows.
          TypeError: a batch with a leaf that is not an array, or with a list that the model does
            not take.
        """
        where = f"calibration batch {self.num_batches if index is None else index}"
        options, recorded = self.options, self._copied_records(teacher, batch, where)
        for path, record in select(recorded, options.layers).items():
            if path not in self.fits:
                settings = dict(
                    closures=options.closures,
                    seed=options.seed,
                    holdout=options.holdout,
                    ending=options.ending,
                )
                self.fits[path] = self.fit.layer_kind()(path, record, self.fit, **settings)
            self.fits[path].add(record, where)
        stored = sum(layer.stored_bytes for layer in self.fits.values()) / 2**30
        if stored > self.fit.memory_limit:
            raise ValueError(
                f"the fit stores activations of its batches, {stored:.3g} GiB with {where}: more "
                f"than memory_limit={self.fit.memory_limit}. Give fewer batches, a fit that "
                f"adds up sums (such as 'moments'), or a higher limit"
            )
        self.num_batches += 1

    def _copied_records(self, teacher: Any, batch: Any, where: str) -> Mapping[str, Record]:
        """The records of a copy of the batch; TypeError if the model cannot take it."""
        check_batch(batch, where)
        check_concrete(batch, where)
        check_concrete(teacher, "the model")
        try:
            return self.records(teacher, own(batch))
        except Exception as error:  # models raise different errors for other inputs than theirs
            args, kwargs = split_batch(batch)
            nested = any(isinstance(x, (list, tuple)) for x in (*args, *kwargs.values()))
            expected = isinstance(error, (AttributeError, TypeError)) and nested
            if not (isinstance(batch, list) or expected):
                if isinstance(batch, (tuple, Mapping)):
                    error.add_note(
                        f"The model was called with {where}, {describe_batch(batch)}. A tuple "
                        "holds its positional arguments and a dict its keyword arguments; leave "
                        "labels out."
                    )
                raise
            raise TypeError(
                f"the model does not take {where}, {describe_batch(batch)} ({error}). A list or "
                f"tuple is passed as several arguments: stack the arrays of one argument"
            ) from error

    def reduce(self, total: Callable[[Any], Any]) -> None:
        """Adds up the sums of several processes, each over its own batches, before ``finish``.

        Every process must have added at least one batch. All then solve for the same coefficients;
        each process reports on its own report batches.

        Args:
          total: from a pytree of arrays to its leaf-wise sums over all processes, for instance
            with ``jax.experimental.multihost_utils.process_allgather``.

        Raises:
          ValueError: no batch was added, or the fit stores activations instead of sums (KL, several
            stages, the automatic choice).
        """
        if not self.fits:
            raise ValueError("batches holds no batch: every process needs at least one")
        for path in sorted(self.fits):
            self.fits[path].reduce(total)

    @timed
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
          teacher: the state to compile.
          report_batches: at least one batch.
          held_out: for the report: whether the fit did not see these batches.
          fit_batches: gives the fit's batches again (for KL with ``in_memory=False``).

        Raises:
          ValueError: no batch was added or given, no active token, a layer that did not switch to
            its compiled operator.
          TypeError: ``report_batches`` is not a list, or has a leaf that is not an array.
        """
        checks.instance("report_batches", report_batches, (list, tuple), "a list of batches")
        for index, batch in enumerate(report_batches):
            check_batch(batch, f"report batch {index}")
        if not self.fits or not report_batches:
            raise ValueError("batches holds no batch: give at least one calibration batch")
        again = functools.partial(self._again, teacher, fit_batches or tuple)
        with progress.stage("fit", sum(layer.num_steps for layer in self.fits.values())):
            solved = self.fit.solve(self.fits, again)
        states = {path: state for path, (state, _) in solved.items()}
        self.check_switched(teacher, states, report_batches[0])
        compiled = self.compiled(teacher, states)
        layers, model = self._measured(teacher, compiled, report_batches, solved)
        counts = self.num_batches, len(report_batches)
        seconds = self.clock.seconds, self.clock.compile_seconds
        report = CompileReport(layers, held_out, *counts, *seconds, model)
        return CompileResult(states, report, **compiled)

    def _measured(
        self,
        teacher: Any,
        compiled: Mapping[str, Any],
        batches: Sequence[Any],
        solved: Mapping[str, Solved],
    ) -> tuple[dict[str, LayerReport], ModelReport | None]:
        """The reports of the layers, and of the whole model."""
        (model,) = compiled.values()
        measurement, outputs = Measurement(solved, self.fits), []
        with progress.stage("report", len(batches) * len(solved)):
            for index, batch in enumerate(batches):
                theirs = self.passed(self.teacher(teacher), batch)
                measurement.add(theirs.records, f"batch {index}")
                outputs.append((self.passed(model, batch).outputs, theirs.outputs))
        return measurement.reports(), compare(outputs)

    def _again(
        self, teacher: Any, fit_batches: Callable[[], Iterable[Any]], path: str
    ) -> Iterator[Record]:
        """The records of one layer, in one more pass over the batches of the fit."""
        for batch in fit_batches():
            records = self.records(teacher, own(batch))
            if path in records:
                yield records[path]

    @timed
    def run(
        self, teacher: Any, batches: Iterable[Any], *, total: Callable[[Any], Any] | None = None
    ) -> CompileResult:
        """Fits on ``batches`` except the held-out share, and reports on that share.

        Held-out batches stay in memory, at most ``MOST_REPORTED``; further ones go to the fit.
        Without any, the report is on the first batch. ``total`` adds up the sums of several
        processes, see ``reduce``.

        Raises:
          TypeError: one batch instead of an iterable, a generator where batches are needed again.
          ValueError: as ``add`` and ``finish``.
        """
        share = self.options.holdout
        held_out, first = [], None
        count = len(batches) if isinstance(batches, Sized) else None
        with progress.stage("calibrate", count):
            for index, batch in enumerate(checked(batches, self.fit)):
                progress.begin(f"batch {index}")
                first = own(batch) if first is None else first
                if is_reported(index, share):
                    where = f"calibration batch {index}"
                    held_out.append(own(batch))
                    for path, record in self._copied_records(teacher, batch, where).items():
                        check_active(record, path, where)
                else:
                    self.add(teacher, batch, index)
        if total is not None:
            self.reduce(total)
        fit_batches = lambda: (b for i, b in enumerate(batches) if not is_reported(i, share))
        report = held_out or ([] if first is None else [first])
        return self.finish(teacher, report, held_out=bool(held_out), fit_batches=fit_batches)


def select(recorded: Mapping[str, Record], layers: Sequence[str] | None) -> dict[str, Record]:
    """The records of the layers to compile; ValueError for no layer or an unknown path."""
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


def check_active(record: Record, path: str, where: str) -> None:
    """Raises ValueError if a record has no active token or gives values that are not finite."""
    mass = fidelity.layer_balance(record)
    check_finite(mass, record, path, where)
    if (np.asarray(mass) == 0).any():
        raise ValueError(f"{where} has no active token at layer {path!r}")


def _natural(path: str) -> list:
    """Sort key that puts ``block_10`` after ``block_9``: text and numbers by turns."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", path))]
