"""Plans: n closures from a dual, read out as weights or applied to values.

One problem, several ways to compute it: ``"scaling"`` exponentiates once and falls back to the
log domain where that form cannot be trusted; ``"streaming"`` works tile by tile; ``"log"`` stays
in the log domain.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import chunks, closures, ctransform, scaling, streaming
from asap_jax.inputs import Problem
from asap_jax.scores import scores as make_scores

STREAMED_SIZE = 2**26
"""Entries of a kernel (256 MiB in float32) from which ``"auto"`` works tile by tile."""


class Dense(NamedTuple):
    """A plan whose weights A ``(..., N, M)`` are at hand."""

    matrix: jax.Array

    def weights(self) -> jax.Array:
        """A."""
        return self.matrix

    def mix(self, values: jax.Array, precision=None) -> jax.Array:
        """``A @ values``: ``(..., M, d)`` to ``(..., N, d)``."""
        return jnp.einsum("...nm,...md->...nd", self.matrix, values, precision=precision)


class Settings(NamedTuple):
    """What is static: ``num_steps >= 1`` closures from a scaling on ``side``, and how."""

    side: str
    num_steps: int
    epsilon: float
    scale: float
    implementation: str


class Closed(NamedTuple):
    """A plan made by closures.

    Attributes:
      problem: queries, keys, bias and mask.
      start: log scaling ``(..., N)`` or ``(..., M)`` of ``settings.side``.
      log_target: log column target, ``()`` or ``(..., 1)``.
      settings: what is static.
    """

    problem: Problem
    start: jax.Array
    log_target: Any
    settings: Settings

    def weights(self) -> jax.Array:
        """A ``(..., N, M)``."""
        return _whole(*self._arrays(), None, settings=self.settings, precision=self._precision)

    def mix(self, values: jax.Array, precision=None) -> jax.Array:
        """``A @ values``, a few problems at a time, without keeping A."""
        lead, (n, m) = self.problem.score_shape[:-2], self.problem.score_shape[-2:]
        settings = self.settings._replace(implementation=choose(self.settings, n, m))
        rows = min(n, streaming.BLOCK) if settings.implementation == "streaming" else n
        return _chunked(
            *self._arrays(),
            values,
            settings=settings,
            precision=(self._precision, precision),
            lead=lead,
            step=chunks.sizes(lead, rows * m),
        )

    @property
    def _precision(self):
        return self.problem.precision

    def _arrays(self):
        p, rank = self.problem, len(self.problem.score_shape) - 1
        target = jnp.asarray(self.log_target)
        target = target.reshape((1,) * (rank - target.ndim) + target.shape)
        return p.q, p.k, p.bias, p.mask, self.start, target


@functools.partial(jax.jit, static_argnames=("settings", "precision"))
def _whole(q, k, bias, mask, start, log_target, values, *, settings, precision):
    kernel = _kernel(q, k, bias, mask, settings, precision)
    return read(kernel, start, log_target, None, settings, None)


@functools.partial(jax.jit, static_argnames=("settings", "precision", "lead", "step"))
def _chunked(q, k, bias, mask, start, log_target, values, *, settings, precision, lead, step):
    def part(q, k, bias, mask, start, log_target, values):
        if settings.implementation == "streaming":
            given = (q, k, bias, mask, start, log_target, values)
            return streaming.mix(*given, settings=settings, precision=precision)
        kernel = _kernel(q, k, bias, mask, settings, precision[0])
        return read(kernel, start, log_target, values, settings, precision[1])

    return chunks.over_problems(part, (q, k, bias, mask, start, log_target, values), lead, step)


def choose(settings: Settings, n: int, m: int) -> str:
    """What ``"auto"`` stands for: tiles where a kernel is too large to be kept, else scaling.

    On CPUs scaling a few problems at a time is 1.5 to 3 times faster than tiles for two closures
    and more (`python -m train bench streaming`).
    """
    if settings.implementation != "auto":
        return settings.implementation
    known = isinstance(n, int) and isinstance(m, int)  # not symbolic, as in jax.export
    return "streaming" if known and n * m >= STREAMED_SIZE else "scaling"


def _kernel(q, k, bias, mask, settings, precision):
    s = make_scores(q, k, scale=settings.scale, bias=bias, precision=precision)
    return ctransform.log_kernel(s, settings.epsilon, mask)


def read(kernel, start, log_target, values, settings: Settings, precision) -> jax.Array:
    """The weights of a log kernel's plan, or, given values, their mixture.

    ``kernel (..., N, M)``; start and target as in ``Closed``; ``values (..., M, d)`` or None.
    """
    closing = dict(side=settings.side, num_steps=settings.num_steps, log_target=log_target)
    look = lambda plan: plan.weights() if values is None else plan.mix(values, precision)
    log = lambda: look(Dense(closures.finish(kernel, start, **closing)))
    if settings.implementation == "log":
        return log()
    if settings.num_steps == 1:
        return log() if values is None else _one_closure(kernel, start, values, closing, precision)
    scaled = scaling.scale(kernel, start, **closing)
    return jax.lax.cond(scaled.ok, lambda: look(scaled), jax.checkpoint(log))


def _one_closure(kernel, start, values, closing, precision) -> jax.Array:
    """One closure, divided on the vectors' side; safe at any logits, so there is no guard."""
    columns = closing["side"] == "query"
    axis = closures.AXIS[closing["side"]]
    target = closing["log_target"] if columns else 0.0
    mass, total, target = ctransform.closure_parts(kernel, start, axis, target)
    factor = target / total
    if columns:
        return Dense(mass).mix(jnp.swapaxes(factor, -1, -2) * values, precision)
    return factor * Dense(mass).mix(values, precision)


Plan = Dense | Closed
