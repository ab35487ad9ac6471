"""Measures fidelity and time of operators that replace a trained teacher's attention.

A *case* is one test batch at one layer, with the queries, keys, values and mask that the teacher
itself produced there.  The attention columns are means over all cases (the paper's replacement
benchmark).  Accuracy, agreement and time are those of the whole model.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

import asap_jax as aj
from asap_jax.records import Record
from train.data.examples import Examples
from train.evaluation import operators
from train.evaluation.fidelity_table import FidelityTable, Row
from train.evaluation.operators import Operator
from train.recipes.schema import Recipe
from train.reporting import progress
from train.runtime import machine, timing
from train.training.teacher import accuracy, predict

BATCH_SIZE = 100
CAPTURE = "asap_capture"


def capture(teacher: Operator, inputs: np.ndarray) -> dict[tuple[str, ...], Record]:
    """The inputs of every Sinkhorn layer of the teacher on a batch, by layer path.

    Args:
      teacher: a row whose model uses ``aj.linen.SinkhornAttention``.
      inputs: inputs of the model, ``(batch, ...)``.

    Returns:
      From the path of a layer, a tuple of names, to a record with ``query``, ``key``, ``value``,
      ``bias``, ``mask`` in Flax's layout ``(..., length, heads, head_dim)``.
    """
    _, state = teacher.model.apply(teacher.variables, inputs, mutable=[CAPTURE])
    flat = flatten_dict(state[CAPTURE], is_leaf=lambda _, value: hasattr(value, "query"))
    return {path[:-1]: record for path, record in flat.items()}


@functools.partial(jax.jit, static_argnames=("attend", "reference", "key_mass", "plan_kl"))
def case_metrics(
    record: Record,
    state: aj.CompiledState | None,
    *,
    attend: Callable,
    reference: Callable,
    key_mass: str,
    plan_kl: bool = False,
) -> dict[str, jax.Array]:
    """Fidelity and balance of one operator on one case.

    Args:
      record: the inputs of the layer, see ``capture``.
      state: the layer's compiled state, or None.
      attend: the operator's ``attend``, see ``Operator``.
      reference: the teacher's ``attend``.
      key_mass: the teacher's convention for column sums.
      plan_kl: also measure the divergence of the teacher's plan from the operator's.

    Returns:
      Scalars ``rel_l2``, ``output_rel_l2``, ``output_rmse``, ``row_error`` and ``column_error``,
      and ``plan_kl`` if it is wanted.
    """
    inputs = operators.inputs_of(record)
    output, weights = attend(state, *inputs)
    true_output, true_weights = reference(None, *inputs)
    query_valid, key_valid, target = marginals(record, key_mass)
    values = {
        "rel_l2": aj.metrics.attention_rel_l2(weights, true_weights),
        "output_rel_l2": aj.metrics.output_rel_l2(output, true_output),
        "output_rmse": aj.metrics.output_rmse(output, true_output),
        "row_error": aj.metrics.row_error(weights, query_valid),
        "column_error": aj.metrics.column_error(weights, key_valid, target),
    }
    if plan_kl:
        values["plan_kl"] = aj.metrics.plan_kl(weights, true_weights)
    return values


def marginals(record: Record, key_mass: str) -> tuple[jax.Array | None, jax.Array | None, Any]:
    """Active queries, active keys, and the target of the column sums.

    Returns:
      ``(query_valid, key_valid, target)``. The first two are bools ``(..., N)`` and ``(..., M)``,
      or None without a mask. The target is a number or ``(..., 1)``.
    """
    shape = (record.query.shape[-3], record.key.shape[-3])
    if record.mask is None:
        return None, None, shape[0] / shape[1] if key_mass == "balanced" else 1.0
    mask = jnp.broadcast_to(record.mask, (*record.mask.shape[:-2], *shape)) > 0
    query_valid, key_valid = mask.any(-1), mask.any(-2)
    counts = [jnp.maximum(valid.sum(-1, keepdims=True), 1) for valid in (query_valid, key_valid)]
    return query_valid, key_valid, counts[0] / counts[1] if key_mass == "balanced" else 1.0


def case_values(
    rows: Sequence[Operator],
    teacher: Operator,
    recipe: Recipe,
    inputs: np.ndarray,
    report: Callable[[int, str], None] = lambda done, note: None,
    *,
    plan_kl: bool = False,
) -> dict[str, dict[str, list[float]]]:
    """``case_metrics`` of all cases, by row name and metric, in the order of the batches.

    Args:
      rows: the operators to measure.
      teacher: the reference.
      recipe: recipe of the teacher.
      inputs: inputs of the model, ``(examples, ...)``.
      report: called after every row of every batch with the number of those done so far.
      plan_kl: see ``case_metrics``.
    """
    values = {row.name: collections.defaultdict(list) for row in rows}
    done = 0
    for batch in batches_of(inputs):
        records = capture(teacher, batch)
        for row in rows:
            for path, record in records.items():
                measured = case_metrics(
                    record,
                    row.states.get(path),
                    attend=row.attend,
                    reference=teacher.attend,
                    key_mass=recipe.spec.key_mass,
                    plan_kl=plan_kl,
                )
                for name, value in measured.items():
                    values[row.name][name].append(float(value))
            done += 1
            report(done, f"attention under {row.name}")
    return values


def batches_of(inputs: np.ndarray) -> list[np.ndarray]:
    """The inputs cut into test batches; the last may be smaller."""
    return [inputs[start : start + BATCH_SIZE] for start in range(0, len(inputs), BATCH_SIZE)]


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of one operator.

    Attributes:
      cases: ``case_metrics`` of all cases, by metric.
      accuracy: share of examples classified correctly.
      agreement: share of examples on which the prediction is the teacher's.
      logit_kl: mean KL divergence of the teacher's class probabilities from the operator's.
    """

    cases: dict[str, list[float]]
    accuracy: float
    agreement: float
    logit_kl: float

    def mean(self, name: str) -> float:
        """Mean of a metric over all cases."""
        return float(np.mean(self.cases[name]))


