"""The log scaling from which closures start, predicted for the problems of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax.predictor import corrections
from asap_jax.predictor.predictor import Predictor, centred_dual, check, first_step
from asap_jax.predictor.statistics import growth, inside, limits_only
from asap_jax.problem import Problem
from asap_jax.solvers.closures import OTHER
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class DeferredStart:
    """A deferred prediction: called on a group of problems, it returns their log scaling.

    A predictor may hold callables; leaves that are not arrays are stored as static metadata.

    Attributes:
      arrays: the predictor's arrays.
      rest: the tree structure of the predictor and its other leaves, hashable.
      spec: the teacher's convention.
      side: the side of the scaling.
    """

    arrays: tuple
    rest: tuple = flax.struct.field(pytree_node=False)
    spec: SinkhornSpec
    side: str = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, predictor: Predictor, spec: SinkhornSpec, num_closures: int) -> DeferredStart:
        """The start of ``num_closures`` closures; keeps only the limits of the statistics.

        The row mass is dropped too.
        """
        check(predictor, num_closures)
        if predictor.statistics is not None or predictor.row_mass is not None:
            limits = limits_only(predictor.statistics)
            predictor = dataclasses.replace(predictor, statistics=limits, row_mass=None)
        leaves, tree = jax.tree.flatten(predictor)
        arrays = tuple(x for x in leaves if _is_array(x))
        others = tuple(
            None if _is_array(x) else x if isinstance(x, Hashable) else _ByIdentity(x)
            for x in leaves
        )
        odd = len(predictor.corrections) % 2  # each correction comes after a closure
        side = OTHER[predictor.side] if odd else predictor.side
        return cls(arrays, (tree, others), spec, side)

    @property
    def predictor(self) -> Predictor:
        """The predictor, rebuilt."""
        tree, others = self.rest
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x for x in others]
        leaves = [x.value if isinstance(x, _ByIdentity) else x for x in leaves]
        return jax.tree.unflatten(tree, leaves)

    def __call__(self, p: Problem) -> jax.Array:
        """The log scaling of ``side``, ``(..., N)`` or ``(..., M)``."""
        with jax.named_scope("prediction"):
            return starting_scaling(self.predictor, p, self.spec)[0]


class _ByIdentity:
    """Wraps an object that has no hash; equal only to a wrapper of the same object."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _ByIdentity) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def starting_scaling(predictor: Predictor, p: Problem, spec: SinkhornSpec) -> tuple[jax.Array, str]:
    """The predicted log scaling, after the corrected closures if there are any, and its side.

    ``predictor.padding`` overrides ``spec.padding``.
    """
    scaling = predicted_dual(predictor, p, spec) / spec.epsilon
    if not predictor.corrections:
        return scaling, predictor.side
    spec = spec.with_padding(predictor.padding)
    return corrections.advance(
        predictor.corrections, p, spec, scaling, predictor.side, inside(predictor.statistics, p)
    )


def predicted_dual(
    predictor: Predictor, p: Problem, spec: SinkhornSpec, *, absolute: bool = False
) -> jax.Array:
    """The predictor's dual in score coordinates; 0 at tokens inactive in the closures.

    It is right up to a constant for each problem, which cancels in every closure. ``absolute``:
    with that constant, for weights without a closure.
    """
    ratio = None
    if predictor.statistics is not None:
        p, ratio = inside(predictor.statistics, p)
    tokens = p.tokens(predictor.side, predictor.padding or spec.padding)
    first = None
    if predictor.baseline == "first_step":
        first = first_step(p.scores, tokens, predictor.side, epsilon=spec.epsilon, mask=p.mask)
    shift = tokens.absolute_shift() if absolute else tokens.shift()
    dual = centred_dual(predictor, tokens, first) - shift
    dual = dual if ratio is None else growth(ratio) * dual
    return jnp.where(p.active(predictor.side), dual, jnp.zeros_like(dual))
