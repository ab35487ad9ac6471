"""What predicting a dual costs by itself: moments and slices, beside softmax attention."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable

import jax.numpy as jnp

import asap_jax as aj
from train.bench import layer
from train.bench.measure import DENSE, Row, measure, tell
from train.runtime import machine

LENGTHS = (128, 512, 1024, 2048)


def prediction(predictor: aj.Predictor, query, key, value):
    """The predicted dual ``(batch, heads, N)`` from one layer's tokens in Flax's layout."""
    del value
    return aj.predict(predictor, jnp.swapaxes(query, 1, 2), jnp.swapaxes(key, 1, 2))


def rows_of(head_dim: int) -> dict[str, Callable]:
    """Dense softmax attention, and the prediction alone from moments and from slices."""
    attention = layer.methods(head_dim)
    rows = {name: attention[name] for name in DENSE}
    for name, predictor in layer.predictors(head_dim).items():
        if name != "closures alone":
            rows[f"prediction, {name}"] = functools.partial(prediction, predictor)
    return rows


def run(
    lengths: Iterable[int] = LENGTHS, *, rounds: int = 20, out: pathlib.Path | None = None
) -> list[Row]:
    """Prints the table and writes ``features.json`` and ``features.md`` into ``out``."""
    batch, heads, width = layer.SHAPE
    rows = []
    for length in lengths:
        shape = (batch, length, heads, width)
        rows += measure(f"N={length}", shape, rows_of(width), rounds=rounds)
    facts = {
        "shape": f"batch {batch}, {heads} heads, head_dim {width}, float32",
        "time": f"median and quartiles of {rounds} interleaved calls; ratio to the fastest dense "
        "softmax attention",
        **machine.facts(),
    }
    return tell(out, "features", "Predicting a dual", rows, facts)
