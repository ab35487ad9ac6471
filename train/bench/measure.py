"""What the layer benchmarks have in common: a measured row, how it is measured, the table."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from train.runtime import timing

GIB = 2**30
LIMIT_GIB = 12.0
DENSE = (
    "softmax, jax.nn.softmax",
    "softmax, divided late",
    "softmax, jax.nn.dot_product_attention",
)
"""Softmax attention that keeps all scores, in several forms."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to attend at one shape; ``milliseconds`` is None where ``reason`` says why.

    Attributes:
      shape, name: what ran.
      gibibytes: temporary memory of the compiled program, beside inputs and outputs.
      compile_seconds: of that program; both are None for a peer outside JAX.
      milliseconds: median of the timed calls.
      ratio: of that to the fastest row of the ``base`` of ``measure``.
      reason: why it was not timed.
      low, high: quartiles of the timed calls, milliseconds.
    """

    shape: str
    name: str
    gibibytes: float | None
    compile_seconds: float | None
    milliseconds: float | None
    ratio: float | None
    reason: str = ""
    low: float | None = None
    high: float | None = None


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
    sharpness: float = 1.0,
    foreign: Mapping[str, Callable[[], object]] | None = None,
    base: Collection[str] = DENSE,
) -> list[Row]:
    """Compiles and times all rows at one shape, interleaved.

    Args:
      shape_name: for the table.
      shape: of every input: batch, length, heads, head_dim.
      rows: names and functions.
      rounds: timed calls of each.
      limit_gib: rows that need more, inputs and outputs included, are not run.
      gradient: time value and gradient of a scalar of the output instead.
      num_inputs: Gaussian arrays of that shape that each function takes.
      timed: whether to run the rows; otherwise only their memory is told.
      sharpness: factor of the first input: the standard deviation of the scores.
      foreign: calls outside JAX to time beside them; their memory is not known.
      base: rows whose fastest is 1 in the column of ratios; the fastest row where there is none.
    """
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    done, calls = {}, {}
    keys = jax.random.split(jax.random.key(0), num_inputs)
    first, *rest = [jax.random.normal(key, shape) for key in keys]
    inputs = [sharpness * first, *rest]
    for name, function in rows.items():
        if gradient:
            loss = lambda *x, f=function: jnp.sum(jnp.sin(f(*x)))
            function = jax.value_and_grad(loss, argnums=tuple(range(num_inputs)))
        seconds, program = timing.compiled(function, *[like] * num_inputs)
        analysis = program.memory_analysis()
        held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
        temporary = analysis.temp_size_in_bytes / GIB
        needed = temporary + held / GIB
        done[name] = (temporary, needed, seconds)
        if timed and needed <= limit_gib:
            calls[name] = functools.partial(program, *inputs)
    for name, call in (foreign or {}).items():
        done[name], calls[name] = (None, None, None), call
    samples = timing.samples(calls, rounds=rounds) if calls else {}
    quartiles = {name: np.percentile(some, (25, 50, 75)) for name, some in samples.items()}
    medians = [quartiles[name][1] for name in base if name in quartiles]
    medians = medians or [median for _, median, _ in quartiles.values()]
    found = []
    for name, (temporary, needed, seconds) in done.items():
        if name in quartiles:
            low, median, high = map(float, quartiles[name])
            found.append(
                Row(
                    shape_name, name, temporary, seconds, median, median / float(min(medians)),
                    low=low, high=high,
                )
            )  # fmt: skip
        else:
            reason = f"not run (needs {needed:.1f} GiB)" if needed > limit_gib else "not timed"
            found.append(Row(shape_name, name, temporary, seconds, None, None, reason))
    return found


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| shape | attention | ms | quartiles | ratio | temporary MiB | compile s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row.milliseconds is None:
            cells = f"{row.reason} | | "
        else:
            cells = f"{row.milliseconds:.2f} | {row.low:.2f}..{row.high:.2f} | {row.ratio:.2f}"
        known = row.gibibytes is not None
        rest = f"{1024 * row.gibibytes:.1f} | {row.compile_seconds:.1f}" if known else "? | 0"
        lines.append(f"| {row.shape} | {row.name} | {cells} | {rest} |")
    return "\n".join(lines)


def write(out: pathlib.Path, name: str, title: str, rows: list[Row], facts: dict) -> None:
    """Writes ``name.json`` and ``name.md`` into ``out``."""
    _put_down(out, name, title, table(rows), _stored(rows), facts)


def tell(
    out: pathlib.Path | None, name: str, title: str, rows: list[Row], facts: dict
) -> list[Row]:
    """Prints the table and the facts, writes them where there is ``out``, and gives the rows."""
    tell_text(out, name, title, table(rows), _stored(rows), facts)
    return rows


def tell_text(out: pathlib.Path | None, name: str, title: str, text: str, rows, facts: dict):
    """Prints ``text`` and the facts, and writes them, with the ``rows`` they tell of."""
    print(text)
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    if out is not None:
        _put_down(out, name, title, text, rows, facts)


def _stored(rows: list[Row]) -> list[dict]:
    return [dataclasses.asdict(row) for row in rows]


def _put_down(out: pathlib.Path, name: str, title: str, text: str, rows, facts: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    stored = {"title": title, "rows": rows, "facts": facts}
    (out / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")
    listed = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    (out / f"{name}.md").write_text(f"# {title}\n\n{text}\n\n{listed}\n")
