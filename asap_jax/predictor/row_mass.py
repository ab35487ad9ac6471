"""Row masses: the row sums of a teacher that ends on columns, for a layer that ends on rows.

A plan that ends on columns is ``A_ij = r_i softmax_j(s_ij + g_j)``, where g is its key dual and r
are its row sums. A row closure of the same dual gives the softmax; the row sums are predicted. This
is not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, devices, features, masks
from asap_jax.predictor.heads import LinearHead
from asap_jax.predictor.statistics import inside
from asap_jax.problem import Problem
from asap_jax.spec import SinkhornSpec


@flax.struct.dataclass
class RowMass:
    """Predicts the row sums of a column-ending teacher, up to a factor per problem.

    Attributes:
      features: tuple of feature families, evaluated at the queries.
      head: linear, from the features to ``log r_i``.
    """

    features: tuple[Any, ...]
    head: LinearHead


def rows_of(
    row_mass: RowMass | None,
    spec: SinkhornSpec,
    ending: str,
    padding: str | None = None,
    statistics: Any = None,
) -> Callable[[Problem], jax.Array] | None:
    """A function from a problem to its ``row_sums``; None if a row closure gives the right sums.

    ``padding`` and ``statistics`` are those of the layer's predictor.

    Raises:
      TypeError: ``row_mass`` or a part of it has the wrong type.
      ValueError: ``row_mass`` for another ending.
    """
    if row_mass is not None:
        _check(row_mass, spec, ending)
    elif spec.key_mass == "balanced" or spec.ended(ending) == spec:
        return None
    return lambda p: row_sums(p, spec.with_padding(padding), row_mass, statistics)


def _check(row_mass: Any, spec: SinkhornSpec, ending: str) -> None:
    checks.instance("row_mass", row_mass, RowMass, "a RowMass")
    features.check_families("features of row_mass", row_mass.features)
    checks.instance("head of row_mass", row_mass.head, LinearHead, "a LinearHead")
    if spec.ended(ending) == spec:
        raise ValueError(
            f"row_mass is for ending='row' of a teacher that ends on columns, got "
            f"ending={ending!r} and num_steps={spec.num_steps}"
        )


def row_sums(
    p: Problem, spec: SinkhornSpec, row_mass: RowMass | None = None, statistics: Any = None
) -> jax.Array:
    """Factors for the rows of a plan that ends on rows, for a teacher that ends on columns.

    Over the active queries they add up to the teacher's total mass. With ``row_mass`` they are
    ``(..., N, 1)``. Without, all are equal: ``()``, or ``(..., 1, 1)`` under a mask; they are 1 for
    ``key_mass="balanced"``. Features are evaluated within the limits of ``statistics``.
    """
    rows = jnp.exp(_log_row_sums(p, spec, row_mass, statistics))
    return rows[..., None] if rows.ndim else rows


def _log_row_sums(
    p: Problem, spec: SinkhornSpec, row_mass: RowMass | None, statistics: Any
) -> jax.Array:
    log_mean = p.log_key_target(spec.key_mass) - p.log_key_target("balanced")
    if row_mass is None:
        return log_mean
    tokens = inside(statistics, p)[0].tokens("query", spec.padding)
    log_rows = features.evaluate(row_mass.features, row_mass.head, tokens)
    log_rows = jnp.where(p.active("query"), log_rows, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(log_rows, -1, keepdims=True))
    peak = devices.largest(peak, p.axis_name)
    peak = jnp.where(peak == -jnp.inf, jnp.zeros_like(peak), peak)
    valid = None if p.validity is None else p.validity.query
    mean = masks.masked_mean(jnp.exp(log_rows - peak), valid, -1, p.axis_name)
    mean = jnp.where(mean > 0, mean, jnp.ones_like(mean))
    log_rows = jnp.where(p.active("query"), log_rows - peak, jnp.zeros_like(log_rows))
    return log_mean + log_rows - jnp.log(mean)
