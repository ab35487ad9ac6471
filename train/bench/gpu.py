"""Checks every path on an accelerator and times it (``make gpu``).

It needs only JAX, Flax, optax and chex, and downloads nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

import asap_jax as aj
from train.bench import layer
from train.bench.measure import Row, measure, sweep_shape, table
from train.reporting.table import Report
from train.runtime import machine

SWEEP = (128, 500, 1000, 2000, 4000)
FUSED = (512, 2048, 4096)
WIDTH = 1024
IMPLEMENTATIONS = ("scaling", "streaming", "log")


@dataclasses.dataclass(frozen=True)
class Check:
    """Largest errors of one path: weights against float64 NumPy, and column sums against 1."""

    name: str
    precision: str
    weights_error: float
    column_error: float


def reference(query: jax.Array, key: jax.Array, num_steps: int) -> np.ndarray:
    """Sinkhorn weights ``(heads, N, N)`` of one example in float64 (paper, eq. sinkhorn)."""
    q, k = (np.asarray(x, np.float64).transpose(1, 0, 2) for x in (query, key))
    s = q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5
    for step in range(num_steps):
        axis = -1 if step % 2 == 0 else -2
        peak = s.max(axis, keepdims=True)
        s = s - peak - np.log(np.exp(s - peak).sum(axis, keepdims=True))
    return np.exp(s)


def checks(length: int = 512, heads: int = 2, width: int = 64, num_steps: int = 10) -> list[Check]:
    """Checks every implementation at default and highest matmul precision.

    Queries and keys have norm 8. The values are the identity, so the output of a head is its
    weights.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    q, k = (jax.random.normal(key, (length, heads, width)) for key in keys)
    q, k = (8 * x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jnp.broadcast_to(jnp.eye(length)[:, None], (length, heads, length))
    expected = reference(q, k, num_steps)
    results = []
    for precision in ("default", "highest"):
        for name in IMPLEMENTATIONS:
            with jax.default_matmul_precision(precision):
                attend = functools.partial(
                    aj.sinkhorn_attention, spec=aj.SinkhornSpec(num_steps), implementation=name
                )
                weights = np.asarray(jax.jit(attend)(q, k, v)).transpose(1, 0, 2)
            error = float(np.abs(weights - expected).max())
            columns = float(np.abs(weights.sum(-2, dtype=np.float64) - 1).max())
            results.append(Check(name, precision, error, columns))
    return results


def projected(function: Callable, shape: tuple[int, int, int, int]) -> Callable:
    """``function`` with the projections of a model of width 1024, as in the paper's timings."""
    _, _, heads, head_dim = shape
    keys = jax.random.split(jax.random.key(1), 4)
    inner = (heads, head_dim)
    into = [jax.random.normal(key, (WIDTH, *inner)) / WIDTH**0.5 for key in keys[:3]]
    back = jax.random.normal(keys[3], (*inner, WIDTH)) / (heads * head_dim) ** 0.5

    def attend(x):
        q, k, v = (jnp.einsum("bnw,whd->bnhd", x, w) for w in into)
        return jnp.einsum("bnhd,hdw->bnw", function(q, k, v), back)

    return attend


def run(
    lengths: Iterable[int] = SWEEP, *, minutes: float = 6.0, out: pathlib.Path | None = None
) -> list[Row]:
    """Prints checks and tables and writes ``gpu.json`` and ``gpu.md`` into ``out``.

    Args:
      lengths: token counts of the sweep.
      minutes: no further shape is started after this time.
      out: folder to write to; None writes nothing.
    """
    began = time.perf_counter()
    checked = checks()
    for check in checked:
        print(check, flush=True)
    rows = []
    shapes = {f"N={n}": sweep_shape(n) for n in lengths} | {"imdb": layer.NAMED["imdb"]}
    shapes |= {f"fused N={n}": sweep_shape(n) for n in FUSED}
    for name, shape in shapes.items():
        if time.perf_counter() - began > 60 * minutes:
            print(f"{name}: not run, {minutes} minutes are over")
            continue
        methods = {
            row: projected(function, shape) for row, function in layer.methods(shape[-1]).items()
        }
        measured = measure(name, (*shape[:2], WIDTH), methods, rounds=10, num_inputs=1)
        print(table(measured).markdown(), flush=True)
        rows += measured
    facts = {
        "checks": "; ".join(
            f"{c.name} at {c.precision} precision: weights within {c.weights_error:.1e}, "
            f"column sums within {c.column_error:.1e}"
            for c in checked
        ),
        "time": "median of 10 interleaved calls; ratio to the fastest dense softmax form",
        **machine.facts(),
    }
    values = {"rows": rows, "checks": checked}
    report = Report("On an accelerator", [table(rows)], facts, values)
    print(report.facts_text())
    if out is not None:
        report.write(out, "gpu")
    return rows
