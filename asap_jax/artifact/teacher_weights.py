"""A teacher's weights in a file: all its variables except the states of compiled layers.

Random keys of nnx models are left out, since a model of the same shapes has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.core.meta import unbox

from asap_jax import checks
from asap_jax import linen as aj_linen
from asap_jax import nnx as aj_nnx
from asap_jax.artifact import packing

_OWN = (aj_linen.STATE, aj_linen.CAPTURE)


def pack(teacher: Any, arrays: dict) -> dict[str, Any]:
    """The JSON trees of a teacher's weights by path; the arrays themselves go to ``arrays``.

    Raises:
      TypeError: a weight that a file cannot hold, such as a random key of linen.
      ValueError: two weights of one path, or a name with a "/".
    """
    names, leaves, _ = _flat(teacher)
    for name, leaf in zip(names, leaves, strict=True):
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            raise TypeError(f"weights/{name}: a random key cannot be saved")
    trees = zip(names, leaves, strict=True)
    return {name: packing.pack(leaf, f"weights/{name}", arrays) for name, leaf in trees}


def unpack(trees: Mapping[str, Any], read: packing.Read) -> dict[str, jax.Array]:
    """The weights by path; ValueError for a malformed tree."""
    return {name: packing.array(tree, f"weights/{name}", read) for name, tree in trees.items()}


def onto(like: Any, weights: Mapping[str, jax.Array]) -> Any:
    """``like`` with these weights: linen variables, or a copy of the nnx model.

    Without ``like``, linen variables of plain dicts.

    Raises:
      ValueError: other paths, shapes or dtypes than those of ``like``.
    """
    if like is None:
        return _nested(weights)
    names, leaves, structure = _flat(like)
    _check_same(weights, dict(zip(names, leaves, strict=True)))
    values = jax.tree.unflatten(structure, [weights[name] for name in names])
    if not isinstance(like, nnx.Module):
        return {**values, **{name: like[name] for name in _OWN if name in like}}
    model = nnx.clone(like)
    nnx.update(model, values)
    return model


def _flat(teacher: Any) -> tuple[list[str], list[Any], Any]:
    """The paths and the values of the weights, and the tree that holds the values."""
    tree: Any
    if isinstance(teacher, nnx.Module):
        left_out = nnx.Any(aj_nnx.AsapState, aj_nnx.AsapCapture, nnx.RngState)
        state = nnx.state(teacher, nnx.Not(left_out))
        tree, parts = state, [path for path, _ in nnx.to_flat_state(state)]
    else:
        tree = {name: value for name, value in teacher.items() if name not in _OWN}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(unbox(tree))]
        parts = [tuple(getattr(key, "key", key) for key in path) for path in paths]
    names = ["/".join(map(str, part)) for part in parts]
    wrong = [name for name, part in zip(names, parts, strict=True) if name.count("/") >= len(part)]
    if wrong or len(set(names)) < len(names):
        raise ValueError(f"the path {[*wrong, *names][0]!r} of a weight has a '/' in a name")
    return names, jax.tree.leaves(tree), jax.tree.structure(tree)


def _nested(weights: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The weights as nested dicts; ValueError if a path leads through another weight."""
    result: dict[str, Any] = {}
    for path, value in weights.items():
        *folders, name = path.split("/")
        node = result
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise ValueError(f"weights/{path}: lies below another weight")
        if name in node:
            raise ValueError(f"weights/{path}: has others below it")
        node[name] = value
    return result


def _check_same(weights: Mapping[str, jax.Array], present: Mapping[str, Any]) -> None:
    """Raises ValueError unless two sets of weights have the same paths, shapes and dtypes."""

    def described(tree: Mapping[str, Any], name: str) -> str:
        if name not in tree:
            return "no such weight"
        leaf = tree[name]
        if not hasattr(leaf, "dtype"):
            return checks.describe(leaf)
        return f"{leaf.dtype}{list(leaf.shape)}"

    for name in sorted({*weights, *present}):
        saved, own = described(weights, name), described(present, name)
        if saved != own:
            raise ValueError(f"weights/{name}: the file has {saved}, like has {own}")
