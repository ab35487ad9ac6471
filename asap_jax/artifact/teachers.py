"""Whether a file belongs to a teacher: its parameters, and states that it already has."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core.meta import unbox

from asap_jax.records import CompiledState


def framework(teacher: Any) -> str:
    """``"nnx"`` or ``"linen"``; TypeError for anything that is not a teacher."""
    if isinstance(teacher, nnx.Module):
        return "nnx"
    if isinstance(teacher, nnx.State):  # a Mapping too
        raise TypeError("like must be an nnx.Module or linen variables, got an nnx.State")
    if isinstance(teacher, Mapping):
        return "linen"
    raise TypeError(f"like must be linen variables or an nnx.Module, got {type(teacher).__name__}")


def fingerprint(teacher: Any) -> dict[str, list]:
    """``{parameter path: [shape, dtype, sha256 of its bytes]}`` of a teacher.

    The parameters are the ``"params"`` of linen variables, or the ``nnx.Param`` of an nnx model.

    Raises:
      ValueError: two parameters of one path, because of a "/" in a name.
    """
    if isinstance(teacher, nnx.Module):
        flat = [
            ("/".join(map(str, path)), variable.get_value())
            for path, variable in nnx.to_flat_state(nnx.state(teacher, nnx.Param))
        ]
    else:
        leaves = jax.tree_util.tree_flatten_with_path(unbox(teacher.get("params", {})))[0]
        flat = [("/".join(str(getattr(k, "key", k)) for k in path), leaf) for path, leaf in leaves]
    result: dict[str, list] = {}
    for name, leaf in flat:
        if name in result:
            raise ValueError(f"two parameters have the path {name!r}: rename one of them")
        array = np.asarray(leaf)
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        result[name] = [list(array.shape), str(array.dtype), digest]
    return result


def check_same_parameters(saved: Mapping, present: Mapping) -> None:
    """Raises ValueError if two fingerprints differ; the message names up to five parameters."""
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
        raise ValueError(f"compiled from another teacher; {lines}")


def check_same_states(saved: Mapping, present: Mapping) -> None:
    """Raises ValueError if a state that ``like`` already has differs in shapes or settings."""
    for layer, old in present.items():
        if layer not in saved:
            raise ValueError(
                f"holds no state for layer {layer!r}, which like has; it has {list(saved)}"
            )
        new_fields, old_fields = _described(saved[layer]), _described(old)
        for name in sorted({*new_fields, *old_fields}):
            new, present_value = (d.get(name, "absent") for d in (new_fields, old_fields))
            if new != present_value:
                raise ValueError(f"layer {layer!r} {name}: saved {new}, like has {present_value}")


def _described(state: CompiledState) -> dict[str, str]:
    """The dtype and shape of every array of a state, and its settings, for a message.

    Calibration statistics are left out: states of older files have none.
    """
    leaves = jax.tree_util.tree_leaves_with_path(dataclasses.replace(state, mark=None))
    named = {jax.tree_util.keystr(name): leaf for name, leaf in leaves}
    arrays = {
        f"field {name}": f"{leaf.dtype}{list(leaf.shape)}"
        for name, leaf in named.items()
        if ".statistics" not in name
    }
    settings = {name: repr(getattr(state, name)) for name in ("spec", "closures", "ending")}
    return {**arrays, **settings}
