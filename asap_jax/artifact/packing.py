"""Compiled states as JSON and named arrays, and back.

A node of the JSON tree is null, a string, a bool, a number, or a dict of one of the forms
``{"tuple": [...]}``, ``{"dict": {...}}``, ``{"type": name, "fields": {...}}`` and
``{"array": name, "shape": [...], "dtype": ...}``.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks
from asap_jax.features import FAMILIES
from asap_jax.predictor import Correction, DualPair, LinearHead, MLPHead, Predictor
from asap_jax.predictor.row_mass import RowMass
from asap_jax.records import CompiledState
from asap_jax.spec import SinkhornSpec

Read = Callable[[str, np.dtype, tuple[int, ...]], np.ndarray]
TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        SinkhornSpec, CompiledState, Correction, Predictor, DualPair, LinearHead, MLPHead, RowMass
    )
}  # fmt: skip
_FORMS = ({"tuple"}, {"dict"}, {"type", "fields"}, {"array", "shape", "dtype"})


def pack(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """``value``, a tree of known dataclasses, as a JSON tree; its arrays go to ``arrays`` by path.

    Raises:
      TypeError: a value that a file cannot hold; ValueError: two arrays of one path.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return {"tuple": [pack(v, f"{name}/{i}", arrays) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": {k: pack(v, f"{name}/{k}", arrays) for k, v in value.items()}}
    if dataclasses.is_dataclass(value):
        kind = getattr(value, "family", type(value).__name__)
        if kind not in TYPES and kind not in FAMILIES:
            raise TypeError(f"{name}: {type(value).__name__} is not registered and cannot be saved")
        fields = {
            f.name: pack(getattr(value, f.name), f"{name}/{f.name}", arrays)
            for f in dataclasses.fields(value)
        }
        return {"type": kind, "fields": fields}
    array = np.asarray(value)
    _check_numbers(array.dtype, name)
    if name in arrays:
        raise ValueError(f"two arrays are named {name!r}: a key has a '/', rename it")
    node = {"array": name, "shape": list(array.shape), "dtype": str(array.dtype)}
    # NumPy's file format does not know bfloat16.
    arrays[name] = np.frombuffer(array.tobytes(), np.uint8) if array.dtype.kind == "V" else array
    return node


def unpack(tree: Any, name: str, read: Read) -> Any:
    """The value of a JSON tree.

    Args:
      tree: from ``pack``, not trusted.
      name: path of the value, for messages.
      read: ``read(name, dtype, shape)`` gives the array of that name.

    Raises:
      ValueError: a malformed tree or array; the message names the path.
    """
    if isinstance(tree, float) and not math.isfinite(tree):
        raise ValueError(f"{name}: {tree} is not finite")
    if tree is None or isinstance(tree, (str, bool, int, float)):
        return tree
    if not isinstance(tree, dict) or set(tree) not in _FORMS:
        found = f"keys {sorted(tree)}" if isinstance(tree, dict) else type(tree).__name__
        raise ValueError(f"{name}: expected a value, a tuple, a dict, a type or an array: {found}")
    if "tuple" in tree:
        return tuple(
            unpack(v, f"{name}/{i}", read) for i, v in enumerate(_part(tree, "tuple", list, name))
        )
    if "dict" in tree:
        items = _part(tree, "dict", dict, name).items()
        return {k: unpack(v, f"{name}/{k}", read) for k, v in items}
    if "array" in tree:
        result = array(tree, name, read)
        if not np.isfinite(np.asarray(result, np.float64)).all():
            raise ValueError(f"{name}: holds a value that is not finite")
        return result
    return _object(_part(tree, "type", str, name), _part(tree, "fields", dict, name), name, read)


def _object(type_name: str, trees: dict, name: str, read: Read) -> Any:
    """The dataclass of a name, with its fields checked against their annotations."""
    kind = TYPES.get(type_name) or FAMILIES.get(type_name)
    if kind is None:
        raise ValueError(
            f"{name}: unknown type {type_name!r}; register its feature family "
            f"before loading (known: {sorted([*TYPES, *FAMILIES])})"
        )
    known = {f.name for f in dataclasses.fields(kind)}
    if known != set(trees):
        raise ValueError(
            f"{name}: fields {sorted(trees)} do not fit {kind.__name__} with {sorted(known)}"
        )
    fields = {field: unpack(tree, f"{name}/{field}", read) for field, tree in trees.items()}
    for field, hint in _hints(kind).items():
        if field in fields and not _fits(fields[field], hint):
            raise ValueError(
                f"{name}/{field}: must be {getattr(hint, '__name__', hint)}, got "
                f"{checks.describe(fields[field])}"
            )
    try:
        return kind(**fields)
    except Exception as error:  # a registered family may raise any
        raise ValueError(f"{name}: {error}") from error


def array(tree: Any, name: str, read: Read) -> jax.Array:
    """The array of a JSON tree of that form; ValueError if it is malformed."""
    if not isinstance(tree, dict) or set(tree) != {"array", "shape", "dtype"}:
        raise ValueError(f"{name}: expected an array, got {checks.describe(tree)}")
    shape = _part(tree, "shape", list, name)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{name}: 'shape' must be sizes, got {shape}")
    try:
        dtype = jnp.dtype(_part(tree, "dtype", str, name))
        _check_numbers(dtype, name)
    except TypeError as error:
        raise ValueError(f"{name}: 'dtype' {tree['dtype']!r} is not known") from error
    as_bytes = dtype.kind == "V"
    held_dtype, held_shape = dtype, tuple(shape)
    if as_bytes:
        held_dtype, held_shape = np.dtype(np.uint8), (math.prod(shape) * dtype.itemsize,)
    try:
        held = read(_part(tree, "array", str, name), held_dtype, held_shape)
    except Exception as error:  # NumPy's reader raises different errors
        raise ValueError(f"{name}: {error}") from error
    if as_bytes:
        held = held.view(dtype).reshape(shape)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{name}: is {dtype}; enable jax_enable_x64 to load it unrounded")
    return jnp.asarray(held)


def _check_numbers(dtype: np.dtype, name: str) -> None:
    if not (dtype.kind in "biuf" or jnp.issubdtype(dtype, jnp.floating)):
        raise TypeError(f"{name}: an array of {dtype} cannot be saved")


def _part(tree: dict, key: str, kind: type, name: str) -> Any:
    if not isinstance(tree[key], kind):
        wrong = checks.describe(tree[key])
        raise ValueError(f"{name}: {key!r} must be a {kind.__name__}, got {wrong}")
    return tree[key]


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError:  # a registered family whose annotations are not importable
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation; annotations of other forms fit everything."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, option) for option in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type):
        return True
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)
