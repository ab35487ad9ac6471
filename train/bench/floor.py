"""Where a layer's time goes: the part that no layer can save, and what each operator adds.

The floor is two matrix products, queries times keys and weights times values, computed for as many
heads at a time as in our own layers. A second row adds the exponential of every entry. The rest of
a layer's time is closures (products of a kernel and a vector) and the prediction.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from asap_jax.solvers import batching
from train.bench import features, layer
from train.bench.measure import SHAPE_FACT, Row, measure, report, sweep_shape

LENGTHS = (512, 1000, 2000)
PRODUCTS = "two products"
COMPARED = (
    "softmax, softmax_attention",
    layer.ONE_CALL,
    "ASAP n=1, closures alone",
    "ASAP n=1, moments",
    "ASAP n=2, closures alone",
    "ASAP n=2, moments",
    "Sinkhorn S=2",
    "Sinkhorn S=10",
    "Sinkhorn S=20",
)


def products(function: Callable, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """``function(query key') value``, a few heads at a time, in Flax's layout."""
    q, k, v = (jnp.swapaxes(x, -2, -3) for x in (query, key, value))
    lead = q.shape[:-2]

    def part(q, k, v):
        scores = jnp.einsum("...nd,...md->...nm", q, k)
        return jnp.einsum("...nm,...md->...nd", function(scores), v)

    limit = batching.ELEMENTS.get(jax.default_backend())
    step = batching.group_sizes(lead, q.shape[-2] * k.shape[-2], limit)
    return jnp.swapaxes(batching.map_groups(jax.checkpoint(part), (q, k, v), lead, step), -2, -3)


def rows_of(head_dim: int) -> dict[str, Callable]:
    """Row names to functions of query, key and value."""
    methods = layer.methods(head_dim)
    rows = {
        PRODUCTS: functools.partial(products, lambda scores: scores),
        "two products, exponentials": functools.partial(products, lambda s: jnp.exp(s / 8)),
        **{name: methods[name] for name in COMPARED},
    }
    predictor = layer.predictors(head_dim)["moments"]
    return rows | {"prediction, moments": functools.partial(features.prediction, predictor)}


def run(
    lengths: Iterable[int] = LENGTHS, *, rounds: int = 20, out: pathlib.Path | None = None
) -> list[Row]:
    """Prints the table and writes ``floor.json`` and ``floor.md`` into ``out``."""
    rows = []
    for length in lengths:
        shape = sweep_shape(length)
        rows += measure(f"N={length}", shape, rows_of(shape[-1]), rounds=rounds, base=(PRODUCTS,))
    time = f"median and quartiles of {rounds} interleaved calls; ratio to the two products"
    facts = {**SHAPE_FACT, "time": time}
    report("Where a layer's time goes", rows, facts).print_and_write(out, "floor")
    return rows
