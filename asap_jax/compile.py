"""Compiling trained Sinkhorn layers: calibrate, fit, report (paper, algorithm 1).

The framework adapters (``asap_jax.linen``, ``asap_jax.nnx``) give this module a function from a
batch to the records of every layer, and write the fitted states back into the model.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from asap_jax import calibrate
from asap_jax.capture import CompiledState, Record
from asap_jax.fitting import LayerFit
from asap_jax.options import Options
from asap_jax.report import CompileReport, LayerReport

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


def compile_layers(
    records: Callable[[Any], Mapping[str, Record]], batches: Iterable[Any], options: Options
) -> tuple[dict[str, CompiledState], CompileReport]:
    """Fits every layer that ``records`` finds and reports fidelity.

    Args:
      records: from a batch to the records of its layers, by path.
      batches: an iterable of calibration batches, read once. Batches that are held out are kept
        until the report; activations of the others are dropped batch by batch.
      options: see ``Options``.

    Returns:
      ``(states, report)``.

    Raises:
      ValueError: no batch, no such layer, S = 1, closures beyond the teacher's budget, data that
        are empty or not finite; each names the layer and the setting.
    """
    start = time.perf_counter()
    fits: dict[str, LayerFit] = {}
    kept, first, num_fit = [], None, 0
    for index, batch in enumerate(checked(batches, options)):
        first = batch if first is None else first
        if is_held_out(index, options.holdout):
            kept.append(batch)
            continue
        for path, record in select(records(batch), options.layers).items():
            if path not in fits:
                fits[path] = LayerFit(path, record, options)
            fits[path].add(record, f"calibration batch {index}")
        num_fit += 1
    if first is None:
        raise ValueError("batches holds no batch: give at least one calibration batch")

    def again(path):
        for index, batch in enumerate(batches):
            if not is_held_out(index, options.holdout):
                yield records(batch)[path]

    solved = {path: fit.solve(lambda path=path: again(path)) for path, fit in fits.items()}
    seconds = time.perf_counter() - start
    report_batches = kept or [first]
    layers = measure(records, report_batches, solved)
    states = {path: state for path, (state, _) in solved.items()}
    return states, CompileReport(layers, bool(kept), num_fit, len(report_batches), seconds)


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


def measure(records, batches, solved: Mapping[str, tuple]) -> dict[str, LayerReport]:
    """Mean fidelity over ``batches``, one LayerReport a layer (each layer of a stack alone)."""
    totals: dict[str, Any] = {}
    stacked: dict[str, bool] = {}
    for batch in batches:
        found = records(batch)
        for path, (state, _) in solved.items():
            budgets = tuple(s for s in BUDGETS if s < state.spec.num_steps)
            new = calibrate.layer_fidelity(found[path], state, budgets=budgets)
            new = jax.tree.map(lambda x: np.asarray(x, np.float64).reshape(-1), new)
            totals[path] = new if path not in totals else jax.tree.map(np.add, totals[path], new)
            stacked[path] = bool(found[path].stack)
    reports = {}
    for path, total in totals.items():
        for i, figures in enumerate(solved[path][1]):
            name = f"{path}[{i}]" if stacked[path] else path
            rows = {
                operator: {metric: float(x[i] / len(batches)) for metric, x in row.items()}
                for operator, row in total.items()
            }
            reports[name] = LayerReport(name, rows, {**rows.pop("fit"), **figures})
    return reports


def _natural(path: str) -> list:
    """Sort key by which ``block_10`` follows ``block_9``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path)
    ]


def checked(batches: Iterable[Any], options: Options) -> Iterable[Any]:
    """``batches`` as it is.

    Raises:
      TypeError: one batch instead of an iterable of them, or a one-pass iterator where the fit
        must go through the data again.
    """
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


def is_held_out(index: int, share: float) -> bool:
    """Whether batch ``index`` is held out: never the first, then one in every ``1 / share``."""
    before = lambda i: math.ceil(i * share - 1e-9)
    return index > 0 and before(index) > before(index - 1)


def group_by_path(tree: Mapping, leaf_type: type, prefix: tuple = ()) -> dict[str, Any]:
    """Flattens nested mappings to ``"a/b/c" -> leaf`` for leaves of ``leaf_type``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, leaf_type):
            found["/".join(prefix)] = value
        elif isinstance(value, Mapping):
            found.update(group_by_path(value, leaf_type, (*prefix, str(name))))
    return found
