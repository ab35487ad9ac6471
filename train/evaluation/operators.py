"""Operators: the ways to compute a trained model's attention that a fidelity table compares."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict

import asap_jax as aj
from asap_jax.fitting import fidelity
from asap_jax.fitting.fidelity import compiled_calls, sinkhorn_calls
from asap_jax.records import Record
from train.recipes.schema import Recipe
from train.training import factory

BUDGETS = (2, 3, 4, 5)
TEACHER = "teacher"


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One row of the table; compared and hashed by identity.

    Attributes:
      name: the row's label.
      model: the linen module with this operator.
      variables: variables of the module; the parameters are the teacher's in every row.
      attend: ``attend(state, query, key, value, bias, mask)`` gives ``(output, weights)`` of a
        layer, on inputs in Flax's layout; with ``return_weights=False`` only the output. ``state``
        is the layer's compiled state, or None.
      calls: softmax attention calls that a layer needs if it stores no N x M array, see
        ``asap_jax.fitting.fidelity.sinkhorn_calls``.
      states: compiled states by layer path; empty for operators without compiled layers.
    """

    name: str
    model: nn.Module
    variables: dict
    attend: Callable[..., Any]
    calls: int
    states: Mapping[tuple[str, ...], aj.CompiledState] = dataclasses.field(default_factory=dict)

    def at(self, path: tuple[str, ...], record: Record) -> tuple[jax.Array, jax.Array]:
        """``(output, weights)`` of the layer at ``path`` on the inputs that it recorded."""
        return self.attend(self.states.get(path), *inputs_of(record))


def inputs_of(record: Record) -> tuple:
    """Query, key, value, bias and mask of a capture record."""
    return record.query, record.key, record.value, record.bias, record.mask


def with_closures(variables: dict, closures: str | int) -> dict:
    """Compiled variables with other closures.

    One fit serves both operators of the paper, because they start from the same dual.

    Args:
      variables: linen variables with the ``"asap"`` collection.
      closures: ``"one_sided"`` (ASAP-0), ``"two_sided"`` (ASAP), ``"none"``, or the number of
        closures that the fit was made for.
    """
    states = _states(variables)
    changed = {path: state.replace(closures=closures) for path, state in states.items()}
    return {
        **variables,
        "asap": unflatten_dict({(*path, "state"): s for path, s in changed.items()}),
    }


def swaps(recipe: Recipe, variables: dict, budgets: tuple[int, ...] = BUDGETS) -> list[Operator]:
    """Rows with softmax and with smaller Sinkhorn budgets instead of the teacher's attention.

    Args:
      recipe: recipe of the teacher.
      variables: variables of the teacher.
      budgets: numbers of Sinkhorn steps.
    """
    rows = [_softmax("softmax swap", recipe, variables)]
    for steps in budgets:
        spec = dataclasses.replace(recipe.spec, num_steps=steps)
        rows.append(_sinkhorn(f"Sinkhorn S={steps}", recipe, variables, spec))
    return rows


def compiled(recipe: Recipe, variables: dict) -> list[Operator]:
    """One row, or one for each of the two operators that a fit of the source dual gives.

    They are called ASAP-0 and ASAP if the fit is the paper's.
    """
    states = list(_states(variables).values())
    if any(state.closures not in aj.attention.CLOSURES for state in states):
        return [compiled_row("compiled", recipe, variables)]
    named = fidelity.operators("two_sided", states[0].ending, states[0].predictor)
    return [compiled_row(name, recipe, variables, closures) for name, closures in named.items()]


def compiled_row(
    name: str, recipe: Recipe, variables: dict, closures: str | int | None = None
) -> Operator:
    """A row of compiled variables; ``closures`` is the ending, None for each layer's own."""
    ended = variables if closures is None else with_closures(variables, closures)
    states, spec = _states(ended), recipe.spec
    calls = max(
        compiled_calls(state.predictor, spec, state.closures, state.ending)
        for state in states.values()
    )
    return Operator(name, factory.build(recipe), ended, attend_compiled(spec), calls, states)


def teacher(recipe: Recipe, variables: dict) -> Operator:
    """The row of the teacher itself, which is the reference."""
    return _sinkhorn(TEACHER, recipe, variables, recipe.spec)


def _states(variables: dict) -> dict:
    """The compiled states by layer path, a tuple of names."""
    flat = flatten_dict(
        variables["asap"], is_leaf=lambda _, value: isinstance(value, aj.CompiledState)
    )
    return {path[:-1]: state for path, state in flat.items()}


# Teachers with equal specs get the same ``attend`` function, so that models of several seeds share
# their compiled programs.


def _softmax(name, recipe, variables) -> Operator:
    params = {"params": variables["params"]}
    model = factory.build(recipe, factory.attention("softmax", recipe.spec))
    return Operator(name, model, params, _attend_softmax, calls=1)


def _attend_softmax(state, *inputs, return_weights=True):
    return aj.softmax_attention(*inputs, return_weights=return_weights)


def _sinkhorn(name, recipe, variables, spec) -> Operator:
    params = {"params": variables["params"]}
    model = factory.build(recipe, factory.attention("sinkhorn", spec))
    return Operator(name, model, params, _attend_sinkhorn(spec), sinkhorn_calls(spec.num_steps))


@functools.cache
def _attend_sinkhorn(spec):
    def attend(state, *inputs, return_weights=True):
        return aj.sinkhorn_attention(*inputs, spec=spec, return_weights=return_weights)

    return attend


@functools.cache
def attend_compiled(spec: aj.SinkhornSpec) -> Callable[..., Any]:
    """The ``attend`` of compiled layers, see ``Operator``."""

    def attend(state, *inputs, return_weights=True):
        return aj.asap_attention(
            *inputs,
            predictor=state.predictor,
            spec=spec,
            closures=state.closures,
            ending=state.ending,
            return_weights=return_weights,
        )

    return attend
