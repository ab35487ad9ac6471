"""``save`` and ``load``: one file holds one compiled model.

The file is an ``.npz`` archive of named arrays. Its array ``header`` is UTF-8 JSON: the format,
the library versions, the compiled state of every layer without its arrays, and a fingerprint of
the teacher's parameters. The file never holds pickled objects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.meta import unbox

from asap_jax import checks
from asap_jax import linen as aj_linen
from asap_jax import nnx as aj_nnx
from asap_jax.compiler.calibration import CompileResult
from asap_jax.compiler.fit import check_closures
from asap_jax.features import FAMILIES
from asap_jax.predictor import Correction, DualPair, LinearHead, MLPHead, Predictor
from asap_jax.predictor.row_mass import RowMass
from asap_jax.records import CompiledState, group_by_path
from asap_jax.spec import ENDINGS, SinkhornSpec

FORMAT = 3
MAGIC = "asap_jax compiled model"
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        SinkhornSpec, CompiledState, Correction, Predictor, DualPair, LinearHead, MLPHead, RowMass
    )
}  # fmt: skip
# Fields that older files lack, with their values there.
_LATER: dict[str, dict[str, Any]] = {
    "CompiledState": {"ending": "teacher"},
    "Predictor": {"row_mass": None},
}


def save(path: str | os.PathLike, result: CompileResult) -> None:
    """Writes a compiled model's states to one file, atomically.

    Args:
      path: the file to write; no suffix is added, and an existing file is replaced.
      result: the result of ``compile``.

    Raises:
      TypeError: not a CompileResult.
      OSError: the file cannot be written; an existing file is then unchanged.
    """
    checks.instance("result", result, CompileResult, "a CompileResult")
    name = _file_name(path)
    teacher = result.variables if result.model is None else result.model
    arrays: dict[str, Any] = {}
    header = dict(
        magic=MAGIC,
        format=FORMAT,
        versions=dict(asap_jax=_version(), jax=jax.__version__, flax=flax.__version__),
        framework=_framework(teacher),
        teacher=fingerprint(teacher),
        layers={layer: _pack(state, layer, arrays) for layer, state in result.states.items()},
    )
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    _write(name, buffer.getbuffer())


def load(path: str | os.PathLike, *, like: Any) -> Any:
    """Reads a compiled model from a file and applies it to its teacher.

    Args:
      path: a file that ``save`` wrote.
      like: the teacher: its linen variables, or the nnx model. It is not changed.

    Returns:
      The variables with the ``"asap"`` collection, or a compiled copy of the nnx model.

    Raises:
      ValueError: not a file that ``save`` wrote, a damaged file, another format, or another
        teacher. The message names the layer or parameter and both shapes or settings.
      TypeError: ``like`` is neither linen variables nor an nnx model.
      OSError: the file cannot be read.
    """
    header, arrays = _read(_file_name(path))
    framework = _framework(like)
    if header["framework"] != framework:
        raise ValueError(
            f"{path}: compiled from a {header['framework']} model, like is {framework}"
        )
    _check_same_teacher(header["teacher"], fingerprint(like), path)
    states = {layer: _state(tree, layer, arrays, path) for layer, tree in header["layers"].items()}
    if framework == "nnx":
        return _onto_nnx(like, states, path)
    present = group_by_path(dict(like.get(aj_linen.STATE, {}).items()), CompiledState)
    _check_same_states(states, present, path)
    others = {
        name: tree for name, tree in like.items() if name not in (aj_linen.STATE, aj_linen.CAPTURE)
    }
    return {**others, aj_linen.STATE: aj_linen.state_tree(states)}


def fingerprint(teacher: Any) -> dict[str, list]:
    """``{parameter path: [shape, dtype, sha256 of its bytes]}`` of a teacher.

    The parameters are the ``"params"`` of linen variables, or the ``nnx.Param`` of an nnx model.
    """
    if isinstance(teacher, nnx.Module):
        flat = [
            ("/".join(map(str, path)), variable.get_value())
            for path, variable in nnx.to_flat_state(nnx.state(teacher, nnx.Param))
        ]
    else:
        leaves = jax.tree_util.tree_flatten_with_path(unbox(teacher.get("params", {})))[0]
        flat = [("/".join(str(getattr(k, "key", k)) for k in path), leaf) for path, leaf in leaves]
    result = {}
    for name, leaf in flat:
        array = np.ascontiguousarray(np.asarray(leaf))
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        result[name] = [list(array.shape), str(array.dtype), digest]
    return result


def _onto_nnx(model: nnx.Module, states: Mapping[str, CompiledState], path: Any) -> nnx.Module:
    """A copy of ``model``, compiled with ``states``."""
    modules = aj_nnx.sinkhorn_layers(model)
    missing = [layer for layer in states if layer not in modules]
    if missing:
        raise ValueError(
            f"{path}: layers {missing} are not in the model; its Sinkhorn layers "
            f"are {list(modules)}"
        )
    for layer, state in states.items():
        if modules[layer].spec != state.spec:
            raise ValueError(
                f"{path}: layer {layer!r} was compiled for {state.spec}, the model "
                f"has {modules[layer].spec}"
            )
    compiled_layers = {name: m.asap for name, m in modules.items() if m.asap is not None}
    present = {name: variable.get_value() for name, variable in compiled_layers.items()}
    _check_same_states(states, present, path)
    compiled = nnx.clone(model)
    aj_nnx.attach(compiled, states)
    return compiled


def _check_same_teacher(saved: Mapping, present: Mapping, path: Any) -> None:
    """Raises ValueError if parameters differ; the message names up to five."""
    problems = []
    for name in sorted({*saved, *present}):
        old, new = saved.get(name), present.get(name)
        if new is None:
            problems.append(f"{name}: missing in the model (saved with shape {saved[name][0]})")
        elif old is None:
            problems.append(f"{name}: not in the file (model has shape {new[0]})")
        elif old[:2] != new[:2]:
            problems.append(f"{name}: saved {old[1]}{old[0]}, model {new[1]}{new[0]}")
        elif old != new:
            problems.append(f"{name}: same shape {old[0]}, other values")
    if problems:
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        lines = "\n  ".join(["parameters differ:", *problems[:5], *more])
        raise ValueError(f"{path}: compiled from another teacher; {lines}")


def _check_same_states(saved: Mapping, present: Mapping, path: Any) -> None:
    """Raises ValueError if ``like`` already holds states that differ in shapes or settings."""
    for layer, old in present.items():
        if layer not in saved:
            raise ValueError(
                f"{path}: holds no state for layer {layer!r}, which like has; it has {list(saved)}"
            )
        new_fields, old_fields = _described(saved[layer]), _described(old)
        for name in sorted({*new_fields, *old_fields}):
            new, present_value = (d.get(name, "absent") for d in (new_fields, old_fields))
            if new != present_value:
                raise ValueError(
                    f"{path}: layer {layer!r} {name}: saved {new}, like has {present_value}"
                )


def _described(state: CompiledState) -> dict[str, str]:
    """The dtype and shape of every array of a state, and its settings, for a message."""
    leaves = jax.tree_util.tree_leaves_with_path(dataclasses.replace(state, mark=None))
    arrays = {
        f"field {jax.tree_util.keystr(name)}": f"{leaf.dtype}{list(leaf.shape)}"
        for name, leaf in leaves
    }
    settings = {name: repr(getattr(state, name)) for name in ("spec", "closures", "ending")}
    return {**arrays, **settings}


def _pack(value: Any, name: str, arrays: dict) -> Any:
    """``value``, a tree of known dataclasses, as JSON; its arrays go to ``arrays`` by path."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return {"tuple": [_pack(v, f"{name}/{i}", arrays) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": {k: _pack(v, f"{name}/{k}", arrays) for k, v in value.items()}}
    if dataclasses.is_dataclass(value):
        kind = getattr(value, "family", type(value).__name__)
        if kind not in _TYPES and kind not in FAMILIES:
            raise TypeError(f"{name}: {type(value).__name__} is not registered and cannot be saved")
        fields = {
            f.name: _pack(getattr(value, f.name), f"{name}/{f.name}", arrays)
            for f in dataclasses.fields(value)
        }
        return {"type": kind, "fields": fields}
    array = np.asarray(value)
    arrays[name] = array.view(np.uint8) if array.dtype.kind == "V" and array.ndim else array
    return {"array": name, "shape": list(array.shape), "dtype": str(array.dtype)}


