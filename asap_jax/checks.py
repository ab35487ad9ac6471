"""Input checks: every message names the argument and its wrong value."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_T = TypeVar("_T")


def describe(value: Any) -> str:
    """The type of ``value``, for an error message; a number or a string with its value."""
    if value is None:
        return "None"
    name = type(value).__name__
    plain = isinstance(value, (str, numbers.Number, np.generic))
    return f"{name} {value!r:.60}" if plain else name


def instance(name: str, value: Any, kind: type[_T] | tuple[type[_T], ...], expected: str) -> _T:
    """``value`` if it has the type ``kind``; TypeError "must be ``expected``" otherwise."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {describe(value)}")
    return value


def items(name: str, value: Any) -> tuple:
    """``value``, a tuple, list or other iterable, as a tuple; TypeError for anything else."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a tuple or list, got {describe(value)}")
    return tuple(value)


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ValueError (TypeError for a traced value) unless ``value`` is a known name."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be static, got a traced value; bind it with functools.partial before jit"
        )
    if not isinstance(value, str) or value not in tuple(known):
        raise ValueError(f"{name}={value!r} is not known; known: {', '.join(map(repr, known))}")


def static_bool(name: str, value: Any) -> bool:
    """A Python bool; TypeError for traced values and anything else."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(
        f"{name} must be a static bool, got {type(value).__name__}; under jit mark "
        f"it static (static_argnames={name!r})"
    )


def positive_int(name: str, value: Any) -> int:
    """A Python int >= 1. Raises TypeError (not an integer) or ValueError (below 1)."""
    if isinstance(value, (bool, np.bool_, jax.core.Tracer)):
        raise TypeError(f"{name} must be a static int, got {type(value).__name__}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be >= 1, got {number}")
    return number


