"""A compiled layer of one closure as plain attention: its bias on the keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asap_jax.predictor import row_mass
from asap_jax.predictor.predictor import Predictor
from asap_jax.predictor.starting_dual import starting_scaling
from asap_jax.problem import make_problem
from asap_jax.spec import SinkhornSpec


class KeyBias(NamedTuple):
    """What turns plain attention into a compiled layer.

    The layer is ``rows * softmax(scale * q k' + bias) v``, by any kernel that takes a bias.

    Attributes:
      bias: ``(..., heads, 1, M)``; finite, 0 at keys that no query may attend.
      scale: the score scale divided by epsilon.
      rows: factors of the output ``(..., N or 1, heads, 1)``, or None where all are 1.
    """

    bias: jax.Array
    scale: float
    rows: jax.Array | None


def key_bias(
    predictor: Predictor, query: Any, key: Any, mask: Any = None, *, spec: SinkhornSpec, ending: str
) -> KeyBias:
    """The bias of one closure from a key dual, ending on rows.

    Args:
      predictor: with ``side="key"`` and no corrections.
      query: ``(..., N, heads, head_dim)``; key: ``(..., M, heads, head_dim)``.
      mask: rank of the scores; pass the same mask to the attention kernel too.
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
    p = make_problem(query, key, key, None, mask, scale=spec.scale)
    scaling, _ = starting_scaling(predictor, p, spec)
    rows = None
    if continued != spec and (predictor.row_mass is not None or spec.key_mass == "unit"):
        own = spec.with_padding(predictor.padding)
        rows = row_mass.row_sums(p, own, predictor.row_mass)
        rows = jnp.swapaxes(rows, -2, -3) if rows.ndim else rows
    return KeyBias(scaling[..., None, :], p.scale / spec.epsilon, rows)
