"""Sums and extremes over the devices that share the tokens of a call.

``axis_name`` is the name of an axis of an enclosing ``jax.shard_map``, over which queries, keys and
values are sharded by token. With None one device has all tokens, and the values come back as they
are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def total(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The sum of ``x`` over the devices."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def mean(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The mean of ``x`` over the devices."""
    return x if axis_name is None else jax.lax.pmean(x, axis_name)


def largest(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The largest ``x`` of all devices. It has no gradient."""
    return x if axis_name is None else jax.lax.pmax(jax.lax.stop_gradient(x), axis_name)


def smallest(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The smallest ``x`` of all devices. It has no gradient."""
    return x if axis_name is None else jax.lax.pmin(jax.lax.stop_gradient(x), axis_name)


def anywhere(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Whether the bool ``x`` is True on one device or more."""
    return x if axis_name is None else largest(x.astype(jnp.int32), axis_name) > 0


def may_differ(x: jax.Array, axis_name: str) -> bool:
    """Whether ``x`` may be another array on every device; False if JAX knows that it is not."""

    def varies(array: jax.Array) -> bool:
        known = getattr(jax.typeof(array), "manual_axis_type", None)
        return axis_name in getattr(known, "varying", ())

    return varies(x) or not varies(jax.lax.axis_index(axis_name))


def size(axis_name: str) -> int:
    """The number of devices.

    Raises:
      ValueError: no enclosing ``jax.shard_map`` has an axis of this name.
    """
    try:
        return int(jax.lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of an enclosing jax.shard_map; outside of one "
            f"leave axis_name out"
        ) from None