def as_float(name: str, value: Any) -> float:
    """A Python float from a Python, NumPy or 0-d number, so that it promotes no dtype.

    Raises TypeError for traced values, arrays with axes and anything that is not a real number.
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a concrete number, got a traced value; bind it before jit")
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    if isinstance(value, numbers.Real):
        return float(value)
    shape = getattr(value, "shape", None)
    if shape == () and jnp.issubdtype(value.dtype, jnp.floating):
        return float(value)
    wrong = type(value).__name__ + (f" of shape {shape}" if shape else "")
    raise TypeError(f"{name} must be a real number, got {wrong}")


def finite_float(name: str, value: Any) -> float:
    """A finite Python float (ValueError otherwise)."""
    number = as_float(name, value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def positive_float(name: str, value: Any) -> float:
    """A finite Python float > 0 (ValueError otherwise)."""
    number = as_float(name, value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be > 0 and finite, got {number}")
    return number


LARGEST_FACTOR = 1e18
"""Largest ``scale`` or ``1 / epsilon``: the product of two such factors is within float32."""


def score_factor(name: str, value: Any) -> float:
    """A Python float > 0 that may multiply or divide float32 scores (ValueError otherwise)."""
    number = positive_float(name, value)
    if not 1 / LARGEST_FACTOR <= number <= LARGEST_FACTOR:
        raise ValueError(
            f"{name} must be between {1 / LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}, got "
            f"{number:g}: float32 scores would overflow"
        )
    return number


def score_scale(scale: Any, head_dim: int) -> float:
    """``scale`` as a Python float > 0, ``1 / sqrt(head_dim)`` when None."""
    return 1.0 / math.sqrt(head_dim) if scale is None else score_factor("scale", scale)


def non_negative_float(name: str, value: Any) -> float:
    """A finite Python float >= 0 (ValueError otherwise)."""
    number = as_float(name, value)
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be >= 0 and finite, got {number}")
    return number


def dropout_rate(value: Any) -> float:
    """A Python float in [0, 1) (ValueError otherwise)."""
    rate = non_negative_float("dropout_rate", value)
    if rate >= 1:
        raise ValueError(f"dropout_rate must be in [0, 1), got {rate}")
    return rate


def array(name: str, value: Any, dtype: Any = None) -> jax.Array:
    """``value`` as an array; TypeError for None, strings, ragged lists and other objects."""
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be an array, got {describe(value)}")
    try:
        return jnp.asarray(value, dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {describe(value)}: {error}") from error


def scalar(name: str, x: Any, dtype: Any, check: Callable[[str, Any], float]) -> jax.Array:
    """A 0-d array of ``dtype`` from a number that passes ``check``, or from a traced scalar."""
    if not isinstance(x, jax.core.Tracer):
        return jnp.asarray(check(name, x), dtype)
    if x.shape != ():
        raise ValueError(f"{name} must be a scalar, got shape {x.shape}")
    return real_array(name, x).astype(dtype)


def float_dtype(name: str, value: Any) -> np.dtype:
    """``value`` as a real floating dtype; TypeError if it is not one."""
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a real floating dtype, got {describe(value)}") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be a real floating dtype, got {dtype}")
    return dtype


def real_array(name: str, value: Any) -> jax.Array:
    """``value`` as an array of a real floating dtype (TypeError for int, bool, complex)."""
    value = array(name, value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"{name} must have a real floating dtype, got {value.dtype} (shape {value.shape})"
        )
    return value


def at_least_f32(array: jax.Array) -> jax.Array:
    """``array`` in float32; a float64 array as it is."""
    return array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)


def broadcasts_to(name: str, shape: tuple, target_name: str, target: tuple) -> None:
    """Raises ValueError unless ``shape`` has the rank of ``target`` and broadcasts to it."""
    if len(shape) != len(target):
        raise ValueError(
            f"{name} of shape {shape} must have the rank of {target_name} {target} (size-1 axes "
            f"allowed): reshape it, for instance a key mask (batch, keys) to (batch, 1, 1, keys)"
        )
    if any(a not in (1, b) for a, b in zip(shape, target, strict=True)):
        raise ValueError(f"{name} of shape {shape} does not broadcast to {target_name} {target}")


def heads_last_dim(q: jax.Array, k: jax.Array) -> None:
    """Raises ValueError unless ``q (..., N, d)`` and ``k (..., M, d)`` differ only in length."""
    if q.ndim < 2 or k.ndim != q.ndim or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q of shape {q.shape} and k of shape {k.shape} must be (..., length, head_dim) with "
            f"equal leading axes and head_dim"
        )


def to_rank(name: str, x: jax.Array, shape: tuple) -> jax.Array:
    """``x`` with axes of size 1 in front, to the rank of ``shape``, to which it must broadcast."""
    axes = zip(x.shape[::-1], shape[::-1], strict=False)
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in axes):
        raise ValueError(f"{name} of shape {x.shape} does not broadcast to {shape}")
    return jax.lax.broadcast_to_rank(x, len(shape))


def random_key(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is one JAX random key, typed or raw."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not (shape == () if typed else dtype == jnp.uint32 and np.ndim(value) == 1):
        wrong = describe(value) if shape is None else f"an array of {dtype} and shape {shape}"
        raise TypeError(f"{name} must be one JAX random key, got {wrong}")


def validity(name: str, valid: Any, like: jax.Array) -> jax.Array:
    """``valid`` (bool or 0/1, broadcasting) as a bool array of the shape and sharding of ``like``.

    All True when None. Raises TypeError if it is not an array, ValueError if it does not broadcast.
    """
    every = jnp.ones_like(like, bool)
    if valid is None:
        return every
    valid = to_rank(name, array(name, valid), like.shape)
    return every & (valid if valid.dtype == bool else valid != 0)


def optional_validity(name: str, valid: Any, like: jax.Array) -> jax.Array | None:
    """As ``validity``, but None stays None, so that an unmasked call does no masking."""
    return None if valid is None else validity(name, valid, like)