def _state(tree: Any, layer: str, arrays: Mapping, path: Any) -> CompiledState:
    """The state of one layer from its entry in the header, with its parts checked together."""
    try:
        state = _unpack(tree, layer, arrays)
        if not isinstance(state, CompiledState) or not isinstance(state.spec, SinkhornSpec):
            raise ValueError("holds no compiled state")
        check_closures(state.closures)
        checks.one_of("ending", state.ending, ENDINGS)
        if state.ending == "row" and state.closures in ("one_sided", "none"):
            raise ValueError(f"closures {state.closures!r} do not end on rows")
        both = state.predictor
        if not isinstance(both, DualPair if state.closures == "none" else Predictor):
            raise ValueError(f"closures {state.closures!r} do not go with its predictor")
        for predictor in (both.query, both.key) if isinstance(both, DualPair) else (both,):
            if isinstance(predictor.head, MLPHead):
                continue
            shape = predictor.coefficients.shape
            banks = [getattr(family, "directions", None) for family in predictor.features]
            shapes = [bank.shape for bank in banks if bank is not None]
            if len(shapes) == len(banks) and sum(s[-2] for s in shapes) != shape[-1]:
                raise ValueError(
                    f"coefficients of shape {shape} do not fit directions of shapes {shapes}"
                )
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: layer {layer!r}: {error}") from error
    return state


