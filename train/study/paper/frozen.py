"""Measures what takes the place of a frozen teacher's attention, and stores every figure.

Each fit and each figure of a row is a file of its own in the teacher's run folder, so a table that
was stopped continues with the next figure, and tables share the rows that they have in common.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import asap_jax as aj
from asap_jax.records import Record
from train.evaluation import fidelity, operators
from train.evaluation.operators import Operator
from train.runtime import machine, timing
from train.study import cache
from train.study.paper import fits
from train.study.paper.presets import (
    CASE_BATCHES,
    CASE_EXAMPLES,
    ROUNDS,
    WARMUPS,
)
from train.study.paper.rows import Compiled, Row, Swap, key
from train.study.paper.runs import FOLDER, Run
from train.study.teacher_figures import sample
from train.training.teacher import accuracy, predict

METRICS = ("rel_l2", "output_rel_l2", "output_rmse", "row_error", "column_error")


@dataclasses.dataclass(frozen=True)
class Cases:
    """The figures of one row on all cases of one teacher.

    Attributes:
      layers: path of the layer of each case.
      values: from a metric of ``METRICS`` to the values of the cases.
    """

    layers: list[str]
    values: dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Score:
    """Accuracy, agreement with the teacher, and the number of test examples."""

    accuracy: float
    agreement: float
    examples: int


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds of every timed call: of a layer on a case batch, and of the whole model."""

    layer: list[float]
    model: list[float]


