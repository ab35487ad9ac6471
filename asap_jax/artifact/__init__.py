"""``save`` and ``load``: one file holds one compiled model.

The file is an ``.npz`` archive of named arrays, with a digest of all of them. Its array ``header``
is UTF-8 JSON: the format, the library versions, the compiled state of every layer without its
arrays, a fingerprint of the teacher's parameters, and the paths of its weights if the file holds
them. The file never holds pickled objects.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from typing import Any

import flax
import jax
import numpy as np
from flax import nnx

from asap_jax import checks
from asap_jax import linen as aj_linen
from asap_jax import nnx as aj_nnx
from asap_jax.artifact import archive, packing, replacing, states, teacher_weights, teachers
from asap_jax.compiler.calibration import CompileResult
from asap_jax.records import CompiledState, group_by_path

FORMAT = 5
OLD_FORMATS = (4,)
"""Formats that are still read. Files of format 4 hold no weights."""
MAGIC = "asap_jax compiled model"
_FIELDS = dict(magic=str, format=int, versions=dict, framework=str, teacher=dict, layers=dict)


def save(path: str | os.PathLike, result: CompileResult, *, weights: bool = False) -> None:
    """Writes a compiled model's states to one file, atomically.

    Args:
      path: the file to write; no suffix is added. An existing file is replaced, with the same mode;
        a symbolic link stays, and its target is replaced.
      result: the result of ``compile``.
      weights: also store the model's variables, so that the file alone is enough to run it.
        Otherwise it holds the compiled layers only, and belongs to the teacher's variables.

    Raises:
      TypeError: not a CompileResult, or a state or a weight that a file cannot hold.
      ValueError: the result has states of other layers than its model.
      OSError: the file cannot be written; an existing file is then unchanged.
    """
    checks.instance("result", result, CompileResult, "a CompileResult")
    checks.instance("weights", weights, bool, "True or False")
    name = _file_name(path)
    teacher = result.variables if result.model is None else result.model
    arrays: dict[str, np.ndarray] = {}
    for layer, state in result.states.items():
        checks.instance(f"the state of layer {layer!r}", state, CompiledState, "a CompiledState")
        states.check_leaves(state)
    _check_layers(result)
    header = dict(
        magic=MAGIC,
        format=FORMAT,
        versions=dict(asap_jax=_version(), jax=jax.__version__, flax=flax.__version__),
        framework=teachers.framework(teacher),
        teacher=teachers.fingerprint(teacher),
        layers={layer: packing.pack(s, layer, arrays) for layer, s in result.states.items()},
        weights=teacher_weights.pack(teacher, arrays) if weights else None,
    )
    replacing.write(name, archive.pack(json.dumps(header).encode(), arrays))


def load(path: str | os.PathLike, *, like: Any = None) -> Any:
    """Reads a compiled model from a file and applies it to its teacher.

    Args:
      path: a file that ``save`` wrote.
      like: the teacher: its linen variables, or the nnx model. It is not changed. If the file holds
        weights, they replace those of ``like``, which must have the same paths, shapes and dtypes;
        linen models then need no ``like``.

    Returns:
      The variables with the ``"asap"`` collection, or a compiled copy of the nnx model.

    Raises:
      ValueError: not a file that ``save`` wrote, a damaged file, another format, or another
        teacher. The message names the layer or parameter and both shapes or settings.
      TypeError: ``like`` is neither linen variables nor an nnx model.
      OSError: the file cannot be read.
    """
    name, framework = _file_name(path), None if like is None else teachers.framework(like)
    with open(name, "rb") as file:
        data = file.read()
    try:
        return _load(data, like, framework)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _check_layers(result: CompileResult) -> None:
    """Raises ValueError unless the states are those of the layers of the compiled model."""
    if result.model is None:
        tree = dict(result.variables.get(aj_linen.STATE, {}))
        compiled = set(group_by_path(tree, CompiledState))
    else:
        layers = aj_nnx.sinkhorn_layers(result.model)
        compiled = {path for path, layer in layers.items() if layer.asap is not None}
    if set(result.states) != compiled or not compiled:
        raise ValueError(
            f"result has states of the layers {sorted(result.states)}, but its model has those of "
            f"{sorted(compiled)}"
        )


def _load(data: bytes, like: Any, framework: str | None) -> Any:
    """As ``load``, from the contents of the file; messages do not name the file."""
    header, entries = _read(data)
    if framework not in (None, header["framework"]):
        model = {"linen": "a linen model", "nnx": "an nnx model"}[header["framework"]]
        raise ValueError(f"compiled from {model}, like is {framework}")
    if framework is None and header["framework"] == "nnx":
        raise ValueError("compiled from an nnx model: give like, a model of the same shapes")
    loaded, weights = _contents(header, entries)
    if weights is not None:
        like = teacher_weights.onto(like, weights)
    elif like is None:
        raise ValueError("holds no weights (save(..., weights=True) stores them): give like")
    teachers.check_same_parameters(header["teacher"], teachers.fingerprint(like))
    if header["framework"] == "nnx":
        return _onto_nnx(like, loaded)
    present = group_by_path(dict(like.get(aj_linen.STATE, {}).items()), CompiledState)
    teachers.check_same_states(loaded, present)
    others = {
        name: tree for name, tree in like.items() if name not in (aj_linen.STATE, aj_linen.CAPTURE)
    }
    return {**others, aj_linen.STATE: aj_linen.state_tree(loaded)}


def _onto_nnx(model: nnx.Module, loaded: Mapping[str, CompiledState]) -> nnx.Module:
    """A copy of ``model``, compiled with states."""
    modules = aj_nnx.sinkhorn_layers(model)
    missing = [layer for layer in loaded if layer not in modules]
    if missing:
        raise ValueError(
            f"layers {missing} are not in the model; its Sinkhorn layers are {list(modules)}"
        )
    for layer, state in loaded.items():
        if modules[layer].spec != state.spec:
            raise ValueError(
                f"layer {layer!r} was compiled for {state.spec}, the model "
                f"has {modules[layer].spec}"
            )
    compiled_layers = {name: m.asap for name, m in modules.items() if m.asap is not None}
    present = {name: variable.get_value() for name, variable in compiled_layers.items()}
    teachers.check_same_states(loaded, present)
    compiled = nnx.clone(model)
    aj_nnx.attach(compiled, loaded)
    return compiled


def _read(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The checked header, and the raw entries by name.

    Raises:
      ValueError: the file is damaged, of another kind or format, or its header is malformed.
    """
    try:
        entries = archive.entries(data)
        header = json.loads(archive.header(entries).decode())
        known = header["magic"] == MAGIC
    except Exception as error:  # zip, NumPy and JSON raise different errors
        raise ValueError(f"not a complete asap_jax file ({error})") from error
    if not known:
        raise ValueError("not an asap_jax file")
    if header.get("format") not in (FORMAT, *OLD_FORMATS):
        versions = header.get("versions")
        version = versions.get("asap_jax") if isinstance(versions, dict) else "unknown"
        raise ValueError(
            f"format {header.get('format')} of asap_jax {version}, this version reads formats "
            f"{OLD_FORMATS[0]} to {FORMAT}: compile and save the model again"
        )
    if not archive.has_digest(entries):
        raise ValueError("not a complete asap_jax file (its contents do not match their digest)")
    if header["format"] in OLD_FORMATS:
        header.setdefault("weights", None)
    _check_header(header)
    return header, entries


