"""Temporary memory and time of forward and gradient, compared with an unrolled loop."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp

import asap_jax as aj
from train.bench.measure import Row, measure, report

SHAPE = (2, 256, 8, 32)  # batch, length, heads, head_dim


def unrolled(query: jax.Array, key: jax.Array, value: jax.Array, *, num_steps: int) -> jax.Array:
    """Sinkhorn attention as a plain unrolled loop without rematerialisation, for comparison."""
    s = jnp.einsum("bnhd,bmhd->bhnm", query, key) / query.shape[-1] ** 0.5
    for step in range(num_steps):
        s = jax.nn.log_softmax(s, axis=-1 if step % 2 == 0 else -2)
    return jnp.einsum("bhnm,bmhd->bnhd", jnp.exp(s), value)


def run(
    num_steps: int = 20,
    *,
    shape: tuple[int, int, int, int] = SHAPE,
    rounds: int = 10,
    out: pathlib.Path | None = None,
) -> list[Row]:
    """Prints the table and writes ``gradient-memory.json`` and ``.md`` into ``out``."""
    spec = aj.SinkhornSpec(num_steps)
    operators = {
        "sinkhorn_attention": functools.partial(aj.sinkhorn_attention, spec=spec),
        "unrolled loop": functools.partial(unrolled, num_steps=num_steps),
    }
    rows = []
    for name, gradient in (("forward", False), ("value and gradient", True)):
        rows += measure(name, shape, operators, rounds=rounds, gradient=gradient)
    size = "S={}, batch {}, {} tokens, {} heads, head_dim {}, float32".format(num_steps, *shape)
    time = f"median and quartiles of {rounds} interleaved calls; ratio to the faster row"
    facts = {"shape": size, "time": time}
    report("Memory of the gradient", rows, facts).print_and_write(out, "gradient-memory")
    return rows
