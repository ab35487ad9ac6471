"""Diagnosis: whether compiled layers still fit the data that they run on.

Pure functions of what the layers record on one batch; ``asap_jax.linen.diagnose`` and
``asap_jax.nnx.diagnose`` run the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks, metrics
from asap_jax.attention import functions
from asap_jax.compiler import verdict
from asap_jax.compiler.batches import check_batch
from asap_jax.fitting import fidelity
from asap_jax.predictor import DualPair, Predictor, statistics
from asap_jax.problem import Problem
from asap_jax.records import CompiledState, Record, call, check_mask, over_stack, problem
from asap_jax.spec import SinkhornSpec

LIMIT = 2.0
"""Largest distance of a statistic from its calibration before a layer should be recalibrated."""
FLOOR = 0.05
"""Added to the calibration's standard deviation of a logarithm, so that 5 % are never far."""
WHERE = "the batch to diagnose"
_TITLES = {
    "row_error": "row error",
    "column_error": "column error",
    "drift": "drift",
    "score_ratio": "score ratio",
    "underflow": "underflow",
    "teacher_error": "teacher error",
    "rel_l2": "rel-l2",
    "output_rel_l2": "output rel-l2",
    "zero_rel_l2": "rel-l2 from zero",
}


@flax.struct.dataclass
class LayerDiagnosis:
    """One compiled layer on one batch: 0-d arrays, or arrays over the layers of a stack.

    With nothing active, every figure is NaN, because all are means over active tokens. An active
    token that is not finite makes ``finite`` False and the figures that depend on it NaN.

    Attributes:
      row_error, column_error: mean distance of the row and column sums from their targets, as in
        ``asap_jax.metrics``. One of the two is 0 by construction.
      distances: for each statistic of ``Predictor.statistics``, how far the mean of its logarithm
        over the batch is from the calibration's, in units of the calibration's standard deviation
        plus 0.05; the largest over the heads. NaN without statistics, or if no problem has two
        different tokens on both sides.
      ratios: for each statistic, its geometric mean over the batch divided by that of the
        calibration, at the head farthest from 1.
      underflow: share of the scores whose exponential underflows in float32 after the largest score
        of the row is subtracted.
      teacher_error: marginal error of the teacher after its S steps, on the side where it does not
        end; a small number means that it has converged.
      num_active: active queries, over all heads.
      finite: whether active queries, keys and the output are finite.
      rel_l2, output_rel_l2: distance of the layer's weights and head outputs from its teacher's;
        None without ``teacher=True``.
      zero_rel_l2: ``rel_l2`` of the same closures from the dual 0; None for ``closures="none"``.
    """

    row_error: jax.Array
    column_error: jax.Array
    distances: dict[str, jax.Array]
    ratios: dict[str, jax.Array]
    underflow: jax.Array
    teacher_error: jax.Array
    num_active: jax.Array
    finite: jax.Array
    rel_l2: jax.Array | None = None
    output_rel_l2: jax.Array | None = None
    zero_rel_l2: jax.Array | None = None

    @property
    def drift(self) -> jax.Array:
        """The largest of ``distances``."""
        return functools.reduce(jnp.maximum, self.distances.values())

    @property
    def score_ratio(self) -> jax.Array:
        """``ratios["score_rms"]``: the scores of the batch over those of the calibration."""
        return self.ratios["score_rms"]

    @property
    def recalibrate(self) -> jax.Array:
        """Whether ``drift`` is above the limit of 2 or unknown."""
        return ~(self.drift <= LIMIT)

    def verdict(self) -> str:
        """One line in plain words, of concrete figures of one layer."""
        if not bool(self.num_active):
            return "nothing active"
        if not bool(self.finite):
            return "NOT FINITE: an active token or the output is not finite"
        if np.isnan(float(self.drift)):
            return (
                "UNKNOWN: the layer has no calibration statistics (compile it again), or no "
                "example has two different tokens"
            )
        if bool(self.recalibrate):
            name = max(self.distances, key=lambda name: float(self.distances[name]))
            return (
                f"RECALIBRATE: {name} is {float(self.ratios[name]):.2f} times that of the "
                f"calibration (distance {float(self.distances[name]):.1f}, limit {LIMIT:g})"
            )
        zero, own = self.zero_rel_l2, self.rel_l2
        if zero is not None and own is not None and not float(own) <= float(zero):
            return "RECALIBRATE: the same closures without a prediction are closer to the teacher"
        if self.output_rel_l2 is not None and float(self.output_rel_l2) > verdict.FAR:
            error = float(self.output_rel_l2)
            return f"FAR from its teacher: output rel-l2 {error:.2g}, limit {verdict.FAR:g}"
        return "ok"


