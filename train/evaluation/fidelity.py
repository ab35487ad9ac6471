"""Measures what replacing a trained teacher's attention costs and saves, operator by operator.

A *case* is one test batch at one layer, on the queries, keys, values and mask that the teacher
itself produced there; the attention columns are means over all cases (the paper's replacement
benchmark).  Accuracy, agreement and time are of the whole model.
"""

import collections
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

import asap_jax as aj
from train.data.images import Examples
from train.evaluation import operators
from train.evaluation.operators import Operator
from train.recipes.catalogue import Recipe
from train.reporting import progress
from train.reporting.table import Row, Table
from train.runtime import machine, timing
from train.training import teacher as teachers

BATCH_SIZE = 100
CAPTURE = "asap_capture"


def capture(teacher: Operator, images: np.ndarray) -> dict:
    """What every Sinkhorn layer of the teacher attends to on a batch, by layer path.

    Args:
      teacher: a row whose model uses ``aj.linen.SinkhornAttention``.
      images: inputs of the model, ``(batch, ...)``.

    Returns:
      From a tuple of names to a record with ``query``, ``key``, ``value``, ``bias``, ``mask`` in
      Flax's layout ``(..., length, heads, head_dim)``.
    """
    _, state = teacher.model.apply(teacher.variables, images, mutable=[CAPTURE])
    flat = flatten_dict(state[CAPTURE], is_leaf=lambda _, value: hasattr(value, "query"))
    return {path[:-1]: record for path, record in flat.items()}


@functools.partial(jax.jit, static_argnames=("attend", "reference", "key_mass", "plan_kl"))
def case_metrics(
    record, state, *, attend, reference, key_mass, plan_kl=False
) -> dict[str, jax.Array]:
    """Fidelity and balance of one operator on one case.

    Args:
      record: what the layer attended to.
      state: the layer's compiled state, or None.
      attend: the operator's, see ``Operator``.
      reference: the teacher's.
      key_mass: the teacher's convention for column sums.
      plan_kl: also measure the divergence of the teacher's plan from the operator's.

    Returns:
      Scalars ``rel_l2``, ``output_rmse``, ``row_error`` and ``column_error``, and ``plan_kl``.
    """
    inputs = operators.inputs_of(record)
    output, weights = attend(state, *inputs)
    true_output, true_weights = reference(None, *inputs)
    query_valid, key_valid, target = marginals(record, key_mass)
    values = {
        "rel_l2": aj.metrics.attention_rel_l2(weights, true_weights),
        "output_rmse": aj.metrics.output_rmse(output, true_output),
        "row_error": aj.metrics.row_error(weights, query_valid),
        "column_error": aj.metrics.column_error(weights, key_valid, target),
    }
    if plan_kl:
        values["plan_kl"] = aj.metrics.plan_kl(weights, true_weights)
    return values


def marginals(record, key_mass: str):
    """Active queries, active keys and the column sum that the convention asks for.

    Returns:
      ``(query_valid, key_valid, target)``: the first two ``(..., N)`` and ``(..., M)`` bools, or
      None without a mask; the target is a number or ``(..., 1)``.
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
    images: np.ndarray,
    report,
    *,
    plan_kl: bool = False,
) -> dict[str, dict[str, list[float]]]:
    """``case_metrics`` of all cases, by row name and metric, in the order of the batches."""
    found = {row.name: collections.defaultdict(list) for row in rows}
    done = 0
    for start in range(0, len(images), BATCH_SIZE):
        records = capture(teacher, images[start : start + BATCH_SIZE])
        for row in rows:
            for path, record in records.items():
                values = case_metrics(
                    record,
                    row.states.get(path),
                    attend=row.attend,
                    reference=teacher.attend,
                    key_mass=recipe.spec.key_mass,
                    plan_kl=plan_kl,
                )
                for name, value in values.items():
                    found[row.name][name].append(float(value))
            done += 1
            report(done, f"attention under {row.name}")
    return found


def attention_columns(
    rows: Sequence[Operator], teacher: Operator, recipe: Recipe, images: np.ndarray, report
) -> tuple[dict[str, dict[str, float]], int]:
    """Means of ``case_metrics`` over all cases, by row name, and the number of cases."""
    found = case_values(rows, teacher, recipe, images, report)
    means = {
        row: {name: float(np.mean(values)) for name, values in metrics.items()}
        for row, metrics in found.items()
    }
    return means, len(found[rows[0].name]["rel_l2"])


def logit_kl(logits: np.ndarray, reference: np.ndarray) -> float:
    """Mean ``KL(softmax(reference) || softmax(logits))`` in nats; both ``(examples, classes)``."""
    ours, theirs = (_log_softmax(np.asarray(x, np.float64)) for x in (logits, reference))
    return float(np.mean(np.sum(np.exp(theirs) * (theirs - ours), axis=-1)))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@functools.partial(jax.jit, static_argnames="spec")
def score_spread(record, *, spec: aj.SinkhornSpec) -> jax.Array:
    """Standard deviation of the scores that the mask lets through, mean over heads.

    Args:
      record: what a layer attended to, see ``capture``.
      spec: the teacher's, for the scale of the scores.
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
) -> Table:
    """The fidelity and speed table of one teacher.

    Args:
      recipe: the teacher's; its attention must be Sinkhorn.
      variables: the teacher's.
      test: examples with labels.
      compiled: variables that ``aj.linen.compile`` made; None leaves the ASAP rows out.
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
    images = recipe.inputs.prepare(test)
    batch = images[:BATCH_SIZE]
    num_batches = -(-len(images) // BATCH_SIZE)
    applies = {row.name: jax.jit(row.model.apply) for row in rows}
    logits = {}
    with progress.bar("measure", num_batches * len(rows) + len(rows) + rounds + 1) as report:
        means, cases = attention_columns(rows, teacher, recipe, images, report)
        done = num_batches * len(rows)
        for row in rows:
            logits[row.name] = teachers.predict(
                applies[row.name], row.variables, images, batch_size=BATCH_SIZE
            )
            done += 1
            report(done, f"accuracy of {row.name}")
        calls = {
            row.name: functools.partial(applies[row.name], row.variables, batch) for row in rows
        }
        times = timing.interleaved(
            calls, rounds=rounds, after_round=lambda index: report(done + index, "times")
        )
    reference = logits[teacher.name]
    return Table(
        title=f"{recipe.name}: Sinkhorn teacher S={recipe.spec.num_steps} and its replacements",
        rows=tuple(
            Row(
                name=row.name,
                accuracy=teachers.accuracy(logits[row.name], test.labels),
                agreement=float(aj.metrics.agreement(logits[row.name], reference)),
                milliseconds=times[row.name],
                ratio=times[row.name] / times[teacher.name],
                **means[row.name],
            )
            for row in rows
        ),
        facts={
            "data": f"{recipe.dataset}, {len(test)} test {test.unit}, none of them used to fit",
            "attention columns": f"means over {cases} cases (a test batch of up to "
            f"{BATCH_SIZE} at a layer)",
            "time": f"whole model, {len(batch)} {test.unit}, median of {rounds} interleaved calls",
            **machine.facts(),
        },
    )
