"""Compiling trained Sinkhorn layers: calibrate, fit, report (paper, algorithm 1).

The framework adapters (``asap_jax.linen``, ``asap_jax.nnx``) say how a batch becomes the records
of every layer, and write the fitted states back into the model.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from asap_jax import checks
from asap_jax.compiler.automatic_fit import AutomaticFit, mean_ladder
from asap_jax.compiler.options import Options
from asap_jax.compiler.paper_fit import LayerFit, is_held_out
from asap_jax.compiler.report import CompileReport, LayerReport
from asap_jax.fitting import targets
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
        self.fits: dict[str, LayerFit | AutomaticFit] = {}
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
        for path, record in select(self.records(teacher, batch), self.options.layers).items():
            if path not in self.fits:
                kind = AutomaticFit if self.options.recipe == "auto" else LayerFit
                self.fits[path] = kind(path, record, self.options)
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
          ValueError: nothing was added; KL or ``recipe="auto"``, which keep activations and not
            sums.
        """
        options = self.options
        if options.objective == "kl" or options.recipe == "auto":
            raise ValueError(
                f"only least-squares sums add up over processes, not objective="
                f"{options.objective!r} with recipe={options.recipe!r}: compile on one process"
            )
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
        again = lambda path: (
            found[path]
            for batch in fit_batches()
            if path in (found := self.records(teacher, batch))
        )
        shared = None
        if self.options.coefficients == "shared":
            totals = [fit.total() for fit in self.fits.values()]
            shared = [functools.reduce(operator.add, parts) for parts in zip(*totals, strict=True)]
        solved = {
            path: fit.solve(lambda path=path: again(path), shared)
            for path, fit in self.fits.items()
        }
        self.seconds += time.perf_counter() - start
        states = {path: state for path, (state, _) in solved.items()}
        compiled = self.attach(teacher, states, report_batches[0])
        layers = measure(functools.partial(self.records, teacher), report_batches, solved)
        if self.options.recipe == "auto":
            ladders = self._ladders(teacher, report_batches)
            layers = {
                name: dataclasses.replace(layer, ladder=ladders[name])
                for name, layer in layers.items()
            }
        report = CompileReport(
            layers, held_out, self.num_batches, len(report_batches), self.seconds
        )
        return CompileResult(states, report, **compiled)

    def _ladders(self, teacher, batches) -> dict[str, dict]:
        """Layer (of a stack, each) to its ladder over ``batches``."""
        found: dict[str, list] = {}
        for batch in batches:
            for path, record in self.records(teacher, batch).items():
                if path not in self.fits:
                    continue
                layers = [path]
                if record.stack:
                    layers = [f"{path}[{i}]" for i in range(math.prod(record.stack))]
                ladders = self.fits[path].ladder(record, timed=layers[0] not in found)
                for layer, ladder in zip(layers, ladders, strict=True):
                    found.setdefault(layer, []).append(ladder)
        return {name: mean_ladder(ladders) for name, ladders in found.items()}

    def run(
        self,
        teacher: Any,
        batches: Iterable[Any],
        *,
        total: Callable[[Any], Any] | None = None,
    ) -> CompileResult:
        """Adds ``batches``, but for the share held out, and finishes on that share.

        Batches that are held out are kept until the report. ``total`` adds up the sums of several
        processes, see ``reduce``.

        Raises:
          TypeError: one batch instead of an iterable, a generator where batches are needed again.
          ValueError: as ``add`` and ``finish``.
        """
        share = self.options.holdout
        kept, first = [], None
        for index, batch in enumerate(checked(batches, self.options)):
            first = batch if first is None else first
            if is_held_out(index, share):
                check_batch(batch, f"calibration batch {index}")
                kept.append(batch)
                for path, record in self.records(teacher, batch).items():
                    check_finite(record, path, f"calibration batch {index}")
            else:
                self.add(teacher, batch, index)
        if total is not None:
            self.reduce(total)
        fit_batches = lambda: (b for i, b in enumerate(batches) if not is_held_out(i, share))
        report = kept or ([] if first is None else [first])
        return self.finish(teacher, report, held_out=bool(kept), fit_batches=fit_batches)


