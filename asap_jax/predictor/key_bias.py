"""A compiled layer of one closure as plain attention: its bias on the keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.predictor import row_mass
from asap_jax.predictor.predictor import Predictor, check
from asap_jax.predictor.starting_dual import starting_scaling
from asap_jax.problem import make_problem
from asap_jax.spec import SinkhornSpec


class KeyBias(NamedTuple):
    """What turns plain attention into a compiled layer.

    The layer is ``rows * softmax(scale * q k' + bias) v``, by any kernel that takes a bias.

    Attributes:
      bias: finite, ``(..., heads, 1, M)``; with the call's own bias added, it has its shape.
      scale: the score scale divided by epsilon; an array if it comes out of ``jax.jit``.
      rows: factors of the output, broadcasting to ``(..., N, heads, 1)``: 0 for queries without
        keys. None if no factor is needed.
    """

    bias: jax.Array
    scale: float
    rows: jax.Array | None


def key_bias(
    predictor: Predictor,
    query: Any,
    key: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    spec: SinkhornSpec,
    ending: str,
) -> KeyBias:
    """The bias of one closure from a key dual, ending on rows.

    Args:
      predictor: with ``side="key"`` and no corrections.
      query: ``(..., N, heads, head_dim)``; key: ``(..., M, heads, head_dim)``.
      bias, mask: rank of the scores, as in a call of the layer.
      spec, ending: see ``asap_attention``.

    Raises:
      ValueError, TypeError: a predictor that does not give a bias on the keys; shapes that do not
        fit.
    """
    continued = spec.ended(ending)
    if predictor.side != "key" or predictor.corrections or continued.last_step != "row":
        raise ValueError(
            f"only one closure from a key dual that ends on rows is a bias on the keys, got a "
            f"predictor with side={predictor.side!r}, {len(predictor.corrections)} correction(s) "
            f"and ending={ending!r} of a teacher with num_steps={spec.num_steps}"
        )
    check(predictor, 1)
    rows_of = row_mass.rows_of(
        predictor.row_mass, spec, ending, predictor.padding, predictor.statistics
    )
    query, key = checks.real_array("query", query), checks.real_array("key", key)
    if query.shape[-1:] != key.shape[-1:]:
        raise ValueError(f"head_dim of query and key differ: query {query.shape}, key {key.shape}")
    p = make_problem(query, key, key, bias, mask, scale=spec.scale)
    scaling, _ = starting_scaling(predictor, p, spec)
    scaling = scaling[..., None, :]
    if p.bias is not None:
        scaling = scaling + p.bias.astype(scaling.dtype) / spec.epsilon
    rows = None if rows_of is None else rows_of(p)
    if p.validity is not None:
        rows = jnp.where(p.validity.query[..., None], 1.0 if rows is None else rows, 0.0)
    if rows is not None and rows.ndim:
        rows = jnp.swapaxes(rows, -2, -3)
    return KeyBias(scaling, p.scale / spec.epsilon, rows)
