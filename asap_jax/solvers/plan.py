"""Plans: how the weights of a problem come about, read out as weights or applied to values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from asap_jax.problem import Problem
from asap_jax.solvers import batching, ctransform, registry
from asap_jax.solvers.closures import Closures

Start = jax.Array | Callable[[Problem], jax.Array]


class DensePlan(NamedTuple):
    """A plan whose weights A ``(..., N, M)`` have been computed."""

    matrix: jax.Array

    def weights(self, p: Problem) -> jax.Array:
        """A."""
        del p
        return self.matrix

    def mix(self, p: Problem) -> jax.Array:
        """``A v``: ``(..., N, d_v)``."""
        return ctransform.mixture(self.matrix, p.v, p.precision)


class ClosedPlan(NamedTuple):
    """A plan made by closures.

    Attributes:
      start: log scaling ``(..., N)`` or ``(..., M)`` of ``closures.side``; or a pytree that is a
        function from a group of problems to theirs, so each group computes its own.
      closures: which closures to take.
      key_mass: target of the column sums, see ``SinkhornSpec``.
      implementation: a name of ``registry``.
    """

    start: Start
    closures: Closures
    key_mass: str
    implementation: str

    def weights(self, p: Problem) -> jax.Array:
        """A ``(..., N, M)``."""
        name = registry.choose(self.implementation, 1, 1)  # A is stored, whatever its size
        return _weights(p.replace(v=None), self.start, self.closures, self.key_mass, name)

    def mix(self, p: Problem) -> jax.Array:
        """``A v (..., N, d_v)``, a few problems at a time, without storing A."""
        lead, n, m = p.q.shape[:-2], p.q.shape[-2], p.k.shape[-2]
        name = registry.choose(self.implementation, n, m)
        rows = registry.IMPLEMENTATIONS[name].block or n
        step = batching.group_sizes(lead, min(rows, n) * m)
        return _mix(p, self.start, self.closures, self.key_mass, name, step)


Plan = DensePlan | ClosedPlan


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _weights(p: Problem, start: Start, closures: Closures, key_mass: str, name: str) -> jax.Array:
    apply, start = registry.IMPLEMENTATIONS[name].apply, start(p) if callable(start) else start
    return apply(p, start, p.log_key_target(key_mass), closures, mix=False)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _mix(
    p: Problem, start: Start, closures: Closures, key_mass: str, name: str, step: tuple[int, ...]
) -> jax.Array:
    apply, lead = registry.IMPLEMENTATIONS[name].apply, p.q.shape[:-2]

    @jax.checkpoint
    def mix(p, start):
        return apply(p, start, p.log_key_target(key_mass), closures, mix=True)

    if not callable(start):
        return batching.map_groups(mix, (p, start), lead, step)

    # A prediction may differ per head, so heads are split only after it.
    def start_and_mix(p):
        made = jax.checkpoint(lambda p: start(p))(p)
        return batching.map_groups(mix, (p, made), p.q.shape[:-2], step)

    return batching.map_groups(start_and_mix, (p,), lead, (*step[:-1], *lead[-1:]))