@flax.struct.dataclass
class Diagnosis:
    """What ``diagnose`` found: layer path to LayerDiagnosis. A pytree of arrays; prints as a table.

    Attributes:
      layers: by layer path, the compiled layers that ran.
      not_run: paths of compiled states that no layer used.
      with_loop: paths of layers that ran the Sinkhorn loop, because they have no state.
    """

    layers: dict[str, LayerDiagnosis]
    not_run: tuple[str, ...] = flax.struct.field(pytree_node=False, default=())
    with_loop: tuple[str, ...] = flax.struct.field(pytree_node=False, default=())

    @property
    def recalibrate(self) -> jax.Array:
        """Whether any layer is out of its calibration, not finite or without statistics; 0-d."""
        bad = [(layer.recalibrate | ~layer.finite).any() for layer in self.layers.values()]
        return functools.reduce(jnp.logical_or, bad)

    def each(self) -> Iterator[tuple[str, LayerDiagnosis]]:
        """Single layers by path; ``[i]`` is appended within a stack."""
        for path, layer in self.layers.items():
            shape = jnp.shape(layer.finite)
            for index in np.ndindex(shape):
                name = path + (f"[{np.ravel_multi_index(index, shape)}]" if shape else "")
                yield name, jax.tree.map(lambda x, i=index: x[i], layer)

    def __str__(self) -> str:
        layers = list(self.each())
        shown = {key: t for key, t in _TITLES.items() if getattr(layers[0][1], key) is not None}
        width = max(len("layer"), *(len(name) for name, _ in layers))
        lines = [f"{'layer':<{width}} {' '.join(shown.values())}"]
        for name, layer in layers:
            cells = " ".join(f"{float(getattr(layer, k)):>{len(t)}.3g}" for k, t in shown.items())
            lines.append(f"{name:<{width}} {cells}")
        verdicts = {name: layer.verdict() for name, layer in layers}
        bad = [f"  {name}: {said}" for name, said in verdicts.items() if said != "ok"]
        summary = f"{len(bad)} of {len(layers)} layer(s) need a look" if bad else "ok"
        for paths, what in (
            (self.not_run, "compiled, but no layer used the state on this batch"),
            (self.with_loop, "not compiled, ran the Sinkhorn loop"),
        ):
            lines += [f"{what}: {', '.join(paths)}"] if paths else []
        return "\n".join([*lines, f"verdict: {summary}", *bad])


def diagnose(
    records: Mapping[str, Record], states: Mapping[str, CompiledState], *, teacher: bool
) -> Diagnosis:
    """The diagnosis of every compiled layer that ran on a batch.

    Args:
      records, states: by layer path.
      teacher: also measure the distance from the teacher.

    Raises:
      ValueError: no compiled layer ran, or a mask has values other than 0 and 1.
    """
    checks.static_bool("teacher", teacher)
    if not states:
        raise ValueError("the model has no compiled layer: diagnose what compile returned")
    ran = [path for path in states if path in records]
    if not ran:
        raise ValueError(f"none of the compiled layers {list(states)} ran on {WHERE}")
    layers = {}
    for path in ran:
        check_mask(records[path], path, WHERE)
        layers[path] = layer_diagnosis(records[path], states[path], teacher=teacher)
    not_run = tuple(path for path in states if path not in records)
    with_loop = tuple(path for path in records if path not in states)
    return Diagnosis(layers, not_run, with_loop)