def figures(
    rows: Sequence[Operator],
    teacher: Operator,
    recipe: Recipe,
    test: Examples,
    report: Callable[[int, str], None] = lambda done, note: None,
    *,
    plan_kl: bool = False,
) -> dict[str, Figures]:
    """Figures of every operator on the same examples, by row name.

    Args:
      rows: the operators to measure.
      teacher: the reference.
      recipe: recipe of the teacher.
      test: examples with labels.
      report: called with the number of steps done, out of ``num_steps``.
      plan_kl: see ``case_metrics``.
    """
    inputs = recipe.inputs.prepare(test)
    cases = case_values(rows, teacher, recipe, inputs, report, plan_kl=plan_kl)
    expected = answers(teacher, inputs)
    result = {}
    for done, row in enumerate(rows, num_steps(len(test), len(rows)) - len(rows) + 1):
        logits = expected if row is teacher else answers(row, inputs)
        result[row.name] = Figures(
            cases=cases[row.name],
            accuracy=accuracy(logits, test.labels),
            agreement=float(aj.metrics.agreement(logits, expected)),
            logit_kl=logit_kl(logits, expected),
        )
        report(done, f"predictions under {row.name}")
    return result


def num_steps(num_examples: int, num_rows: int) -> int:
    """Number of steps that ``figures`` reports: every row on every batch, then its predictions."""
    return (-(-num_examples // BATCH_SIZE) + 1) * num_rows


@functools.cache  # so that equal models, such as those of several seeds, share compiled programs
def jitted(model: nn.Module) -> Callable:
    """``model.apply``, jitted."""
    return jax.jit(model.apply)


def answers(row: Operator, inputs: np.ndarray) -> np.ndarray:
    """Logits ``(examples, classes)`` of the whole model under one operator."""
    return predict(jitted(row.model), row.variables, inputs, batch_size=BATCH_SIZE)


def logit_kl(logits: np.ndarray, reference: np.ndarray) -> float:
    """Mean ``KL(softmax(reference) || softmax(logits))`` in nats; both ``(examples, classes)``."""
    ours, theirs = (_log_softmax(np.asarray(x, np.float64)) for x in (logits, reference))
    return float(np.mean(np.sum(np.exp(theirs) * (theirs - ours), axis=-1)))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@functools.partial(jax.jit, static_argnames="spec")
def score_spread(record: Record, *, spec: aj.SinkhornSpec) -> jax.Array:
    """Standard deviation of the scores that are not masked, mean over heads.

    Args:
      record: the inputs of a layer, see ``capture``.
      spec: spec of the teacher, for the scale of the scores.
    """
    q, k = (jnp.swapaxes(x, -2, -3) for x in (record.query, record.key))
    scores = aj.scores(q, k, scale=spec.scale, bias=record.bias)
    mask = True if record.mask is None else record.mask > 0
    active = jnp.broadcast_to(mask, scores.shape) & jnp.isfinite(scores)
    by_head = tuple(axis for axis in range(scores.ndim) if axis != scores.ndim - 3)
    return jnp.mean(jnp.std(scores, axis=by_head, where=active))


def measure(
    recipe: Recipe,
    variables: dict,
    test: Examples,
    *,
    compiled: dict | None = None,
    more: Sequence[Operator] = (),
    budgets: tuple[int, ...] = operators.BUDGETS,
    rounds: int = 30,
) -> FidelityTable:
    """The fidelity and speed table of one teacher.

    Args:
      recipe: recipe of the teacher; its attention must be Sinkhorn.
      variables: variables of the teacher.
      test: examples with labels.
      compiled: variables from ``aj.linen.compile``, or None for no rows of compiled layers.
      more: further rows.
      budgets: Sinkhorn budgets to swap in.
      rounds: timed forward passes of each row.

    Returns:
      A table with one row per operator, the teacher last.
    """
    teacher = operators.teacher(recipe, variables)
    rows = operators.swaps(recipe, variables, budgets)
    rows += operators.compiled(recipe, compiled) if compiled is not None else []
    rows += [*more, teacher]
    batch = recipe.inputs.prepare(test.take(slice(BATCH_SIZE)))
    with progress.bar("measure", num_steps(len(test), len(rows))) as report:
        measured = figures(rows, teacher, recipe, test, report)
    calls = {row.name: functools.partial(jitted(row.model), row.variables, batch) for row in rows}
    with progress.bar("time", rounds + 1) as report:  # a round is much quicker than a step above
        times = timing.interleaved(
            calls, rounds=rounds, after_round=lambda index: report(index, "times")
        )
    cases = len(measured[teacher.name].cases["rel_l2"])
    num_calls = {row.name: row.calls for row in rows}
    return FidelityTable(
        title=f"{recipe.name}: Sinkhorn teacher S={recipe.spec.num_steps} and its replacements",
        rows=tuple(
            Row(
                name=name,
                calls=num_calls[name],
                accuracy=values.accuracy,
                agreement=values.agreement,
                milliseconds=times[name],
                ratio=times[name] / times[teacher.name],
                **{metric: values.mean(metric) for metric in values.cases},
            )
            for name, values in measured.items()
        ),
        facts={
            "data": f"{recipe.dataset}, {len(test)} test {test.unit}, none of them used to fit",
            "attention columns": f"means over {cases} cases (a test batch of up to "
            f"{BATCH_SIZE} at a layer)",
            "time": f"whole model, {len(batch)} {test.unit}, median of {rounds} interleaved calls",
            **machine.facts(),
        },
    )
