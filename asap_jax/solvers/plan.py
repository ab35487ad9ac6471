"""Plans: ways to compute the weights of a problem, or their product with the values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from asap_jax import devices
from asap_jax.problem import Problem
from asap_jax.solvers import batching, ctransform, registry
from asap_jax.solvers.closures import Closures

Start = jax.Array | Callable[[Problem], jax.Array]


class DensePlan(NamedTuple):
    """A plan whose weights A ``(..., N, M)`` have been computed."""

    matrix: jax.Array

    def weights(self, p: Problem) -> jax.Array:
        """A."""
        return self.matrix

    def mix(self, p: Problem) -> jax.Array:
        """``A v``: ``(..., N, d_v)``."""
        assert p.v is not None
        return ctransform.mixture(self.matrix, p.v, p.precision)


class ClosedPlan(NamedTuple):
    """A plan made by closures.

    Attributes:
      start: log scaling ``(..., N)`` or ``(..., M)`` of ``closures.side``; or a callable pytree
        that computes it from a Problem, so that each group of problems computes its own start.
      closures: the closures.
      key_mass: target of the column sums, see ``SinkhornSpec``.
      implementation: a name of ``registry``.
    """

    start: Start
    closures: Closures
    key_mass: str
    implementation: str

    def weights(self, p: Problem) -> jax.Array:
        """A ``(..., N, M)``."""
        name = registry.choose(self.implementation, p, self.closures, weights=True)
        p = dataclasses.replace(p, v=None)
        return _weights(p, self.start, self.closures, self.key_mass, name)

    def mix(self, p: Problem) -> jax.Array:
        """``A v (..., N, d_v)``, in groups of problems, so that memory never holds all of A."""
        lead, n, m = p.q.shape[:-2], p.q.shape[-2], p.k.shape[-2]
        name = registry.choose(self.implementation, p, self.closures)
        rows = registry.IMPLEMENTATIONS[name].block or n
        limit = registry.largest_group(name, p, self.closures)
        step = batching.group_sizes(lead, min(rows, n) * m, limit)
        return _mix(p, self.start, self.closures, self.key_mass, name, step)


class ScaledPlan(NamedTuple):
    """A plan whose rows are multiplied by ``rows(p)``, which broadcasts to ``(..., N, 1)``."""

    plan: ClosedPlan
    rows: Callable[[Problem], jax.Array]

    def weights(self, p: Problem) -> jax.Array:
        """A ``(..., N, M)``."""
        return self.rows(p) * self.plan.weights(p)

    def mix(self, p: Problem) -> jax.Array:
        """``A v``: ``(..., N, d_v)``."""
        return self.rows(p) * self.plan.mix(p)


Plan = DensePlan | ClosedPlan | ScaledPlan


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _weights(p: Problem, start: Start, closures: Closures, key_mass: str, name: str) -> jax.Array:
    start = start(p) if callable(start) else start
    p = p.without_key_offset() if closures.side == "key" else p
    target = p.log_key_target(key_mass)
    return registry.IMPLEMENTATIONS[name].apply(p, start, target, closures)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _mix(
    p: Problem, start: Start, closures: Closures, key_mass: str, name: str, step: tuple[int, ...]
) -> jax.Array:
    implementation, lead = registry.IMPLEMENTATIONS[name], p.q.shape[:-2]

    def mix(p, start):
        assert p.v is not None
        power = _power(p.v, p.axis_name)
        p = p.without_key_offset() if closures.side == "key" else p
        p = dataclasses.replace(p, v=power * p.v)
        return implementation.apply(p, start, p.log_key_target(key_mass), closures) / power

    if implementation.recompute:
        mix = jax.checkpoint(mix)

    if not callable(start):
        return _map_groups(mix, p, (start,), step)

    # A predictor may have coefficients per head, so split the heads only after the prediction.
    def start_and_mix(p):
        scaling = jax.checkpoint(lambda p: start(p))(p)
        return batching.map_groups(mix, (p, scaling), p.q.shape[:-2], step)

    return _map_groups(start_and_mix, p, (), (*step[:-1], *lead[-1:]))


def _power(values: jax.Array, axis_name: str | None) -> jax.Array:
    """Powers of two ``(..., 1, 1)``: 1, but small for problems with huge values.

    Values times scalings, and sums of them, are then within the range of the dtype.
    """
    quarter = int(jnp.finfo(values.dtype).maxexp) // 4
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(values)), (-2, -1), keepdims=True)
    largest = devices.largest(largest, axis_name)
    return jnp.where(largest > 2.0**quarter, 2.0 ** (-3 * quarter), 1.0).astype(values.dtype)


def _map_groups(function: Callable, p: Problem, rest: tuple, step: tuple[int, ...]) -> jax.Array:
    """``batching.map_groups(function, (p, *rest), ...)`` with heads moved in each group.

    The caller's arrays are ``(..., N, H, d)``. If a group has all heads, they are moved in front of
    the tokens after the group is cut out, in the cache, rather than for all groups beforehand.
    """
    lead = p.q.shape[:-2]
    if step == lead or step[-1] != lead[-1]:
        return batching.map_groups(function, (p, *rest), lead, step)
    moved = lambda p, *rest: jnp.swapaxes(function(p.moved(), *rest), -2, -3)
    return jnp.swapaxes(batching.map_groups(moved, (p.moved(), *rest), lead, step), -2, -3)
