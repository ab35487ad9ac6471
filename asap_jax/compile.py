"""Compiling trained Sinkhorn layers: calibrate, fit, report (paper, algorithm 1).

The framework adapters (``asap_jax.linen``, ``asap_jax.nnx``) give this module a function from a
batch to the records of every layer, and write the fitted states back into the model.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import attention, calibrate, checks
from asap_jax.capture import CompiledState, Record
from asap_jax.features import SlicedPotentials
from asap_jax.predictor import LinearHead, Predictor
from asap_jax.report import CompileReport, LayerReport
from asap_jax.slices import slice_directions

RECIPES = ("paper",)
OBJECTIVES = ("ls",)
COEFFICIENTS = ("pooled", "per_head")
BUDGETS = (2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a compile may choose; see ``asap_jax.linen.compile`` for each."""

    holdout: float = 0.2
    seed: int = 0
    layers: Sequence[str] | None = None
    recipe: str = "paper"
    objective: str = "ls"
    num_slices: int = 32
    closures: str | int = "two_sided"
    ridge: float = 1e-3
    coefficients: str = "pooled"

    def __post_init__(self):
        checks.one_of("recipe", self.recipe, RECIPES)
        checks.one_of("objective", self.objective, OBJECTIVES)
        checks.one_of("coefficients", self.coefficients, COEFFICIENTS)
        checks.positive_int("num_slices", self.num_slices)
        object.__setattr__(self, "ridge", checks.non_negative_float("ridge", self.ridge))
        holdout = checks.non_negative_float("holdout", self.holdout)
        if holdout >= 1:
            raise ValueError(f"holdout must be in [0, 1), got {holdout}")
        if isinstance(self.closures, str):
            checks.one_of("closures", self.closures, attention.CLOSURES)
        else:
            checks.positive_int("closures", self.closures)
        if isinstance(self.layers, str):
            raise TypeError(f"layers must be a sequence of paths, got the string {self.layers!r}")


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
    sums: dict[str, Any] = {}
    families: dict[str, tuple] = {}
    specs: dict[str, Any] = {}
    shapes: dict[str, tuple] = {}
    kept, first, num_fit = [], None, 0
    before_end = calibrate.before_end_of(options.closures)
    for index, batch in enumerate(_checked(batches)):
        first = batch if first is None else first
        if _is_held_out(index, options.holdout):
            kept.append(batch)
            continue
        found = select(records(batch), options.layers)
        if not families:
            for path, record in found.items():
                refuse(path, record.spec, options.closures)
                specs[path], shapes[path] = record.spec, (record.stack, record.query.shape[-2:])
                families[path] = paper_features(record, options)
        for path, record in found.items():
            new = calibrate.layer_sums(record, families[path], before_end=before_end)
            if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(new)):
                raise ValueError(
                    f"calibration batch {index} gives a value that is not finite at "
                    f"layer {path!r} (query of shape {record.query.shape})"
                )
            sums[path] = new if path not in sums else sums[path] + new
        num_fit += 1
    if first is None:
        raise ValueError("batches holds no batch: give at least one calibration batch")

    states, fits = {}, {}
    for path in families:
        states[path], fits[path] = fit(
            path, sums[path], families[path], specs[path], options, stack=shapes[path][0]
        )
    seconds = time.perf_counter() - start
    report_batches = kept or [first]
    layers = measure(records, report_batches, states, fits)
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


def refuse(path: str, spec, closures) -> None:
    """Raises ValueError for a teacher that these closures cannot compile, with the reason."""
    if spec.num_steps == 1:
        raise ValueError(
            f"layer {path!r} has num_steps=1, which is row softmax: it has no dual "
            f"before its only step, so there is nothing to compile; leave it out with "
            f"layers=[...]"
        )
    if isinstance(closures, int) and closures >= spec.num_steps:
        raise ValueError(
            f"closures={closures} needs a teacher of more steps than layer {path!r} "
            f"with num_steps={spec.num_steps}"
        )


