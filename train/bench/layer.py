"""Time of one attention layer: softmax in several forms, Sinkhorn budgets, compiled layers.

All rows of one length run interleaved in one process; a row's ratio is to the fastest *dense*
softmax form of that length. Inputs are Gaussian; the compiled rows run random coefficients, which
cost what fitted ones do. A row that needs more than ``LIMIT_GIB`` of memory is not run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

import asap_jax as aj
from train import machine, timing

GIB = 2**30
LIMIT_GIB = 12.0
LENGTHS = (128, 512, 1000, 2000)
SHAPE = (1, 8, 64)  # batch, heads, head_dim
SHAPES = {
    "imdb": (32, 512, 8, 32),
    "text": (32, 128, 8, 32),
    "vit": (64, 197, 8, 64),
    **{f"sweep-{n}": (1, n, 8, 64) for n in (128, 500, 512, 1000, 2000, 4000, 8000)},
}
"""Named real shapes: batch, length, heads, head_dim."""

DENSE = (
    "softmax, jax.nn.softmax",
    "softmax, divided late",
    "softmax, jax.nn.dot_product_attention",
)
SLICES = 32


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to attend at one shape; ``milliseconds`` is None where ``reason`` says why.

    Memory and compile time of a peer outside JAX are not known: None.
    """

    shape: str
    name: str
    gibibytes: float | None
    compile_seconds: float | None
    milliseconds: float | None
    ratio: float | None
    reason: str = ""


def softmax_plain(query, key, value):
    """Softmax attention as one writes it."""
    scores = jnp.einsum("bnhd,bmhd->bhnm", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores, -1), value)


def softmax_late(query, key, value):
    """Softmax attention that divides after the product with the values."""
    scores = jnp.einsum("bnhd,bmhd->bhnm", query, key) / query.shape[-1] ** 0.5
    mass = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    mixed = jnp.einsum("bhnm,bmhd->bhnd", mass, value) / mass.sum(-1, keepdims=True)
    return jnp.swapaxes(mixed, 1, 2)


def methods(head_dim: int) -> dict[str, Callable]:
    """Row names to attention functions of query, key and value."""
    spec = lambda steps: aj.SinkhornSpec(num_steps=steps)
    sinkhorn = lambda steps, how: functools.partial(
        aj.sinkhorn_attention, spec=spec(steps), implementation=how
    )
    bank = aj.slice_directions(0, SLICES, head_dim)
    moments = aj.Moments()
    rows = dict(
        zip(DENSE, (softmax_plain, softmax_late, jax.nn.dot_product_attention), strict=True)
    )
    rows["softmax, softmax_attention"] = aj.softmax_attention
    rows |= {f"Sinkhorn S={steps}": sinkhorn(steps, "auto") for steps in (2, 3, 4, 5, 10, 15, 20)}
    rows |= {f"Sinkhorn S={steps}, log domain": sinkhorn(steps, "log") for steps in (10, 20)}
    # The dual 0 from one projection: closures and next to nothing else.
    nothing = aj.RawProjections(jnp.eye(1, head_dim))
    families = {
        "closures alone": (nothing, jnp.zeros(1)),
        "moments": (moments, jnp.full(moments.num_features(head_dim), 1e-3)),
        f"{SLICES} slices": (aj.SlicedPotentials(bank), jnp.full(SLICES, 1 / SLICES)),
    }
    for closures in (1, 2, 3):
        for name, (family, coefficients) in families.items():
            # n closures end on columns: from the query side for odd n, the key side for even n.
            side = "query" if closures % 2 else "key"
            rows[f"ASAP n={closures}, {name}"] = functools.partial(
                aj.asap_attention,
                predictor=aj.Predictor((family,), aj.LinearHead(coefficients), side=side),
                spec=spec(10),
                closures=closures,
            )
    return rows