def select(found: Mapping[str, Record], layers: Sequence[str] | None) -> dict[str, Record]:
    """The records to compile; ValueError when there is none or a path is unknown."""
    if not found:
        raise ValueError(
            "no SinkhornAttention layer ran in the model: pass "
            "SinkhornAttention(spec) as attention_fn of its attention layers"
        )
    if layers is None:
        return {path: found[path] for path in sorted(found, key=_natural)}
    unknown = [path for path in layers if path not in found]
    if unknown:
        raise ValueError(
            f"layers={unknown} are not in the model; its Sinkhorn layers are {list(found)}"
        )
    return {path: found[path] for path in layers}


def check_batch(batch: Any, where: str) -> None:
    """Raises TypeError unless ``batch`` is made of arrays and numbers."""
    if batch is None:
        raise TypeError(f"{where} must be an array, or a tuple or dict of arrays, got None")
    for leaf in jax.tree.leaves(batch):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise TypeError(f"{where} must hold arrays only, got {checks.told(leaf)}") from None


def check_finite(record: Record, path: str, where: str) -> None:
    """Raises ValueError when a held-out record has no active token or gives NaN duals."""
    total = targets.layer_balance(record)
    if not np.isfinite(np.asarray(total)).all():
        raise ValueError(
            f"{where} gives a value that is not finite at layer {path!r} (query of shape "
            f"{record.query.shape})"
        )
    if (np.asarray(total) == 0).any():
        raise ValueError(f"{where} has no active token at layer {path!r}")


def measure(records, batches, solved: Mapping[str, tuple]) -> dict[str, LayerReport]:
    """Mean fidelity over ``batches``, one LayerReport a layer (each layer of a stack alone)."""
    totals: dict[str, Any] = {}
    stacked: dict[str, bool] = {}
    counts: dict[str, int] = {}
    for batch in batches:
        found = records(batch)
        for path, (state, _) in solved.items():
            if path not in found:  # an optional branch that this batch did not take
                continue
            counts[path] = counts.get(path, 0) + 1
            budgets = tuple(s for s in BUDGETS if s < state.spec.num_steps)
            new = targets.layer_fidelity(found[path], state, budgets=budgets)
            new = jax.tree.map(lambda x: np.asarray(x, np.float64).reshape(-1), new)
            totals[path] = new if path not in totals else jax.tree.map(np.add, totals[path], new)
            stacked[path] = bool(found[path].stack)
    reports = {}
    for path, total in totals.items():
        for i, figures in enumerate(solved[path][1]):
            layer = f"{path}[{i}]" if stacked[path] else path
            rows = {
                name: {metric: float(x[i] / counts[path]) for metric, x in row.items()}
                for name, row in total.items()
            }
            reports[layer] = LayerReport(layer, rows, {**rows.pop("fit"), **figures})
    return reports


def _natural(path: str) -> list:
    """Sort key by which ``block_10`` follows ``block_9``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path)
    ]


def checked(batches: Iterable[Any], options: Options) -> Iterable[Any]:
    """``batches`` as it is.

    Raises:
      TypeError: one batch or another thing instead of an iterable of them, or a one-pass iterator
        where the fit must go through the data again.
    """
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"batches must be an iterable of batches, got {checks.told(batches)}")
    if isinstance(batches, (jax.Array, np.ndarray, Mapping, str)):
        raise TypeError(
            f"batches must be an iterable of batches, got one {type(batches).__name__}; for a "
            f"single batch give [batch]"
        )
    if options.objective == "kl" and not options.in_memory and iter(batches) is batches:
        raise TypeError(
            "batches must be re-iterable (a list, not a generator) for objective='kl' with "
            "in_memory=False, which goes through them once an evaluation"
        )
    return batches


def group_by_path(tree: Mapping, leaf_type: type, prefix: tuple = ()) -> dict[str, Any]:
    """Flattens nested mappings to ``"a/b/c" -> leaf`` for leaves of ``leaf_type``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, leaf_type):
            found["/".join(prefix)] = value
        elif isinstance(value, Mapping):
            found.update(group_by_path(value, leaf_type, (*prefix, str(name))))
    return found
