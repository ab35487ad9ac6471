"""Time of one attention layer: softmax in several forms, Sinkhorn budgets, compiled layers.

All rows of one shape run interleaved in one process. The ratio of a row is its time over that of
the fastest *dense* softmax form at the same shape. Inputs are Gaussian, and scores have standard
deviation 1 unless a shape says otherwise. The compiled rows have constant coefficients, which cost
as much as fitted ones. A row that needs more than 12 GiB of memory is not run.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable

import flax.struct
import jax
import jax.numpy as jnp

import asap_jax as aj
from train.bench import layer_plot
from train.bench.measure import DENSE, SHAPE_FACT, Row, measure, report, sweep_shape, table

LENGTHS = (128, 512, 1000, 2000)
NAMED = {"text": (32, 128, 8, 32), "vit": (64, 197, 8, 64), "imdb": (32, 512, 8, 32)}
"""Layers of the paper's experiments: batch, length, heads, head_dim."""
NAMED_ROUNDS = 3
SHARP = 512, 12.0  # length, standard deviation of the scores
SLICES = 32
ESP_LENGTH = 128  # largest length of the ESP rows; `bench esp-resources` has longer ones


def softmax_plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention with ``jax.nn.softmax``."""
    scores = jnp.einsum("bnhd,bmhd->bhnm", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores, -1), value)


ONE_CALL = "row ending n=1, moments"
"""Row name of one closure that ends on rows: softmax attention with a predicted bias."""


def softmax_late(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention that divides after the product with the values."""
    scores = jnp.einsum("bnhd,bmhd->bhnm", query, key) / query.shape[-1] ** 0.5
    mass = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    mixed = jnp.einsum("bhnm,bmhd->bhnd", mass, value) / mass.sum(-1, keepdims=True)
    return jnp.swapaxes(mixed, 1, 2)


def methods(head_dim: int, length: int | None = None) -> dict[str, Callable]:
    """Row names to attention functions of query, key and value; ESP rows for short lengths only."""
    spec = lambda steps: aj.SinkhornSpec(num_steps=steps)
    sinkhorn = lambda steps, how: functools.partial(
        aj.sinkhorn_attention, spec=spec(steps), implementation=how
    )
    rows = dict(
        zip(DENSE, (softmax_plain, softmax_late, jax.nn.dot_product_attention), strict=True)
    )
    rows["softmax, softmax_attention"] = aj.softmax_attention
    rows |= {f"Sinkhorn S={steps}": sinkhorn(steps, "auto") for steps in (2, 3, 4, 5, 10, 15, 20)}
    rows |= {f"Sinkhorn S={steps}, log domain": sinkhorn(steps, "log") for steps in (10, 20)}
    families = predictors(head_dim)
    rows[ONE_CALL] = functools.partial(
        aj.asap_attention,
        predictor=families["moments"].replace(side="key"),
        spec=spec(10),
        closures=1,
        ending="row",
    )
    for closures in (1, 2, 3):
        for name, predictor in families.items():
            # n closures end on columns: from the query side for odd n, the key side for even n.
            rows[f"ASAP n={closures}, {name}"] = functools.partial(
                aj.asap_attention,
                predictor=predictor.replace(side="query" if closures % 2 else "key"),
                spec=spec(10),
                closures=closures,
            )
    if length is not None and length <= ESP_LENGTH:
        rows["ESP, soft"] = functools.partial(aj.esp_attention, mode="soft")
        rows["ESP, hard"] = functools.partial(aj.esp_attention, mode="hard")
    return rows


@flax.struct.dataclass
class ZeroFeature:
    """A feature family with one column of zeros, to time closures without a prediction."""

    def num_features(self, head_dim: int) -> int:
        """One column."""
        return 1

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None):
        """Zeros ``(..., N, 1)``."""
        return jnp.zeros_like(q[..., :1])


def predictors(head_dim: int) -> dict[str, aj.Predictor]:
    """Predictors for closures alone (a zero dual), from moments and from slices."""
    moments = aj.Moments()
    bank = aj.slice_directions(0, SLICES, head_dim)
    families = {
        "closures alone": (ZeroFeature(), jnp.zeros(1)),
        "moments": (moments, jnp.full(moments.num_features(head_dim), 1e-3)),
        f"{SLICES} slices": (aj.SlicedPotentials(bank), jnp.full(SLICES, 1 / SLICES)),
    }
    return {
        name: aj.Predictor((family,), aj.LinearHead(coefficients))
        for name, (family, coefficients) in families.items()
    }


def run(
    lengths: Iterable[int] = LENGTHS,
    *,
    shapes: Iterable[str] = (*NAMED, "sharp"),
    rounds: int = 10,
    out: pathlib.Path | None = None,
) -> list[Row]:
    """Prints a table for each shape and writes them as JSON and Markdown, with a plot.

    Args:
      lengths: token counts of the sweep at batch 1, 8 heads, head_dim 64.
      shapes: further shapes: names in ``NAMED``, and ``"sharp"`` for 512 tokens with scores of
        standard deviation 12.
      rounds: timed calls of each row of the sweep; the named shapes have at most ``NAMED_ROUNDS``.
      out: folder for ``layer.json``, ``layer.md`` and ``layer.png``; None writes nothing.
    """
    rows = []

    def add(name, shape, rounds, sharpness=1.0):
        measured = measure(
            name, shape, methods(shape[-1], shape[1]), rounds=rounds, sharpness=sharpness
        )
        rows.extend(measured)
        print(table(measured).markdown(), flush=True)

    for length in lengths:
        add(f"N={length}", sweep_shape(length), rounds)
    for name in shapes:
        if name == "sharp":
            length, spread = SHARP
            add(f"N={length}, sharp", sweep_shape(length), rounds, spread)
        else:
            add(name, NAMED[name], min(rounds, NAMED_ROUNDS))
    size = "batch {}, {} tokens, {} heads, head_dim {}"
    facts = {
        **SHAPE_FACT,
        **{name: size.format(*NAMED[name]) for name in shapes if name in NAMED},
        "sharp": f"scores of standard deviation {SHARP[1]:g}; elsewhere 1",
        "time": f"median and quartiles of {rounds} interleaved calls, {min(rounds, NAMED_ROUNDS)} "
        "of the named shapes; ratio to the fastest dense softmax form",
    }
    whole = report("One attention layer", rows, facts)
    print(whole.facts_text())
    if out is not None:
        whole.write(out, "layer")
        layer_plot.draw(rows, lengths, out / "layer.png")
    return rows
