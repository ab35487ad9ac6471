"""Row masses: what a layer that ends on rows lacks of a teacher that ends on columns.

A plan that ends on columns is ``A_ij = r_i softmax_j(s_ij + g_j)``, where g is its key dual and r
are its row sums. A row closure of the same dual gives the softmax; the row sums are predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, features, masks
from asap_jax.predictor.heads import LinearHead
from asap_jax.problem import Problem
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import Closures
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
    row_mass: RowMass | None, spec: SinkhornSpec, ending: str, padding: str | None = None
) -> Callable[[Problem], jax.Array] | None:
    """A function that gives the ``row_sums`` of a problem, or None if all are 1 by the closures.

    Raises:
      TypeError, ValueError: a row mass that is not one, or does not fit the ending.
    """
    continued = spec.ended(ending) != spec
    if row_mass is not None:
        _check(row_mass, spec, ending)
    if not continued or (row_mass is None and spec.key_mass == "balanced"):
        return None
    return lambda p: row_sums(p, spec.with_padding(padding), row_mass)


def _check(row_mass: Any, spec: SinkhornSpec, ending: str) -> None:
    checks.instance("row_mass", row_mass, RowMass, "a RowMass")
    features.check_families("features of row_mass", row_mass.features)
    checks.instance("head of row_mass", row_mass.head, LinearHead, "a LinearHead")
    if spec.ended(ending) == spec:
        raise ValueError(
            f"row_mass is for ending='row' of a teacher that ends on columns, got "
            f"ending={ending!r} and num_steps={spec.num_steps}"
        )


def row_sums(p: Problem, spec: SinkhornSpec, row_mass: RowMass | None = None) -> jax.Array:
    """Factors for the rows of a plan that ends on rows, for a teacher that ends on columns.

    Over the active queries they add up to the teacher's total mass. With ``row_mass`` they are
    ``(..., N, 1)``. Without, all are equal: ``()``, or ``(..., 1, 1)`` under a mask; they are 1 for
    ``key_mass="balanced"``.
    """
    rows = jnp.exp(_log_row_sums(p, spec, row_mass))
    return rows[..., None] if rows.ndim else rows


def _log_row_sums(p: Problem, spec: SinkhornSpec, row_mass: RowMass | None) -> jax.Array:
    target = p.log_key_target(spec.key_mass)
    mean = target - p.log_key_target("balanced")
    if row_mass is None:
        return mean
    dual = features.evaluate(row_mass.features, row_mass.head, p.tokens("query", spec.padding))
    dual = jnp.where(p.active("query"), dual, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(dual, -1, keepdims=True))
    peak = jnp.where(peak == -jnp.inf, jnp.zeros_like(peak), peak)
    mass = jnp.exp(dual - peak)
    total = masks.masked_mean(mass, None if p.validity is None else p.validity.query, -1)
    safe = jnp.where(total > 0, total, jnp.ones_like(total))
    dual = jnp.where(p.active("query"), dual - peak, jnp.zeros_like(dual))
    return mean + dual - jnp.log(safe)


def target(p: Problem, spec: SinkhornSpec) -> jax.Array:
    """Centred log row sums of a column-ending teacher, ``(..., N)``; 0 at inactive queries."""
    kernel, log_target = p.log_kernel(spec.epsilon), p.log_key_target(spec.key_mass)
    start = jnp.zeros_like(kernel[..., 0, :])
    u, v = log_domain.alternate(kernel, start, Closures("key", spec.num_steps), log_target)
    # The next row closure would divide every row by its sum.
    rows = u - log_domain.half_step(kernel, v, "key", log_target)
    return masks.center(rows, p.tokens("query", spec.padding).own_valid)
