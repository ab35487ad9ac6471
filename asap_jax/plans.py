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

from asap_jax import chunks, closures, scaling, streaming
from asap_jax.inputs import Problem
from asap_jax.kernels import Kernel

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
    kernel = Kernel(q, k, bias, mask, settings.scale, settings.epsilon, precision)
    return read(kernel, start, log_target, None, settings, None)


@functools.partial(jax.jit, static_argnames=("settings", "precision", "lead", "step"))
def _chunked(q, k, bias, mask, start, log_target, values, *, settings, precision, lead, step):
    def part(q, k, bias, mask, start, log_target, values):
        if settings.implementation == "streaming":
            given = (q, k, bias, mask, start, log_target, values)
            return streaming.mix(*given, settings=settings, precision=precision)
        kernel = Kernel(q, k, bias, mask, settings.scale, settings.epsilon, precision[0])
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


def read(kernel: Kernel, start, log_target, values, settings: Settings, precision) -> jax.Array:
    """The weights of a kernel's plan, or, given values, their mixture.

    Start and target as in ``Closed``; ``values (..., M, d)`` or None.
    """
    closing = dict(side=settings.side, num_steps=settings.num_steps, log_target=log_target)
    look = lambda plan: plan.weights() if values is None else plan.mix(values, precision)
    # The kernel is made again: kept for this branch, it would be a second array of its size.
    log = lambda: look(Dense(closures.finish(kernel.log(), start, **closing)))
    if settings.implementation == "log":
        return log()

    @functools.partial(jax.checkpoint, static_argnums=0)
    def exponentiated(divided):
        scaled = scaling.scale(kernel, start, **closing, divided=divided)
        return look(scaled), scaled.ok

    fits = scaling.fits(kernel, start, side=settings.side)
    plain, divided = (functools.partial(exponentiated, how) for how in (False, True))
    out, ok = jax.lax.cond(fits, plain, divided)
    if settings.num_steps == 1:
        return out
    return jax.lax.cond(scaling.one_for_all(ok), lambda: out, jax.checkpoint(log))


Plan = Dense | Closed
