"""Temporary memory of forward and gradient, from the compiled memory analysis."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import asap_jax as aj
from train.runtime import machine

MIB = 2**20
SHAPES = {"gradient": (2, 256, 8, 32)}  # batch, length, heads, head_dim


@dataclasses.dataclass(frozen=True)
class Line:
    """One measurement: temporary MiB and milliseconds (median of ``runs`` calls)."""

    name: str
    mebibytes: float
    milliseconds: float
    runs: int


def measure(name: str, function: Callable, *arguments, runs: int = 10) -> Line:
    """Compiles ``function`` for ``arguments`` and measures it."""
    compiled = jax.jit(function).lower(*arguments).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes / MIB
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    return Line(name, temporary, 1e3 * statistics.median(times), runs)


def unrolled(query, key, value, num_steps: int) -> jax.Array:
    """Sinkhorn attention as a plain unrolled loop without rematerialisation, for comparison."""
    s = jnp.einsum("bnhd,bmhd->bhnm", query, key) / query.shape[-1] ** 0.5
    for step in range(num_steps):
        s = jax.nn.log_softmax(s, axis=-1 if step % 2 == 0 else -2)
    return jnp.einsum("bhnm,bmhd->bnhd", jnp.exp(s), value)


def gradient(num_steps: int = 20) -> list[Line]:
    """Forward and gradient of the teacher beside an unrolled loop, B2 H8 N256 d32."""
    batch, length, heads, width = SHAPES["gradient"]
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = [jax.random.normal(key, (batch, length, heads, width)) for key in keys]
    spec = aj.SinkhornSpec(num_steps)
    teacher = lambda q, k, v: aj.sinkhorn_attention(q, k, v, spec=spec)
    plain = lambda q, k, v: unrolled(q, k, v, num_steps)
    lines = []
    for name, function in (("sinkhorn_attention", teacher), ("unrolled loop", plain)):
        loss = lambda *arrays, f=function: jnp.sum(jnp.sin(f(*arrays)))
        lines.append(measure(f"{name}, forward", function, *qkv))
        lines.append(measure(f"{name}, gradient", jax.grad(loss, argnums=(0, 1, 2)), *qkv))
    return lines


def run(num_steps: int = 20) -> None:
    """Prints the table."""
    batch, length, heads, width = SHAPES["gradient"]
    print(f"S={num_steps}, B{batch} H{heads} N{length} d{width}, float32")
    for line in gradient(num_steps):
        print(f"  {line.name:<32} {line.mebibytes:8.1f} MiB {line.milliseconds:9.1f} ms")
    print("; ".join(f"{name}: {value}" for name, value in machine.facts().items()))