def _check_header(header: dict[str, Any]) -> None:
    """Raises ValueError for a field of the header that is missing, unknown or malformed."""
    expected = {*_FIELDS, "weights"}
    if set(header) != expected:
        raise ValueError(f"header has the fields {sorted(header)}, expected {sorted(expected)}")
    for name, kind in _FIELDS.items():
        if type(header[name]) is not kind:
            wrong = checks.describe(header[name])
            raise ValueError(f"header field {name!r} must be a {kind.__name__}, got {wrong}")
    if not isinstance(header["weights"], dict | None):
        raise ValueError(f"header field 'weights' must be a dict or null, got {header['weights']}")
    checks.one_of("header field 'framework'", header["framework"], ("linen", "nnx"))
    if not header["layers"]:
        raise ValueError("header field 'layers' holds no layer")
    for name, value in header["teacher"].items():
        form = [type(x) for x in value] if isinstance(value, list) else None
        if form != [list, str, str] or not all(type(n) is int for n in value[0]):
            raise ValueError(f"header field 'teacher' has a malformed entry {name!r}")
    for name, value in header["versions"].items():
        if not isinstance(value, str):
            raise ValueError(f"header field 'versions' has a malformed entry {name!r}")


def _contents(
    header: Mapping[str, Any], entries: Mapping[str, bytes]
) -> tuple[dict[str, CompiledState], dict[str, jax.Array] | None]:
    """The states of all layers, each checked, and the weights or None.

    Raises:
      ValueError: a malformed state or weight, or an array that the header does not name.
    """
    used = {archive.HEADER, archive.DIGEST}

    def read(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        if name in used or name not in entries:
            raise ValueError(f"array {name!r} is missing or used twice")
        used.add(name)
        return archive.array(entries[name], dtype, shape)

    loaded = {
        layer: states.check(packing.unpack(tree, layer, read), layer)
        for layer, tree in header["layers"].items()
    }
    trees = header["weights"]
    weights = None if trees is None else teacher_weights.unpack(trees, read)
    if unused := sorted(set(entries) - used):
        raise ValueError(f"holds arrays that its header does not name: {unused[:3]}")
    return loaded, weights


def _file_name(path: Any) -> str:
    checks.instance("path", path, (str, bytes, os.PathLike), "a path")
    return os.fsdecode(path)


def _version() -> str:
    try:
        return importlib.metadata.version("asap_jax")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "uninstalled"
