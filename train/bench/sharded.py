"""Memory of one device when the tokens of a call are sharded over devices."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import asap_jax as aj
from train.reporting.table import Report, Table
from train.runtime import machine

LENGTH, HEADS, WIDTH = 32768, 4, 64
DEVICES = (1, 2, 4, 8)
MODES = "jit", "shard_map"
"""Who divides the work: the compiler, or the call by ``axis_name``, whose keys go round."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator on ``devices`` devices.

    Attributes:
      mode: one of ``MODES``.
      forward, gradient: MiB of temporary memory of one device.
      gathered: most tokens of an array that a device gathers from the others, over both programs.
    """

    operator: str
    mode: str
    devices: int
    forward: float
    gradient: float
    gathered: int


def operators() -> dict[str, Callable]:
    """Row names to attention functions that store no kernel."""
    predictor = aj.Predictor(
        (aj.Moments(),), aj.LinearHead(jnp.zeros((HEADS, WIDTH + 8))), side="key"
    )
    spec, tiles = aj.SinkhornSpec(10), dict(implementation="streaming")
    compiled = functools.partial(aj.asap_attention, predictor=predictor, spec=spec, **tiles)
    return {
        "one closure, row ending, moments": functools.partial(compiled, closures=1, ending="row"),
        "two closures, moments": functools.partial(compiled, closures=2),
        "Sinkhorn S=10": functools.partial(aj.sinkhorn_attention, spec=spec, **tiles),
    }


def gathered_tokens(program: str, length: int) -> int:
    """The largest axis of an array that ``program`` (HLO text) gathers: at most ``length``."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", program)
    sizes = [int(n) for shape in shapes for n in shape.split(",") if n]
    return max((n for n in sizes if n <= length), default=0)


def measure(name: str, attend: Callable, count: int, length: int, mode: str = "jit") -> Row:
    """Compiles a call and its gradient with all arrays sharded over ``count`` devices."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:count]), ("tokens",))
    tokens = jax.sharding.PartitionSpec(None, "tokens")
    split = jax.sharding.NamedSharding(mesh, tokens)
    if mode == "shard_map":
        attend = functools.partial(attend, axis_name="tokens")
        attend = jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens)
    like = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32, sharding=split)
    loss = lambda *qkv: jnp.sum(jnp.sin(attend(*qkv)))
    functions = attend, jax.grad(loss, argnums=(0, 1, 2))
    programs = [
        jax.jit(function, out_shardings=split).lower(like, like, like).compile()
        for function in functions
    ]
    forward, gradient = (p.memory_analysis().temp_size_in_bytes / 2**20 for p in programs)
    gathered = max(gathered_tokens(program.as_text(), length) for program in programs)
    return Row(name, mode, count, forward, gradient, gathered)


def run(length: int = LENGTH, *, out: pathlib.Path | None = None) -> list[Row]:
    """Prints the table and writes ``sharded.json`` and ``sharded.md`` into ``out``.

    On a CPU it divides the machine into devices, which works before JAX's first computation only.
    """
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    rows = [
        measure(name, attend, count, length, mode)
        for name, attend in operators().items()
        for mode in MODES
        for count in DEVICES
        if count <= jax.device_count()
    ]
    facts = {
        "shape": f"batch 1, {length} tokens, {HEADS} heads, head_dim {WIDTH}, float32; queries, "
        f"keys and values sharded over the tokens",
        "by": "jit: the compiler divides the call; shard_map: axis_name, the keys go round",
        "memory": "temporary memory of one device, without inputs and outputs, from the compiler",
        **machine.facts(),
    }
    report = Report("Tokens sharded over devices", [table(rows)], facts, {"rows": rows})
    report.print_and_write(out, "sharded")
    return rows


def table(rows: list[Row]) -> Table:
    """The rows as text."""
    headings = "operator", "by", "devices", "forward MiB", "gradient MiB", "most tokens gathered"
    cells = [
        (
            r.operator,
            r.mode,
            str(r.devices),
            f"{r.forward:.1f}",
            f"{r.gradient:.1f}",
            str(r.gathered),
        )
        for r in rows
    ]
    return Table(headings, cells)
