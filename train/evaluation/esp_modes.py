"""One ESP checkpoint under its three operators (paper, ESPFormer soft-to-hard switch).

The model was trained with soft sorting. It is evaluated with the soft operator, with the released
hard flag (each row of SoftSort rounded to its top entry), and with exact sorting.
"""

import collections
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import asap_jax as aj
from asap_jax import masks
from asap_jax.attention.flax_call import Call, Result, attention_method
from train.data.examples import Examples
from train.evaluation.fidelity import BATCH_SIZE, batches_of, jitted
from train.recipes.schema import ESP_FAMILIES
from train.reporting.table import Report, Table
from train.runtime import machine, timing
from train.runtime.errors import UserError
from train.training import factory
from train.training.teacher import Teacher, accuracy, predict

MODES = {
    "soft": "ESP (soft)",
    "hard_released": "ESP (released hard)",
    "hard": "ESP (exact hard)",
}
BALANCE = "balance"
MEASURES = ("row_error", "column_error", "entropy")


@dataclasses.dataclass(frozen=True)
class ModeFigures:
    """One operator on the test examples.

    Attributes:
      mode: a key of ``MODES``.
      accuracy: share of examples classified correctly.
      changed: share of examples whose prediction differs from that of the soft operator.
      row_error, column_error: mean ``|sum - 1|`` over active tokens, layers and batches.
      entropy: mean entropy of the rows in nats, over the same.
      examples_per_second: of the whole model; NaN if it was not timed.
    """

    mode: str
    accuracy: float
    changed: float
    row_error: float
    column_error: float
    entropy: float
    examples_per_second: float


class MeasuredEsp(nn.Module):
    """ESP attention that also sows the balance and the entropy of its weights.

    Attributes:
      attention: the module to run.
    """

    attention: aj.linen.EspAttention

    @nn.compact
    @attention_method
    def __call__(self, call: Call) -> Result:
        """Arguments and result as ``esp_attention``."""
        p = call.problem(self.attention.scale)
        queries, keys = masks.feature_validity(p.validity, self.attention.padding) or (None, None)
        arguments = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
        out, weights = self.attention(**{**arguments, "return_weights": True})
        self.sow(BALANCE, "row_error", aj.metrics.row_error(weights, queries))
        self.sow(BALANCE, "column_error", aj.metrics.column_error(weights, keys))
        self.sow(BALANCE, "entropy", aj.metrics.entropy(weights, queries))
        return out


def models(teacher: Teacher, num_steps: int) -> dict[str, tuple[nn.Module, nn.Module]]:
    """From a mode to the model that runs it, and to the same model with ``MeasuredEsp``.

    Args:
      teacher: a model with ESP attention.
      num_steps: steps of its whole run; the soft operators have the temperature of its step.
    """
    recipe = teacher.recipe
    temperature = factory.esp_temperature(recipe, num_steps)(teacher.step)
    result = {}
    for mode in MODES:
        attend = functools.partial(factory.esp, recipe, mode=mode, temperature=float(temperature))
        plain = lambda layer, attend=attend: attend()
        measured = lambda layer, attend=attend: MeasuredEsp(attend())
        result[mode] = factory.build(recipe, plain), factory.build(recipe, measured)
    return result


def measure(
    teacher: Teacher, test: Examples, num_steps: int, *, rounds: int = 10
) -> list[ModeFigures]:
    """The figures of all three operators on the same parameters, in the order of ``MODES``.

    Args:
      teacher: a model with ESP attention.
      test: examples with labels.
      num_steps: steps of its whole run.
      rounds: timed forward passes of each; 0 to skip the timing.

    Raises:
      UserError: the model has another attention.
    """
    if teacher.recipe.attention not in ESP_FAMILIES:
        raise UserError(
            f"the checkpoint was trained with {teacher.recipe.attention} attention: choose a run "
            f"of --attention {' or '.join(ESP_FAMILIES)}"
        )
    built = models(teacher, num_steps)
    inputs = teacher.recipe.inputs.prepare(test)
    logits = {
        mode: predict(jitted(model), teacher.variables, inputs, batch_size=BATCH_SIZE)
        for mode, (model, _) in built.items()
    }
    batch = inputs[:BATCH_SIZE]
    calls = {
        mode: functools.partial(jitted(model), teacher.variables, batch)
        for mode, (model, _) in built.items()
    }
    times = timing.interleaved(calls, rounds=rounds) if rounds else dict.fromkeys(calls, np.nan)
    return [
        ModeFigures(
            mode=mode,
            accuracy=accuracy(logits[mode], test.labels),
            changed=1 - float(aj.metrics.agreement(logits[mode], logits["soft"])),
            examples_per_second=1e3 * len(batch) / times[mode],
            **_balance(measured, teacher.variables, inputs),
        )
        for mode, (_, measured) in built.items()
    ]


def _balance(model: nn.Module, variables: dict, inputs: np.ndarray) -> dict[str, float]:
    """Means over layers and batches of what ``MeasuredEsp`` sows."""

    @jax.jit
    def sown(batch: Any) -> dict[str, list[jax.Array]]:
        _, state = model.apply(variables, batch, mutable=[BALANCE])
        found = collections.defaultdict(list)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state[BALANCE]):
            names = {getattr(part, "key", None) for part in path}
            (name,) = names & set(MEASURES)
            found[name].append(leaf)
        return {name: jnp.mean(jnp.stack(leaves)) for name, leaves in found.items()}

    parts = [sown(batch) for batch in batches_of(inputs)]
    return {name: float(np.mean([part[name] for part in parts])) for name in MEASURES}


def report(teacher: Teacher, test: Examples, rows: list[ModeFigures]) -> Report:
    """The table of the three operators."""
    headings = (
        "attention",
        "test accuracy",
        "prediction change",
        "row error",
        "column error",
        "entropy (nats)",
        f"{test.unit}/s",
    )
    cells = [
        [
            MODES[row.mode],
            f"{row.accuracy:.3f}",
            f"{row.changed:.3f}",
            f"{row.row_error:.2e}",
            f"{row.column_error:.2e}",
            f"{row.entropy:.3f}",
            f"{row.examples_per_second:.0f}",
        ]
        for row in rows
    ]
    recipe = teacher.recipe
    slices = recipe.esp.slices or f"the {recipe.model.head_dim} axes of a head as"
    facts = {
        "checkpoint": f"{recipe.name}, {recipe.attention}, seed {teacher.seed}, step "
        f"{teacher.step}: {slices} slices, inverse temperature {recipe.esp.inverse_temperature:g}",
        "data": f"{recipe.dataset}, {len(test)} test {test.unit}",
        "errors and entropy": "means over active tokens, layers and batches of up to "
        f"{BATCH_SIZE} {test.unit}",
        "prediction change": "against the soft operator, which the model trained with",
        **machine.facts(),
    }
    title = f"{recipe.name}: one ESP checkpoint, evaluated softly and with hard sorting"
    return Report(title, [Table(headings, cells)], facts, {"rows": rows})
