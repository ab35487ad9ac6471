"""Times only the prediction of a dual, from moments and from slices, next to softmax attention."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

import asap_jax as aj
from train.bench import layer
from train.bench.measure import DENSE, SHAPE_FACT, Row, measure, report, sweep_shape

LENGTHS = (128, 512, 1024, 2048)


def prediction(
    predictor: aj.Predictor, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """The predicted dual ``(batch, heads, N)`` from one layer's tokens in Flax's layout."""
    del value
    return aj.predict(predictor, jnp.swapaxes(query, 1, 2), jnp.swapaxes(key, 1, 2))


def rows_of(head_dim: int) -> dict[str, Callable]:
    """The rows: dense softmax attention, and only the prediction from moments and from slices."""
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
    rows = []
    for length in lengths:
        shape = sweep_shape(length)
        rows += measure(f"N={length}", shape, rows_of(shape[-1]), rounds=rounds)
    time = (
        f"median and quartiles of {rounds} interleaved calls; ratio to the fastest dense "
        f"softmax attention"
    )
    facts = {**SHAPE_FACT, "time": time}
    report("Predicting a dual", rows, facts).print_and_write(out, "features")
    return rows