def checked_batch(batch: Any) -> Any:
    """``batch``; TypeError unless it is one batch, and its leaves are arrays or numbers."""
    if isinstance(batch, list):
        raise TypeError(
            f"{WHERE} must be one batch: an array, or a tuple or dict of arrays; got a list of "
            f"{len(batch)}. Call diagnose for each batch."
        )
    check_batch(batch, WHERE)
    return batch


@functools.partial(jax.jit, static_argnames="teacher")
def layer_diagnosis(record: Record, state: CompiledState, *, teacher: bool) -> LayerDiagnosis:
    """The diagnosis of one layer, or of each layer of a stack."""

    def one(record: Record, predictor: Any) -> LayerDiagnosis:
        spec, p = record.spec, problem(record)
        settings = dict(closures=state.closures, ending=state.ending, predictor=predictor)
        out, weights = call(record, functions.asap_attention, spec=spec, **settings)
        true_out, true_weights = call(record, functions.sinkhorn_attention, spec=spec)
        rows, columns = _marginal_errors(p, spec, weights)
        described = predictor.query if isinstance(predictor, DualPair) else predictor
        distances, ratios = _distances(p, spec, described.statistics)
        finite = jnp.isfinite(p.q).all() & jnp.isfinite(p.k).all() & jnp.isfinite(out).all()
        result = LayerDiagnosis(
            row_error=rows,
            column_error=columns,
            distances=distances,
            ratios=ratios,
            underflow=_underflow(p, spec),
            teacher_error=jnp.maximum(*_marginal_errors(p, spec, true_weights)),
            num_active=jnp.broadcast_to(p.active("query"), p.q.shape[:-1]).sum(),
            finite=finite,
        )
        if not teacher:
            return result
        zero = None
        if isinstance(predictor, Predictor):
            number = functions.num_closures(state.closures, predictor.side, spec, state.ending)
            zero = fidelity.zero_rel_l2(record, closures=number, ending=state.ending)
        return dataclasses.replace(
            result,
            rel_l2=metrics.attention_rel_l2(weights, true_weights),
            output_rel_l2=metrics.output_rel_l2(out, true_out),
            zero_rel_l2=zero,
        )

    return over_stack(one, record, state.predictor)


def _marginal_errors(
    p: Problem, spec: SinkhornSpec, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    query, key = (None, None) if p.validity is None else p.validity
    target = jnp.exp(p.log_key_target(spec.key_mass))
    return metrics.row_error(weights, query), metrics.column_error(weights, key, target)


def _distances(
    p: Problem, spec: SinkhornSpec, calibrated: Any
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """``distances`` and ``ratios`` of a LayerDiagnosis."""
    found = statistics.sums(p, spec)
    means = found.first / found.count[..., None]  # (H, 4); NaN without a problem
    if not statistics.complete(calibrated):
        nan = jnp.full((), jnp.nan, means.dtype)
        return dict.fromkeys(statistics.NAMES, nan), dict.fromkeys(statistics.NAMES, nan)
    distances, ratios = {}, {}
    for i, name in enumerate(statistics.NAMES):
        away = means[..., i] - calibrated[name]["mean"]
        farthest = away[jnp.argmax(jnp.abs(away))]
        distances[name] = jnp.max(jnp.abs(away) / (calibrated[name]["std"] + FLOOR))
        ratios[name] = jnp.exp(farthest)
    return distances, ratios


def _underflow(p: Problem, spec: SinkhornSpec) -> jax.Array:
    kernel = p.log_kernel(spec.epsilon)
    allowed = kernel != -jnp.inf
    peak = jnp.max(kernel, -1, keepdims=True)
    lost = allowed & (kernel - peak < jnp.log(jnp.finfo(jnp.float32).tiny))
    largest = jnp.max(jnp.where(allowed, jnp.abs(kernel), jnp.zeros_like(kernel)))
    total = allowed.sum(dtype=kernel.dtype)
    return lost.sum(dtype=kernel.dtype) / total + 0 * largest  # NaN where a score is not finite