class Frozen:
    """A trained teacher and the rows that were measured on it."""

    def __init__(self, run: Run, test_examples: int | None):
        self.run, self.test_examples = run, test_examples
        self.folder = run.path / FOLDER

    def cases(self, row: Row) -> Cases:
        """``fidelity.case_metrics`` of the row on all cases."""
        settings = {"row": key(row), "batches": [CASE_BATCHES, CASE_EXAMPLES]}
        return self._stored(
            "cases", settings, lambda: self._cases(row), lambda stored: Cases(**stored)
        )

    def score(self, row: Row) -> Score:
        """Accuracy and agreement of the whole model under the row."""
        settings = {"row": key(row), "examples": self.test_examples}
        return self._stored(
            "score", settings, lambda: self._score(row), lambda stored: Score(**stored)
        )

    def fit_time(self, row: Compiled) -> fits.FitTime:
        """Seconds of the row's fit; fits it if there is no stored fit."""
        return self._fitted(row)[1]

    def times(self, rows: Sequence[Row]) -> dict[str, Times]:
        """Times of all rows, by name, measured in turn."""
        settings = {
            "rows": [key(row) for row in rows],
            "batch": CASE_EXAMPLES,
            "rounds": [WARMUPS, ROUNDS],
            "machine": [machine.processor(), machine.cores()],
        }
        decode = lambda stored: [Times(**times) for times in stored]
        times = self._stored("times", settings, lambda: self._times(rows), decode)
        return {row.name: measured for row, measured in zip(rows, times, strict=True)}

    def operator(self, row: Row) -> Operator:
        """The operator of a row."""
        recipe, variables = self.run.recipe, self.run.teacher.variables
        if isinstance(row, Swap):
            budgets = () if row.steps is None else (row.steps,)
            swapped = operators.swaps(recipe, variables, budgets)[-1]
            return dataclasses.replace(swapped, name=row.name)
        path, _ = self._fitted(row)
        compiled = aj.load(path, like=variables)
        if row.zero:
            compiled = fits.with_zero_coefficients(compiled)
        return operators.compiled_row(row.name, recipe, compiled, row.closures)

    def _stored(self, kind: str, settings: dict, measure: Callable, decode: Callable) -> Any:
        settings = cache.settings_of(self.run.about, **settings)
        path = self.folder / f"{kind}-{_digest(settings)}.json"
        return cache.cached(path, settings, measure, decode, again=False)

    def _fitted(self, row: Compiled) -> tuple[Any, fits.FitTime]:
        """The file of a row's compiled layers, and the time of the fit."""
        fit = [repr(row.fit), row.fitted_closures, row.ending, row.num_fit]
        settings = cache.settings_of(self.run.about, fit=fit)
        path = self.folder / f"fit-{_digest(settings)}.npz"
        stored = path.with_suffix(".json")
        time = cache.cached(
            stored,
            settings,
            lambda: fits.fit_and_save(self.run.teacher, self.run.split.train, row, path),
            lambda plain: fits.FitTime(**plain),
            again=not path.exists(),
        )
        return path, time

    @functools.cached_property
    def _teacher(self) -> Operator:
        return operators.teacher(self.run.recipe, self.run.teacher.variables)

    @functools.cached_property
    def _test(self):
        count = len(self.run.split.test) if self.test_examples is None else self.test_examples
        return sample(self.run.split.test, count)

    @functools.cached_property
    def _batches(self) -> list[np.ndarray]:
        """The inputs of the case batches."""
        test = sample(self.run.split.test, CASE_BATCHES * CASE_EXAMPLES)
        inputs = self.run.recipe.inputs.prepare(test)
        return [
            inputs[i : i + CASE_EXAMPLES]
            for i in range(0, len(inputs) - CASE_EXAMPLES + 1, CASE_EXAMPLES)
        ]

    @functools.cached_property
    def _records(self) -> list[dict[tuple[str, ...], Record]]:
        return [fidelity.capture(self._teacher, batch) for batch in self._batches]

    @functools.cached_property
    def _answers(self) -> np.ndarray:
        return self._logits(self._teacher)

    def _cases(self, row: Row) -> Cases:
        operator = self.operator(row)
        layers, values = [], {name: [] for name in METRICS}
        for records in self._records:
            for path, record in records.items():
                measured = fidelity.case_metrics(
                    record,
                    operator.states.get(path),
                    attend=operator.attend,
                    reference=self._teacher.attend,
                    key_mass=self.run.recipe.spec.key_mass,
                )
                layers.append("/".join(path))
                for name in METRICS:
                    values[name].append(float(measured[name]))
        return Cases(layers, values)

    def _score(self, row: Row) -> Score:
        logits = self._logits(self.operator(row))
        agreement = float(aj.metrics.agreement(logits, self._answers))
        return Score(accuracy(logits, self._test.labels), agreement, len(logits))

    def _logits(self, operator: Operator) -> np.ndarray:
        """Logits of the test examples, in batches of a case's size, which is compiled once."""
        inputs = self.run.recipe.inputs.prepare(self._test)
        whole = np.resize(inputs, (_round_up(len(inputs), CASE_EXAMPLES), *inputs.shape[1:]))
        model = fidelity.jitted(operator.model)
        logits = predict(model, operator.variables, whole, batch_size=CASE_EXAMPLES)
        return logits[: len(inputs)]

    def _times(self, rows: Sequence[Row]) -> list[Times]:
        records, batch = self._records[0], self._batches[0]
        calls = {}
        for row in rows:
            operator = self.operator(row)
            for path, record in records.items():
                state = operator.states.get(path)
                calls[row.name, path] = functools.partial(
                    _output, record, state, attend=operator.attend
                )
            model = fidelity.jitted(operator.model)
            calls[row.name, None] = functools.partial(model, operator.variables, batch)
        samples = timing.samples(calls, rounds=ROUNDS, warmups=WARMUPS)
        return [
            Times(
                layer=[ms for path in records for ms in samples[row.name, path]],
                model=samples[row.name, None],
            )
            for row in rows
        ]


@functools.partial(jax.jit, static_argnames="attend")
def _output(record: Record, state: aj.CompiledState | None, *, attend: Callable) -> jax.Array:
    """The output of an operator, without its weights."""
    return attend(state, *operators.inputs_of(record), return_weights=False)


def _round_up(count: int, size: int) -> int:
    return -(-count // size) * size


def _digest(settings: dict) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