def measure(
    shape_name: str,
    shape: tuple[int, ...],
    rows: dict[str, Callable],
    *,
    rounds: int,
    limit_gib: float = LIMIT_GIB,
    gradient: bool = False,
    num_inputs: int = 3,
    timed: bool = True,
    foreign: Mapping[str, Callable[[], object]] | None = None,
) -> list[Row]:
    """Compiles and times all rows at one shape, interleaved.

    Args:
      shape_name: for the table.
      shape: of every input: batch, length, heads, head_dim.
      rows: names and functions.
      rounds: timed calls of each.
      limit_gib: rows that need more are not run.
      gradient: time value and gradient of a scalar of the output instead.
      num_inputs: Gaussian arrays of that shape that each function takes.
      timed: whether to run the rows; otherwise only their memory is told.
      foreign: calls outside JAX to time beside them; their memory is not known.
    """
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    done, calls = {}, {}
    inputs = [
        jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), num_inputs)
    ]
    for name, function in rows.items():
        if gradient:
            loss = lambda *x, f=function: jnp.sum(jnp.sin(f(*x)))
            function = jax.value_and_grad(loss, argnums=tuple(range(num_inputs)))
        seconds, program = timing.compiled(function, *[like] * num_inputs)
        analysis = program.memory_analysis()
        needed = (analysis.temp_size_in_bytes + 4 * analysis.output_size_in_bytes) / GIB
        done[name] = (needed, seconds)
        if timed and needed <= limit_gib:
            calls[name] = functools.partial(program, *inputs)
    for name, call in (foreign or {}).items():
        done[name], calls[name] = (None, None), call
    times = timing.interleaved(calls, rounds=rounds) if calls else {}
    base = [times[name] for name in DENSE if name in times] or [*times.values()]
    reason = lambda gib: f"not run (needs {gib:.1f} GiB)" if gib > limit_gib else "not timed"
    return [
        Row(
            shape_name,
            name,
            needed,
            seconds,
            times.get(name),
            times[name] / min(base) if name in times else None,
            "" if name in times else reason(needed),
        )
        for name, (needed, seconds) in done.items()
    ]


def run(
    lengths: Iterable[int] = LENGTHS, *, rounds: int = 10, out: pathlib.Path | None = None
) -> list[Row]:
    """Prints one table for all lengths and writes it as JSON and Markdown.

    Args:
      lengths: of the sweep at batch 1, 8 heads, head_dim 64.
      rounds: timed calls of each row.
      out: folder for ``layer.json`` and ``layer.md``; None writes nothing.
    """
    batch, heads, width = SHAPE
    rows = []
    for length in lengths:
        shape = (batch, length, heads, width)
        some = measure(f"N={length}", shape, methods(width), rounds=rounds)
        rows += some
        print(table(some), flush=True)
    facts = {
        "shape": f"batch {batch}, {heads} heads, head_dim {width}, float32",
        "time": f"median of {rounds} interleaved calls; ratio to the fastest dense softmax form",
        **machine.facts(),
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    if out is not None:
        write(out, "layer", "One attention layer", rows, facts)
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| shape | attention | ms | ratio | temporary MiB | compile s |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row.milliseconds is None:
            cells = f"{row.reason} | "
        else:
            cells = f"{row.milliseconds:.2f} | {row.ratio:.2f}"
        known = row.gibibytes is not None
        rest = f"{1024 * row.gibibytes:.1f} | {row.compile_seconds:.1f}" if known else "? | 0"
        lines.append(f"| {row.shape} | {row.name} | {cells} | {rest} |")
    return "\n".join(lines)


def write(out: pathlib.Path, name: str, title: str, rows: list[Row], facts: dict) -> None:
    """Writes ``name.json`` and ``name.md`` into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {"title": title, "rows": [dataclasses.asdict(row) for row in rows], "facts": facts}
    (out / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")
    text = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    (out / f"{name}.md").write_text(f"# {title}\n\n{table(rows)}\n\n{text}\n")
