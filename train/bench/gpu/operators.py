"""The operators that are checked and timed, and their float64 references from the formulas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import asap_jax as aj

TEACHER = aj.SinkhornSpec(10)
"""The teacher of all closures. It ends on columns."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """A teacher of ``half_steps`` steps, or as many closures of a dual predicted from moments.

    Attributes:
      name: the name in tables.
      half_steps: number of steps or closures.
      ending: None for a teacher; otherwise the ``ending`` of a compiled layer.
    """

    name: str
    half_steps: int
    ending: str | None = None

    @property
    def on_rows(self) -> bool:
        """Whether the last half-step is on rows."""
        return self.half_steps % 2 == 1 if self.ending is None else self.ending == "row"

    @property
    def side(self) -> str:
        """The side of the dual from which it starts."""
        return "key" if self.on_rows == (self.half_steps % 2 == 1) else "query"

    def bind(self, implementation: str, width: int) -> Callable:
        """The attention function of query, key and value, for heads of ``width``."""
        if self.ending is None:
            spec = aj.SinkhornSpec(self.half_steps)
            return functools.partial(
                aj.sinkhorn_attention, spec=spec, implementation=implementation
            )
        head = aj.LinearHead(coefficients(width).astype(np.float32))
        return functools.partial(
            aj.asap_attention,
            predictor=aj.Predictor((aj.Moments(),), head, side=self.side),
            spec=TEACHER,
            closures=self.half_steps,
            ending=self.ending,
            implementation=implementation,
        )


OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("S=3", 3),
        Operator("S=10", 10),
        Operator("S=20", 20),
        *(
            Operator(f"n={n}, {'rows' if ending == 'row' else 'columns'}", n, ending)
            for ending in ("row", "teacher")
            for n in (1, 2, 3)
        ),
    )
}


@functools.cache
def coefficients(width: int) -> np.ndarray:
    """Coefficients of ``Moments`` that give about the dual of Gaussian tokens.

    To second order it is the shift between the coordinates minus half the variance of the scores.
    """
    result = 0.01 * np.random.default_rng(1).normal(size=width + 8)
    result[width] += 1.0
    result[width + 2] -= 0.5
    return result


def dense(xp: Any, operator: Operator, q: Any, k: Any, v: Any) -> Any:
    """The output ``(..., N, d_v)`` of an operator, from the formulas, for scores up to hundreds.

    Masked keys are left out instead of masked: features then come from as many of the first queries
    as there are keys.

    Args:
      xp: ``numpy``, or ``jax.numpy`` for gradients.
      operator: the operator.
      q: queries ``(..., N, d)``.
      k: keys ``(..., M, d)``; v: values ``(..., M, d_v)``.
    """
    s = q @ xp.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
    log_target = np.log(q.shape[-2] / k.shape[-2])
    row, column = xp.zeros(s.shape[:-1]), xp.zeros((*s.shape[:-2], s.shape[-1]))
    if operator.ending is not None and operator.side == "query":
        row = predicted(xp, q, k, k.shape[-2])
    elif operator.ending is not None:
        column = predicted(xp, k, q[..., : k.shape[-2], :], k.shape[-2])
    for step in range(operator.half_steps):
        if (operator.side == "key") == (step % 2 == 0):
            row = -xp.log(xp.sum(xp.exp(s + column[..., None, :]), axis=-1))
        else:
            column = log_target - xp.log(xp.sum(xp.exp(s + row[..., :, None]), axis=-2))
    return xp.exp(row[..., :, None] + s + column[..., None, :]) @ v


def predicted(xp: Any, own: Any, other: Any, valid: int) -> Any:
    """The dual ``(..., N)`` of ``own`` from moments, in score coordinates.

    The moments of ``own`` are those of its first ``valid`` tokens.
    """
    root = own.shape[-1] ** -0.25
    x, y = root * own, root * other
    (mean_x, cov_x), (mean, cov) = _moments(xp, x[..., :valid, :]), _moments(xp, y)
    u, delta = x - mean_x, mean_x - mean
    dot = lambda a, b: xp.sum(a * b, axis=-1, keepdims=True)
    by_cov = u @ cov
    columns = [
        u,
        dot(x - mean, x - mean) / 2,
        dot(u, delta),
        dot(u, by_cov),
        dot(by_cov, by_cov),
        dot(u, u @ cov_x),
        dot(by_cov, delta),
        dot(u, mean),
        dot(by_cov, mean),
    ]
    # The library computes with float32 coefficients.
    weights = coefficients(own.shape[-1]).astype(np.float32).astype(np.float64)
    dual = xp.concatenate(columns, -1) @ weights
    dual = dual - xp.mean(dual[..., :valid], axis=-1, keepdims=True)
    return dual - dot(x, x)[..., 0] / 2


def _moments(xp, x):
    mean = xp.mean(x, axis=-2, keepdims=True)
    return mean, xp.swapaxes(x - mean, -1, -2) @ (x - mean) / x.shape[-2]
