"""Measures what replacing a trained teacher's attention costs and saves, operator by operator.

A *case* is one test batch at one layer, on the queries, keys, values and mask that the teacher
itself produced there; the attention columns are means over all cases (the paper's replacement
benchmark).  Accuracy, agreement and time are of the whole model.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

import asap_jax as aj
from train import machine, operators, progress, timing
from train import teacher as teachers
from train.data import Examples
from train.operators import Operator
from train.recipes import Recipe
from train.table import Row, Table

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


@functools.partial(jax.jit, static_argnames=("attend", "reference", "key_mass"))
def case_metrics(record, state, *, attend, reference, key_mass) -> dict[str, jax.Array]:
    """Fidelity and balance of one operator on one case.

    Args:
      record: what the layer attended to.
      state: the layer's compiled state, or None.
      attend: the operator's, see ``Operator``.
      reference: the teacher's.
      key_mass: the teacher's convention for column sums.

    Returns:
      Scalars ``rel_l2``, ``output_rmse``, ``row_error`` and ``column_error``.
    """
    inputs = operators.inputs_of(record)
    output, weights = attend(state, *inputs)
    true_output, true_weights = reference(None, *inputs)
    query_valid, key_valid, target = marginals(record, key_mass)
    return {
        "rel_l2": aj.metrics.attention_rel_l2(weights, true_weights),
        "output_rmse": aj.metrics.output_rmse(output, true_output),
        "row_error": aj.metrics.row_error(weights, query_valid),
        "column_error": aj.metrics.column_error(weights, key_valid, target),
    }


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


def attention_columns(
    rows: Sequence[Operator], teacher: Operator, recipe: Recipe, images: np.ndarray, report
) -> tuple[dict[str, dict[str, float]], int]:
    """Means of ``case_metrics`` over all cases, by row name, and the number of cases."""
    sums: dict[str, dict[str, float]] = {row.name: {} for row in rows}
    cases = done = 0
    for start in range(0, len(images), BATCH_SIZE):
        records = capture(teacher, images[start : start + BATCH_SIZE])
        cases += len(records)
        for row in rows:
            for path, record in records.items():
                values = case_metrics(
                    record,
                    row.states.get(path),
                    attend=row.attend,
                    reference=teacher.attend,
                    key_mass=recipe.spec.key_mass,
                )
                for name, value in values.items():
                    sums[row.name][name] = sums[row.name].get(name, 0.0) + float(value)
            done += 1
            report(done, f"attention under {row.name}")
    means = {
        row: {name: total / cases for name, total in values.items()} for row, values in sums.items()
    }
    return means, cases


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