def paper_features(record: Record, options: Options) -> tuple:
    """The paper's feature family: one bank of Gaussian slices, the same for every layer."""
    bank = slice_directions(
        jax.random.key(options.seed), options.num_slices, record.query.shape[-1]
    )
    return (SlicedPotentials(bank),)


def fit(path: str, sums, families: tuple, spec, options: Options, *, stack: tuple = ()):
    """Solves one layer's normal equations (paper, eq. asap_ls_closed_form).

    Returns its CompiledState, arrays stacked under a scan, and the fit's figures.
    """
    solve = lambda s: (s.pooled() if options.coefficients == "pooled" else s).solve(options.ridge)
    for _ in stack:
        solve = jax.vmap(solve)
    solution = solve(sums)
    if not bool(np.asarray(solution.ok).all()):
        raise ValueError(f"layer {path!r} saw no active token in the calibration batches")
    families = jax.tree.map(lambda x: jnp.broadcast_to(x, (*stack, *x.shape)), families)
    side = "query" if isinstance(options.closures, str) else spec.side_before_end(options.closures)
    predictor = Predictor(families, LinearHead(solution.coefficients), side=side)
    state = CompiledState(predictor, spec=spec, closures=options.closures)
    per_layer = lambda x: np.asarray(x).reshape(math.prod(stack), -1)
    figures = dict(
        r_squared_fit=per_layer(solution.r_squared).mean(-1),
        num_rows=per_layer(solution.num_rows).sum(-1),
    )
    return state, figures


def measure(records, batches, states, fits) -> dict[str, LayerReport]:
    """Mean fidelity over ``batches``, one LayerReport a layer (each layer of a stack alone)."""
    totals: dict[str, Any] = {}
    for batch in batches:
        found = records(batch)
        for path, state in states.items():
            budgets = tuple(s for s in BUDGETS if s < state.spec.num_steps)
            new = calibrate.layer_fidelity(found[path], state, budgets=budgets)
            new = jax.tree.map(lambda x: np.asarray(x, np.float64).reshape(-1), new)
            totals[path] = new if path not in totals else jax.tree.map(np.add, totals[path], new)
    reports = {}
    for path, total in totals.items():
        count = fits[path]["num_rows"].shape[0]
        for i in range(count):
            name = path if count == 1 and not _stacked(states[path]) else f"{path}[{i}]"
            rows = {
                operator: {
                    metric: float(value[i] / len(batches)) for metric, value in figures.items()
                }
                for operator, figures in total.items()
            }
            r_squared = rows.pop("fit")["r_squared"]
            reports[name] = LayerReport(
                name,
                rows,
                dict(r_squared=r_squared, **{key: float(x[i]) for key, x in fits[path].items()}),
            )
    return reports


def _natural(path: str) -> list:
    """Sort key by which ``block_10`` follows ``block_9``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path)
    ]


def _stacked(state: CompiledState) -> bool:
    return state.predictor.features[0].directions.ndim > 2


def _checked(batches):
    if isinstance(batches, (jax.Array, np.ndarray, Mapping, str)):
        raise TypeError(
            f"batches must be an iterable of batches, got one "
            f"{type(batches).__name__}; for a single batch give [batch]"
        )
    return batches


def _is_held_out(index: int, share: float) -> bool:
    """Whether batch ``index`` is held out: the second, then one in every ``1 / share``."""
    if share == 0:
        return False
    offset = 1 / share - 2
    return math.floor((index + 1 + offset) * share + 1e-9) > math.floor(
        (index + offset) * share + 1e-9
    )


def group_by_path(tree: Mapping, leaf_type: type, prefix: tuple = ()) -> dict[str, Any]:
    """Flattens nested mappings to ``"a/b/c" -> leaf`` for leaves of ``leaf_type``."""
    found = collections.OrderedDict()
    for name, value in tree.items():
        if isinstance(value, leaf_type):
            found["/".join(prefix)] = value
        elif isinstance(value, Mapping):
            found.update(group_by_path(value, leaf_type, (*prefix, str(name))))
    return dict(found)
