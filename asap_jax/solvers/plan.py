"""Plans: n closures from a dual, read out as weights or applied to values.

One problem, several ways to compute it: ``"scaling"`` exponentiates once and falls back to the
log domain where that form cannot be trusted; ``"streaming"`` works tile by tile; ``"log"`` stays
in the log domain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import masks
from asap_jax.problem import Problem
from asap_jax.solvers import batching, log_domain, matrix_scaling, tiled
from asap_jax.solvers.kernel import Kernel

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
      start: log scaling ``(..., N)`` or ``(..., M)`` of ``settings.side``; or a function from some
        of the problems to theirs, a pytree, so that it is worked out where they are.
      log_target: log column target, ``()`` or ``(..., 1)``.
      settings: what is static.
    """

    problem: Problem
    start: jax.Array | Callable[[Problem], jax.Array]
    log_target: Any
    settings: Settings

    def weights(self) -> jax.Array:
        """A ``(..., N, M)``."""
        return _whole(self.problem, self.start, self._target(), settings=self.settings)

    def mix(self, values: jax.Array, precision=None) -> jax.Array:
        """``A @ values``, a few problems at a time, without keeping A."""
        lead, (n, m) = self.problem.score_shape[:-2], self.problem.score_shape[-2:]
        settings = self.settings._replace(implementation=choose(self.settings, n, m))
        rows = min(n, tiled.BLOCK) if settings.implementation == "streaming" else n
        return _chunked(
            self.problem.replace(v=values),
            self.start,
            self._target(),
            settings=settings,
            precision=precision,
            step=batching.sizes(lead, rows * m),
        )

    def _target(self):
        target, rank = jnp.asarray(self.log_target), len(self.problem.score_shape) - 1
        return target.reshape((1,) * (rank - target.ndim) + target.shape)


@functools.partial(jax.jit, static_argnames="settings")
def _whole(p, start, log_target, *, settings):
    kernel = Kernel(p.q, p.k, p.bias, p.mask, settings.scale, settings.epsilon, p.precision)
    start = start(p) if callable(start) else start
    return read(kernel, start, log_target, None, settings, None)


@functools.partial(jax.jit, static_argnames=("settings", "precision", "step"))
def _chunked(p, start, log_target, *, settings, precision, step):
    lead = p.score_shape[:-2]

    def part(q, k, bias, mask, start, log_target, values):
        if settings.implementation == "streaming":
            given = (q, k, bias, mask, start, log_target, values)
            return tiled.mix(*given, settings=settings, precision=(p.precision, precision))
        kernel = Kernel(q, k, bias, mask, settings.scale, settings.epsilon, p.precision)
        return read(kernel, start, log_target, values, settings, precision)

    if not callable(start):
        given = (p.q, p.k, p.bias, p.mask, start, log_target, p.v)
        return batching.over_problems(part, given, lead, step)

    # What starts the closures may be made per head, so that heads are not split before it is known.
    def started(q, k, bias, mask, log_target, v):
        made = jax.checkpoint(lambda some: start(some))(_some(p, q, k, bias, mask, v))
        given = (q, k, bias, mask, made, log_target, v)
        return batching.over_problems(part, given, q.shape[:-2], step)

    given = (p.q, p.k, p.bias, p.mask, log_target, p.v)
    return batching.each(started, given, lead, (*step[:-1], *lead[-1:]))


def _some(p: Problem, q, k, bias, mask, v) -> Problem:
    """The problem ``p`` with the arrays of some of its examples."""
    validity = masks.closure_validity(mask, (*q.shape[:-1], k.shape[-2]))
    return p.replace(q=q, k=k, bias=bias, mask=mask, v=v, validity=validity)


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
    log = lambda: look(Dense(log_domain.finish(kernel.log(), start, **closing)))
    if settings.implementation == "log":
        return log()

    @functools.partial(jax.checkpoint, static_argnums=0)
    def exponentiated(divided):
        scaled = matrix_scaling.scale(kernel, start, **closing, divided=divided)
        return look(scaled), scaled.ok

    fits = matrix_scaling.fits(kernel, start, side=settings.side)
    plain, divided = (functools.partial(exponentiated, how) for how in (False, True))
    out, ok = jax.lax.cond(fits, plain, divided)
    if settings.num_steps == 1:
        return out
    return jax.lax.cond(matrix_scaling.one_for_all(ok), lambda: out, jax.checkpoint(log))


Plan = Dense | Closed