def _unpack(tree: Any, name: str, arrays: Mapping) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    if "tuple" in tree:
        return tuple(_unpack(v, f"{name}/{i}", arrays) for i, v in enumerate(tree["tuple"]))
    if "dict" in tree:
        return {k: _unpack(v, f"{name}/{k}", arrays) for k, v in tree["dict"].items()}
    if "array" in tree:
        if tree["array"] not in arrays:
            raise ValueError(f"{name}: array missing from the file")
        array = arrays[tree["array"]]
        dtype = jnp.dtype(tree["dtype"])
        if array.dtype == np.uint8 and dtype.kind == "V":
            array = array.view(dtype)
        if array.dtype != dtype:
            raise ValueError(f"{name}: header says {dtype}, the file holds {array.dtype}")
        if list(array.shape) != tree["shape"]:
            raise ValueError(
                f"{name}: header says shape {tree['shape']}, the file holds {list(array.shape)}"
            )
        if not np.isfinite(np.asarray(array, np.float64)).all():
            raise ValueError(f"{name}: holds a value that is not finite")
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(f"{name}: is {dtype}; enable jax_enable_x64 to load it unrounded")
        return jnp.asarray(array)
    kind = _TYPES.get(tree["type"]) or FAMILIES.get(tree["type"])
    if kind is None:
        raise ValueError(
            f"{name}: unknown type {tree['type']!r}; register its feature family "
            f"before loading (known: {sorted([*_TYPES, *FAMILIES])})"
        )
    known = {f.name for f in dataclasses.fields(kind)}
    fields = {**_LATER.get(kind.__name__, {}), **tree["fields"]}
    if known != set(fields):
        raise ValueError(
            f"{name}: fields {sorted(tree['fields'])} do not fit "
            f"{kind.__name__} with {sorted(known)}"
        )
    return kind(**{k: _unpack(v, f"{name}/{k}", arrays) for k, v in fields.items()})


def _read(path: str) -> tuple[dict, dict]:
    """Header and arrays; ValueError if the file is damaged or has another format."""
    with open(path, "rb") as file:
        data = io.BytesIO(file.read())
    try:
        with np.load(data, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(bytes(arrays.pop("header")).decode())
        known = header["magic"] == MAGIC
    except Exception as error:  # zip, zlib, NumPy and JSON raise different errors
        # NumPy's message suggests allow_pickle=True, which is unsafe and would not help.
        reason = "not an archive" if "pickle" in str(error) else error
        raise ValueError(f"{path}: not a complete asap_jax file ({reason})") from error
    if not known:
        raise ValueError(f"{path}: not an asap_jax file")
    kinds = dict(format=int, versions=dict, framework=str, teacher=dict, layers=dict)
    wrong = [name for name, kind in kinds.items() if not isinstance(header.get(name), kind)]
    if wrong:
        raise ValueError(f"{path}: header lacks {wrong}")
    if header["format"] != FORMAT:
        raise ValueError(
            f"{path}: format {header['format']} of asap_jax "
            f"{header['versions'].get('asap_jax')}, this version reads format {FORMAT}"
        )
    return header, arrays


def _file_name(path: Any) -> str:
    checks.instance("path", path, (str, bytes, os.PathLike), "a path")
    return os.fsdecode(path)


def _write(path: str, data: memoryview) -> None:
    """Writes a new file and renames it to ``path``, so that ``path`` is never half written."""
    temporary = pathlib.Path(f"{path}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _framework(teacher: Any) -> str:
    if isinstance(teacher, nnx.Module):
        return "nnx"
    if isinstance(teacher, Mapping):
        return "linen"
    raise TypeError(f"like must be linen variables or an nnx.Module, got {type(teacher).__name__}")


def _version() -> str:
    try:
        return importlib.metadata.version("asap_jax")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "uninstalled"
