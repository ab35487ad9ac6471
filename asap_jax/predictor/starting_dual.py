"""From a predictor and a call's problems to the log scaling that the closures start from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import masks, problem
from asap_jax.predictor import corrections
from asap_jax.predictor.predictor import Predictor, predict
from asap_jax.scores import query_shift
from asap_jax.solvers import log_domain
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class Prediction:
    """``predicted_scaling`` of problems yet to come: what a plan starts from, a few at a time.

    Families and heads may be any callables, so that a predictor is no pytree of arrays in general:
    what is no array is static here.

    Attributes:
      arrays: the predictor's arrays.
      rest: hashable: how to put the predictor together, and what else it holds.
      spec: the teacher's convention.
    """

    arrays: tuple
    rest: tuple = flax.struct.field(pytree_node=False)
    spec: SinkhornSpec

    @classmethod
    def of(cls, predictor: Predictor, spec: SinkhornSpec) -> Prediction:
        """The prediction by ``predictor``, whose statistics are left behind."""
        leaves, tree = jax.tree.flatten(predictor.replace(statistics=None))
        arrays = tuple(x for x in leaves if _is_array(x))
        others = tuple(None if _is_array(x) else _hashable(x) for x in leaves)
        return cls(arrays, (tree, others), spec)

    @property
    def predictor(self) -> Predictor:
        """The predictor put together again."""
        tree, others = self.rest
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x for x in others]
        leaves = [x.it if isinstance(x, _Same) else x for x in leaves]
        return jax.tree.unflatten(tree, leaves)

    @property
    def side(self) -> str:
        """The side of the scaling: each correction comes after a closure."""
        p = self.predictor
        return log_domain.OTHER[p.side] if len(p.corrections) % 2 else p.side

    def __call__(self, p: problem.Problem) -> jax.Array:
        """The log scaling of ``side``, ``(..., N)`` or ``(..., M)``."""
        with jax.named_scope("prediction"):
            return predicted_scaling(self.predictor, p, self.spec)[0]


class _Same:
    """Stands for an object that has no hash: equal to itself alone."""

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other):
        return isinstance(other, _Same) and self.it is other.it

    def __hash__(self):
        return id(self.it)


def _is_array(x) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def _hashable(x):
    return x if isinstance(x, Hashable) else _Same(x)


def predicted_scaling(
    predictor: Predictor, p: problem.Problem, spec: SinkhornSpec
) -> tuple[jax.Array, str]:
    """The log scaling that the uncorrected closures start from, and its side."""
    spec = spec.with_padding(predictor.padding)
    scaling = predicted_dual(predictor, p, spec) / spec.epsilon
    return corrections.advance(predictor.corrections, p, spec, scaling, predictor.side)


def predicted_dual(predictor: Predictor, p: problem.Problem, spec: SinkhornSpec) -> jax.Array:
    """The predictor's dual in score coordinates; 0 at tokens inactive in the closures."""
    spec = spec.with_padding(predictor.padding)
    valid = masks.feature_validity(p.validity, spec.padding)
    dual = predict(
        predictor,
        p.q,
        p.k,
        scale=p.scale,
        scores=p.scores if predictor.baseline == "first_step" else None,
        epsilon=spec.epsilon,
        mask=p.mask,
        query_valid=None if valid is None else valid.query,
        key_valid=None if valid is None else valid.key,
    )
    own = p.q if predictor.side == "query" else p.k
    dual = dual - query_shift(own, scale=p.scale)
    if p.validity is None:
        return dual
    active = p.validity.query if predictor.side == "query" else p.validity.key
    return jnp.where(active, dual, jnp.zeros_like(dual))
