"""The run: what is checked and timed, in which order, and for how long (``make gpu``)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import pathlib
from collections.abc import Mapping, Sequence

import jax

from asap_jax.solvers import registry
from train.bench import layer
from train.bench.gpu import checking, timed
from train.bench.gpu.attempts import Clock, Task, attempts
from train.bench.gpu.cards import CARDS
from train.bench.gpu.checking import Setting
from train.bench.gpu.operators import OPERATORS
from train.bench.gpu.page import Page, Section
from train.bench.measure import GIB, LIMIT_GIB, sweep_shape
from train.runtime import machine

MACHINE = Section("Machine", ("what",), ("value",), "read at the start.")
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "chex")
PACKAGES += ("numpy", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "tokamax")
CHECKED_UNTIL, GRADIENTS_UNTIL = 0.3, 0.45  # shares of the budget
WORKERS = 6  # programs that are compiled at a time, if there are as many cores

EVERY = tuple(name for name in OPERATORS if name != "S=20")
SOME = ("S=10", "n=1, rows", "n=2, columns")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is checked and timed, by worth: what comes last may not be run.

    Attributes:
      outputs, gradients: settings of the checks. Those of ``FULL`` hold every pair of properties.
      ceiling: size of the matrices that show what the card reaches.
      operators: names of the timed operators.
      lengths: lengths of the sweep; ``first_lengths`` come before the paper's rows.
      tokens: tokens of all problems together, so that the card is full at every length.
      paper: names and shapes of the paper's rows: batch, length, heads, head_dim.
    """

    outputs: Sequence[Setting]
    gradients: Sequence[Setting]
    ceiling: int
    operators: Sequence[str]
    first_lengths: Sequence[int]
    lengths: Sequence[int]
    tokens: int
    paper: Mapping[str, tuple[int, int, int, int]]


FULL = Plan(
    outputs=(
        Setting(64, 1024, "bfloat16", "default", masked=False, operators=EVERY),
        Setting(128, 1000, "float32", "highest", masked=False, operators=EVERY),
        Setting(64, 1000, "bfloat16", "default", masked=True, operators=SOME),
        Setting(128, 1024, "float32", "default", masked=True, operators=SOME),
        Setting(128, 1024, "bfloat16", "highest", masked=False, operators=SOME),
        Setting(64, 1000, "float32", "highest", masked=True, operators=SOME),
    ),
    gradients=(
        Setting(64, 256, "float32", "highest", masked=False, operators=EVERY),
        Setting(64, 256, "bfloat16", "default", masked=True, operators=SOME),
    ),
    ceiling=8192,
    operators=("n=1, rows", "S=20", "n=2, rows", "S=3", "n=3, rows"),
    first_lengths=(4096, 1024),
    lengths=(8192, 512, 2048),
    tokens=2**18,
    paper={
        "paper, N=4000": sweep_shape(4000),
        "paper, imdb": layer.NAMED["imdb"],
        **{f"paper, N={n}": sweep_shape(n) for n in (1000, 2000, 500, 8000)},
        **{f"paper, fused N={n}": sweep_shape(n) for n in (4096, 2048, 512)},
    },
)


def run(*, minutes: float = 11.0, out: pathlib.Path | None = None, plan: Plan = FULL) -> Page:
    """Checks and times everything; writes ``gpu.md`` and ``gpu.json`` into ``out`` as it goes.

    Args:
      minutes: nothing is started after this time. The page says what was not run.
      out: folder to write to; None writes nothing.
      plan: what is checked and timed.
    """
    clock = Clock(minutes)
    sections = (MACHINE, checking.SECTION, checking.GRADIENTS, timed.SECTION)
    page = Page("On an accelerator", sections, out)
    page.facts |= {"budget": f"{minutes:g} minutes", **machine.facts()}
    device = jax.devices()[0]
    for outcome in attempts(machine_tasks(device), Clock(1.0)):  # in any case
        page.add(MACHINE, outcome)
    # The newest implementation first: it is the one of which least is known.
    names = tuple(reversed(registry.IMPLEMENTATIONS))
    workers = min(WORKERS, machine.cores())
    for section, tasks, share in (
        (checking.SECTION, checking.output_tasks(plan.outputs, names), CHECKED_UNTIL),
        (checking.GRADIENTS, checking.gradient_tasks(plan.gradients, names), GRADIENTS_UNTIL),
    ):
        for outcome in attempts(tasks, clock, share=share, workers=workers):
            page.add(section, outcome)
    card = CARDS.get(device.device_kind)
    measure = functools.partial(
        timed.measure, clock=clock, card=card, workers=workers, limit_gib=memory_gib(device)
    )
    for outcome in itertools.chain.from_iterable(map(measure, groups(plan, names))):
        page.add(timed.SECTION, outcome)
    page.facts["time"] = f"{60 * minutes - clock.left():.0f} seconds"
    page.write()
    return page


def groups(plan: Plan, names: Sequence[str]) -> list[list[timed.Timed]]:
    """The timed rows: those of a group are compiled together, and compared with its softmax."""

    def at(length: int) -> list[list[timed.Timed]]:
        return [
            timed.sweep(
                length,
                max(1, plan.tokens // length),
                gradient=gradient,
                implementations=names,
                operators=plan.operators,
            )
            for gradient in (False, True)
        ]

    result = [timed.ceilings(plan.ceiling)]
    for length in plan.first_lengths:
        result += at(length)
    result += [timed.paper(name, *shape) for name, shape in plan.paper.items()]
    for length in plan.lengths:
        result += at(length)
    return result


def machine_tasks(device: jax.Device) -> list[Task]:
    """The lines about the machine."""
    entries = {
        "device": lambda: f"{jax.device_count()} {device.device_kind} ({device.platform})",
        "memory": lambda: f"{memory_gib(device):.0f} GiB may be used",
        "floor": lambda: (
            "peak rates from the data sheet"
            if device.device_kind in CARDS
            else f"no floor: the peak rates of {device.device_kind} are not known"
        ),
        "implementations": lambda: ", ".join(registry.IMPLEMENTATIONS),
        **{f"version of {name}": lambda name=name: _version(name) for name in PACKAGES},
    }
    valued = lambda read: lambda: {"value": read()}
    return [Task({"what": what}, valued(read)) for what, read in entries.items()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def memory_gib(device: jax.Device) -> float:
    """Memory that JAX may use on the device."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return limit / GIB if limit else LIMIT_GIB
