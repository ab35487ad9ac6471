"""Whether a state from a file can run: its settings, and the shapes of its arrays together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks
from asap_jax.attention import functions
from asap_jax.compiler.fit import check_closures
from asap_jax.predictor import DualPair, MLPHead, Predictor
from asap_jax.records import CompiledState

LARGEST_HEAD_DIM = 4096  # that is tried where no array of the state has it as an axis


def check(state: Any, layer: str) -> CompiledState:
    """``state`` if a layer can run it.

    Raises:
      ValueError: it cannot; the message names the layer and the argument.
    """
    if not isinstance(state, CompiledState):
        wrong = checks.describe(state)
        raise ValueError(f"'layers': layer {layer!r} must be a CompiledState, got {wrong}")
    try:
        check_leaves(state)
        _check_settings(state)
        # Without a mark nothing says how many leading axes are those of a stack of layers.
        if state.mark is not None:
            _check_shapes(state)
    except Exception as error:  # tracing a layer with wrong arrays may raise different errors
        raise ValueError(f"layer {layer!r}: {error}") from error
    return state


def check_leaves(state: CompiledState) -> None:
    """Raises TypeError if a leaf of the state is not an array; the message names it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path).removeprefix(".")
        checks.instance(name, leaf, (jax.Array, np.ndarray), "an array")


def _check_settings(state: CompiledState) -> None:
    """Makes the checks of a call that need no tokens."""
    check_closures(state.closures)
    if state.probe != 0:
        raise ValueError(f"probe must be 0, got {state.probe}")
    if isinstance(state.closures, str) and state.closures == "none":
        pair = checks.instance("predictor", state.predictor, DualPair, "a DualPair")
        if state.ending != "teacher":
            raise ValueError(f"closures 'none' have no last closure, got ending={state.ending!r}")
        for side in ("query", "key"):
            own = getattr(pair, side)
            if own.side != side:
                raise ValueError(f"the {side} predictor of a DualPair has side={own.side!r}")
        return
    predictor = checks.instance("predictor", state.predictor, Predictor, "a Predictor")
    functions.compiled_plan(predictor, state.spec, state.closures, state.ending, "log")


def _check_shapes(state: CompiledState) -> None:
    """Traces one layer of the state on tokens that fit its arrays."""
    assert state.mark is not None
    stack = state.mark.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.predictor):
        if leaf.shape[: len(stack)] != stack:
            raise ValueError(
                f"predictor{jax.tree_util.keystr(path)} of shape {leaf.shape} has no leading axes "
                f"{stack}, those of mark"
            )
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[len(stack) :], x.dtype), state)
    predictors = [one.predictor]
    if isinstance(one.predictor, DualPair):
        predictors = [one.predictor.query, one.predictor.key]
    if not all(hasattr(f, "num_features") for p in predictors for f in p.features):
        return  # a family of the user's own may not say how many features it has
    heads = max(_num_heads(p) for p in predictors)
    length = max(2 if p.token_bias is None else p.token_bias.shape[-1] for p in predictors)
    head_dim = _head_dim(predictors[0])

    def run(tokens: jax.Array, predictor: Predictor | DualPair) -> Any:
        settings = dict(spec=state.spec, closures=state.closures, ending=state.ending)
        return functions.asap_attention(
            tokens, tokens, tokens, predictor=predictor, implementation="log", **settings
        )

    tokens = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32)
    jax.eval_shape(run, tokens, one.predictor)


def _coefficients(predictor: Predictor) -> Any:
    head = predictor.head
    return head.coefficients_in if isinstance(head, MLPHead) else head.coefficients


def _num_heads(predictor: Predictor) -> int:
    """The number of heads that per-head arrays have, 1 if there are none."""
    shape = _coefficients(predictor).shape
    return shape[0] if len(shape) > 1 else 1


def _head_dim(predictor: Predictor) -> int:
    """The head dimension for which the features are as many as the coefficients."""
    shape = _coefficients(predictor).shape
    for head_dim in _candidates(predictor):
        if sum(f.num_features(head_dim) for f in predictor.features) == shape[-1]:
            return head_dim
    raise ValueError(f"coefficients of shape {shape} do not fit the features of any head_dim")


def _candidates(predictor: Predictor) -> Iterator[int]:
    for leaf in jax.tree.leaves(predictor.features):
        if leaf.ndim:
            yield leaf.shape[-1]
    yield from range(1, LARGEST_HEAD_DIM + 1)
