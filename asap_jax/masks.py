"""Masks, additive biases and the two validities.

A mask has the rank of the scores ``(..., heads, N, M)`` with size-1 axes allowed; True or 1
means "may attend". Masked scores are -inf, never a finite number: a column normalisation would
cancel any constant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks, devices

MASKED_BIAS = -1e8
SOFT_MASK = -1e3
"""Biases of this and 0 alone are taken for an additive mask."""
SOFT_MASK_GAP = 5.0
"""So are biases that differ by less than 1e3 from 0 or from a value this many times as low."""
LARGEST_BIAS = 1e6
"""Largest bias that leaves float32 scores a tenth of their unit."""


class Validity(NamedTuple):
    """Active tokens, bool: ``query (..., N)`` and ``key (..., M)``."""

    query: jax.Array
    key: jax.Array


def as_mask(mask: Any, shape: tuple) -> jax.Array | None:
    """A bool mask that broadcasts to the scores ``shape (..., N, M)``, or None.

    Accepts bool and 0/1 of any int or float dtype (Flax's mask makers return float32). A traced
    mask with other values allows everything; ``spoiled`` then makes the result NaN.

    Raises:
      ValueError: another rank, a shape that does not broadcast, or concrete values that are
        neither 0 nor 1. Pass an additive mask as ``bias`` instead.
      TypeError: not an array, or a complex mask.
    """
    if mask is None:
        return None
    array = checks.array("mask", mask)
    checks.broadcasts_to("mask", array.shape, "scores", shape)
    if array.dtype == bool:
        return array
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"mask must be bool or 0/1, got dtype {array.dtype}")
    if not isinstance(array, jax.core.Tracer) and not np.isin(np.asarray(array), (0, 1)).all():
        raise ValueError(
            f"mask of shape {array.shape} must hold only 0 and 1; give additive masks as bias"
        )
    binary = _is_binary(array)
    return array != 0 if binary is None else (array != 0) | ~binary


def spoiled(mask: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The floating arrays; all NaN if ``mask`` is traced and has values other than 0 and 1.

    Such a mask is most likely additive, and read as 0/1 it would mask all but the padding. Costs
    nothing for bool and for concrete masks.
    """
    binary = None if mask is None else _is_binary(checks.array("mask", mask))
    if binary is None:
        return arrays
    return tuple(x + jnp.where(binary, 0.0, jnp.nan).astype(x.dtype) for x in arrays)


def _is_binary(mask: jax.Array) -> jax.Array | None:
    """Whether a traced mask holds only 0 and 1, ``()``; None if it is bool or concrete."""
    if mask.dtype == bool or not isinstance(mask, jax.core.Tracer):
        return None
    return jnp.all((mask == 0) | (mask == 1))


def as_bias(bias: Any, shape: tuple) -> tuple[jax.Array | None, jax.Array | None]:
    """Splits an additive bias into a finite bias and a mask, True where attention is allowed.

    Entries <= ``mask_limit`` are masked. Both results broadcast to the scores ``shape``. The mask
    is None if the bias has concrete values that mask nothing.

    Raises:
      TypeError, ValueError: dtype or shape that does not fit. ValueError also for concrete values
        that are +inf or NaN, or that are larger than 1e6 and not masked: float32 scores plus such a
        bias have lost their digits, or that look like a mask: only 0 and 1, only 0 and one value
        from -1e3 down, or values within 1e3 of 0 and of a value from -5e3 down. Traced values that
        are too large become NaN, and spoil the rows and columns that they are added to.
    """
    if bias is None:
        return None, None
    array = checks.real_array("bias", bias)
    checks.broadcasts_to("bias", array.shape, "scores", shape)
    limit, largest = mask_limit(array.dtype), _largest(array.dtype)
    if not isinstance(array, jax.core.Tracer):  # a constant is concrete inside jit too
        values = np.asarray(array)
        hidden = values <= limit
        wrong = values[~(hidden | (np.abs(values) <= largest))]
        if wrong.size:
            raise ValueError(
                f"bias must be within +-{largest:g}, or <= {limit:g} where it masks, got {wrong[0]}"
            )
        if not hidden.any():
            _check_not_a_mask(values, limit)
            return array, None
    masked = array <= limit
    usable = jnp.where(jnp.abs(array) <= largest, array, jnp.full_like(array, jnp.nan))
    return jnp.where(masked, jnp.zeros_like(array), usable), ~masked


def mask_limit(dtype: Any) -> float:
    """Biases of this dtype mask from here downwards: -1e8, and half the lowest float16.

    A float16 mask of -65504 plus a small bias is still one.
    """
    return max(MASKED_BIAS, float(jnp.finfo(dtype).min) / 2)


def _largest(dtype: Any) -> float:
    """The largest absolute value of a bias of this dtype that does not mask."""
    most = float(jnp.finfo(dtype).max)
    return most if dtype == jnp.float64 else min(LARGEST_BIAS, most)


def _check_not_a_mask(bias: np.ndarray, limit: float) -> None:
    """Refuses the values of a mask, above ``limit``, where they would be added to the scores.

    A key with a bias of -1e4 is no more masked than others: columns get their sums back.
    """
    if bias.size == 0:
        return
    low, high = float(bias.min()), float(bias.max())
    if low == high:
        return
    two = bool(np.all((bias == low) | (bias == high)))
    if two and (low, high) == (0, 1):
        raise ValueError("bias holds only 0 and 1, as a mask does: give masks as mask=")
    small = np.abs(bias) < -SOFT_MASK
    apart = low <= SOFT_MASK_GAP * SOFT_MASK and bool(np.all(small | (bias < low - SOFT_MASK)))
    if (two and high == 0 and low <= SOFT_MASK) or (apart and small.any()):
        raise ValueError(
            f"bias has small values and {low:g}, as an additive mask does, but only {limit:g} or "
            "lower masks: give -1e9, or a bool mask as mask="
        )


def combine(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Logical and of two masks, either of which may be None."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def closure_validity(
    mask: jax.Array | None, shape: tuple, axis_name: str | None = None
) -> Validity | None:
    """The tokens in the marginals: queries with an allowed key, keys with an allowed query.

    ``shape`` is that of the scores ``(..., N, M)``; None means every token. With an ``axis_name``
    (see ``devices``) each device has some of the queries and of the keys, and the mask leaves out
    whole tokens.
    """
    if mask is None:
        return None

    def some(axis):
        local = mask.any(axis)
        return local if mask.shape[axis] == 1 else devices.anywhere(local, axis_name)

    query = jnp.broadcast_to(some(-1), shape[:-1])
    key = jnp.broadcast_to(some(-2), (*shape[:-2], shape[-1]))
    return Validity(query, key)


def leaves_out_tokens(mask: jax.Array | None) -> bool:
    """Whether the shape of a mask allows only whole keys or whole queries to be left out."""
    return mask is None or 1 in mask.shape[-2:]


def joint_validity(
    a: jax.Array | None, b: jax.Array | None, shape: tuple, axis_name: str | None = None
) -> Validity | None:
    """``closure_validity`` of two masks together.

    A mask of queries and one of keys are not combined for it, so no array of N x M comes of them.
    """
    sides = [x.shape[-2:].index(1) for x in (a, b) if x is not None and 1 in x.shape[-2:]]
    if a is None or b is None or len(set(sides)) < 2:
        return closure_validity(combine(a, b), shape, axis_name)
    first, second = (closure_validity(x, shape, axis_name) for x in (a, b))
    assert first is not None
    assert second is not None
    return Validity(first.query & second.query, first.key & second.key)


def zero_masked(bias: jax.Array, mask: jax.Array | None) -> jax.Array:
    """``bias`` with 0 where it is masked, so that nothing there spreads.

    Along an axis that the bias does not have, an entry counts as masked if it is so everywhere.
    """
    if mask is None:
        return bias
    for axis in (-2, -1):
        if bias.shape[axis] == 1:
            mask = mask.any(axis, keepdims=True)
    return jnp.where(mask, bias, jnp.zeros_like(bias))


def log_key_target(
    key_mass: str,
    validity: Validity | None,
    shape: tuple,
    dtype: Any,
    axis_name: str | None = None,
) -> jax.Array:
    """Log of the column target, attention scale: ``()``, or ``(..., 1)`` under a mask.

    ``"balanced"``: active queries / active keys; ``"unit"``: 1. ``shape`` is that of the scores.
    """
    if key_mass == "unit":
        return jnp.zeros((), dtype)
    if validity is None:
        return jnp.log(jnp.asarray(shape[-2] / shape[-1], dtype))
    active = lambda valid: devices.total(valid.sum(-1, keepdims=True, dtype=dtype), axis_name)
    count = lambda valid: jnp.maximum(active(valid), 1)
    return jnp.log(count(validity.query)) - jnp.log(count(validity.key))


def feature_validity(validity: Validity | None, padding: str) -> Validity | None:
    """The tokens used for features, centring and regression.

    ``padding="self"`` with N = M: tokens that are active both as query and as key, since a masked
    key is a padded token. Otherwise the validities of the closures.
    """
    if validity is None or padding == "none":
        return validity
    if validity.query.shape[-1] != validity.key.shape[-1]:
        return validity
    token = validity.query & validity.key
    return Validity(token, token)


def masked_mean(
    x: jax.Array, valid: jax.Array | None, axis: int, axis_name: str | None = None
) -> jax.Array:
    """Mean of the valid entries of ``x`` over ``axis``, which keeps size 1; 0 if none is valid.

    With an ``axis_name`` the mean is over the entries of all devices.
    """
    if valid is None:
        return devices.mean(x.mean(axis, keepdims=True), axis_name)
    total = jnp.where(valid, x, jnp.zeros_like(x)).sum(axis, keepdims=True)
    count = valid.sum(axis, keepdims=True, dtype=x.dtype)
    total, count = (devices.total(a, axis_name) for a in (total, count))
    return total / jnp.maximum(count, jnp.ones_like(count))


def token_mean(x: jax.Array, valid: jax.Array | None, axis_name: str | None = None) -> jax.Array:
    """Mean ``(..., 1, d)`` of the tokens ``x (..., N, d)`` where ``valid (..., N)``."""
    return masked_mean(x, None if valid is None else valid[..., None], -2, axis_name)


def center(x: jax.Array, valid: jax.Array | None = None, axis_name: str | None = None) -> jax.Array:
    """``x`` minus the mean of its ``valid`` entries over the last axis (the projection Pi_0)."""
    return x - masked_mean(x, valid, -1, axis_name)


def zero_inactive(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """``x (..., N, d)`` with inactive tokens set to 0, so that a NaN there does not spread."""
    if valid is None:
        return x
    return jnp.where(valid[..., None], x, jnp.zeros_like(x))
