"""Train steps of ESP attention: growing lengths, and growing numbers of slices."""

import functools
from collections.abc import Callable

import asap_jax as aj
from train.bench.measure import gaussians, value_and_gradients
from train.reporting.table import Table
from train.study.paper import plots
from train.study.paper import profile as profiling
from train.study.paper.profile import Profile, Program
from train.study.paper.result import Result, beside
from train.study.paper.runs import Models
from train.study.paper.stored_profiles import Measured, measured

HEADS, HEAD_DIM, SLICES = 8, 64, 64
SEQUENCE = ("esp_training_sequence", "tab:esp_training_sequence")
COUNT = ("esp_slice_count", "fig:espformer_training_resources")
PUBLISHED = {
    "Sinkhorn (S=3)": "S=3",
    "Sinkhorn (S=10)": "S=10",
    "ESP (soft)": "ESP (soft)",
    "ESP (hard)": "ESP (hard)",
}
ABOUT = {
    "step": "one attention layer: output and gradient with respect to query, key and value",
    "ESP (soft), ESP (hard)": "all slices in memory, as in the released code; hard is its hard "
    "flag, which rounds the relaxation and passes its gradient",
    "a slice at a time": "this library's default, which computes the same",
    "exact sort": "forward only: an operator for inference",
}


def programs(batch: int, length: int, slices: int) -> dict[str, Program]:
    """The train step of every row at one shape."""
    inputs = tuple(gaussians((batch, length, HEADS, HEAD_DIM), 3))
    esp = functools.partial(aj.esp_attention, directions=aj.slice_directions(0, slices, HEAD_DIM))
    dense = functools.partial(esp, implementation="dense")
    trained = {
        **{
            f"Sinkhorn (S={steps})": functools.partial(
                aj.sinkhorn_attention, spec=aj.SinkhornSpec(steps)
            )
            for steps in (3, 10, 20)
        },
        "ESP (soft)": dense,
        "ESP (soft), a slice at a time": esp,
        "ESP (hard)": functools.partial(dense, mode="hard_released"),
        "ESP (hard), a slice at a time": functools.partial(esp, mode="hard_released"),
    }
    found = {name: Program(value_and_gradients(f), inputs) for name, f in trained.items()}
    exact = functools.partial(esp, mode="hard")
    return found | {"ESP (exact sort), forward": Program(exact, inputs)}


def _measured(
    models: Models, table: str, size: int, shape: tuple[int, int, int]
) -> dict[str, Profile]:
    """The profiles of all rows at one shape, measured or read."""
    measure = lambda: Measured(profiling.profile(programs(*shape)))
    return measured(models, table, str(size), measure).profiles


def sequence(models: Models, report: Callable[[str], None]) -> Result:
    """Batch 1 and 64 slices at growing lengths."""
    found = {}
    for length in models.preset.esp_lengths:
        report(f"N={length}")
        found[length] = _measured(models, SEQUENCE[0], length, (1, length, SLICES))
    name, label = SEQUENCE
    body = [
        [f"N={length}", row, one.time(), one.memory(), *_theirs(label, f"N={length}", row)]
        for length, profiles in found.items()
        for row, one in profiles.items()
    ]
    headings = ["length", "row", "ms", "GiB", "paper: ms", "paper: GB"]
    facts = {"shape": f"batch 1, {HEADS} heads of {HEAD_DIM}, {SLICES} slices"}
    values = {"lengths": {str(length): profiles for length, profiles in found.items()}}
    missing = [
        f"N={length}: only in the paper preset"
        for length in (197, 512, 1000, 2000)
        if length not in found
    ]
    tables = [Table(headings, body, num_names=2)]
    title = "Train step of one layer at growing lengths"
    facts |= ABOUT | profiling.facts()
    draw = functools.partial(plots.growth, found, "tokens N")
    return Result(name, label, title, tables, facts, values, missing, draw)


def _theirs(label: str, length: str, row: str) -> list[str]:
    if row not in PUBLISHED:
        return ["--", "--"]
    return beside(label, length, [f"{PUBLISHED[row]} {unit}" for unit in ("ms", "GB")])


def slice_count(models: Models, report: Callable[[str], None]) -> Result:
    """Batch 4 and 197 tokens at growing numbers of slices."""
    found: dict[int, dict[str, Profile]] = {}
    for slices in models.preset.esp_slices:
        report(f"{slices} slices")
        found[slices] = _measured(models, COUNT[0], slices, (4, 197, slices))
    name, label = COUNT
    body = [
        [str(slices), row, one.time(), one.memory()]
        for slices, profiles in found.items()
        for row, one in profiles.items()
    ]
    facts = {"shape": f"batch 4, 197 tokens, {HEADS} heads of {HEAD_DIM}"}
    values = {"slices": {str(slices): profiles for slices, profiles in found.items()}}
    tables = [Table(["slices", "row", "ms", "GiB"], body, num_names=2)]
    title = "Train step of one layer at growing numbers of slices"
    facts |= ABOUT | profiling.facts()
    missing = ["the paper gives this profile as a figure without numbers"]
    draw = functools.partial(plots.growth, found, "slices L")
    return Result(name, label, title, tables, facts, values, missing, draw)
