"""One attention layer on synthetic inputs: the runtime sweep, and the control with unit vectors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

import asap_jax as aj
from train.bench.measure import gaussians
from train.reporting.table import Table
from train.study.paper import plots, rows
from train.study.paper import profile as profiling
from train.study.paper.fits import solve
from train.study.paper.profile import Profile, Program
from train.study.paper.result import Result, beside
from train.study.paper.runs import Models
from train.study.paper.stored_profiles import Measured, measured
from train.study.paper.summary import MISSING

WIDTH, HEADS, HEAD_DIM = 1024, 8, 64
TEACHER = aj.SinkhornSpec(20)
BUDGETS = (3, 5, 10, 15, 20)
LENGTHS, FLASH_LENGTHS = (500, 1000, 2000, 4000, 8000), (512, 2048, 4096)
ESP_SLICES = 32
FIT_EXAMPLES, FIT_BATCH = 8, 2
RUNTIME = ("runtime_speedup", "tab:runtime_speedup")
FLASH = ("flashsinkhorn_control", "tab:flashsinkhorn_control")
FLASH_SCALE = 2.0  # scores of unit vectors are then minus the squared distance, up to a constant


def runtime(models: Models, report: Callable[[str], None]) -> Result:
    """Forward time of a layer with its projections, at growing lengths."""
    found = {}
    for length in models.preset.lengths:
        report(f"N={length}")
        measure = lambda length=length: Measured(profiling.profile(runtime_programs(length)))
        found[length] = measured(models, RUNTIME[0], str(length), measure).profiles
    name, label = RUNTIME
    base = "ASAP-LS-0 (L=32)"
    names = list(next(iter(found.values())))
    headings = ["row", *(f"N={length} (ms)" for length in found)]
    headings += [f"N={length}: / {base}" for length in found]
    body = [
        [
            row,
            *(found[length][row].time() for length in found),
            *(_ratio(found[length][row], found[length][base]) for length in found),
        ]
        for row in names
    ]
    theirs = ("ASAP-LS-0 (ms)", "ASAP-LS (ms)", "S=3 (ms)", "S=3 / ASAP-LS-0", "S=20 (ms)")
    theirs += ("S=20 / ASAP-LS-0",)
    paper = Table(
        ["N", *theirs],
        [[f"N={n}", *beside(label, f"N={n}", theirs)] for n in found],
        "The paper's figures",
    )
    facts = {
        "layer": f"batch 1, width {WIDTH}, {HEADS} heads of {HEAD_DIM}, with the projections",
        "fit": f"{FIT_EXAMPLES} examples in batches of {FIT_BATCH}, teacher S={TEACHER.num_steps}, "
        "as in the paper; its time is not in the table",
        "ESP": f"{ESP_SLICES} slices, inverse temperature 10",
        **profiling.facts(),
    }
    values = {"lengths": {str(length): rows_ for length, rows_ in found.items()}, "base": base}
    title = "One layer with its projections: forward time"
    draw = functools.partial(plots.growth, found, "tokens N")
    tables = [Table(headings, body), paper]
    return Result(name, label, title, tables, facts, values, _not_run(found, LENGTHS), draw)


def _not_run(found: dict[int, Any], lengths: tuple[int, ...]) -> list[str]:
    """The lengths of the paper that this preset leaves out."""
    return [f"N={length}: only in the paper preset" for length in lengths if length not in found]


def _ratio(one: Profile, base: Profile) -> str:
    if one.milliseconds is None or base.milliseconds is None:
        return MISSING
    return f"{one.milliseconds / base.milliseconds:.2f}"


def _layer(attention: Callable) -> nn.Module:
    return nn.MultiHeadDotProductAttention(
        num_heads=HEADS,
        qkv_features=HEADS * HEAD_DIM,
        out_features=WIDTH,
        attention_fn=attention,
    )


def runtime_programs(length: int) -> dict[str, Program]:
    """The forward pass of every row at one length."""
    inputs = gaussians((1, length, WIDTH), 1)[0]
    model = _layer(aj.linen.SinkhornAttention(TEACHER))
    variables = {"params": jax.jit(model.init)(jax.random.key(0), inputs)["params"]}
    examples = gaussians((FIT_BATCH, length, WIDTH), FIT_EXAMPLES // FIT_BATCH)
    programs = {}
    for row in fitted_rows((32,)):
        compiled, _ = fitted(model, variables, examples, row)
        programs[row.name] = Program(model.apply, (compiled, inputs))
    bank = aj.slice_directions(0, ESP_SLICES, HEAD_DIM)
    esp = functools.partial(aj.esp_attention, directions=bank, inverse_temperature=10.0)
    operators = {
        "softmax": aj.softmax_attention,
        **{
            f"Sinkhorn (S={steps})": functools.partial(
                aj.sinkhorn_attention, spec=aj.SinkhornSpec(steps)
            )
            for steps in BUDGETS
        },
        "ESPFormer (Soft)": functools.partial(esp, implementation="dense"),
        "ESPFormer (Soft), a slice at a time": functools.partial(esp, implementation="streaming"),
        "ESPFormer (Hard)": functools.partial(esp, mode="hard"),
    }
    for name, attention in operators.items():
        programs[name] = Program(_layer(attention).apply, (variables, inputs))
    return programs


def fitted_rows(slices: tuple[int, ...]) -> list[rows.Compiled]:
    """ASAP-LS-0 with each number of slices, ASAP-LS with the last, and this library's rows."""
    pairs = [rows.least_squares(FIT_EXAMPLES, count) for count in slices]
    moments = aj.Options().fit
    return [
        *(zero for zero, _ in pairs),
        pairs[-1][1],
        rows.Compiled("Moments, 2 closures", moments, 2, FIT_EXAMPLES),
        rows.Compiled("Moments, one call", moments, 1, FIT_EXAMPLES, "row"),
    ]


def fitted(
    model: nn.Module, variables: dict, batches: list, row: rows.Compiled
) -> tuple[dict, float]:
    """Variables with the compiled layer of a row, and the seconds of its second fit."""
    options = aj.Options(row.fit, row.fitted_closures, row.ending, holdout=0.0)
    calibration = aj.linen.Calibration(model, options)
    for _ in range(2):
        states, seconds = solve(calibration, variables, batches)
    ended = {path: state.replace(closures=row.closures) for path, state in states.items()}
    return calibration.compiled(variables, ended)["variables"], seconds


class Bare(nn.Module):
    """A Sinkhorn layer without projections, so that it can be compiled on given tensors."""

    spec: aj.SinkhornSpec

    @nn.compact
    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Maps ``(batch, N, heads, head_dim)`` tensors to the layer's output."""
        return aj.linen.SinkhornAttention(self.spec)(query, key, value)


def flash(models: Models, report: Callable[[str], None]) -> Result:
    """Unit-norm queries and keys under the squared Euclidean cost."""
    found, seconds = {}, {}
    for length in models.preset.flash_lengths:
        report(f"N={length}")
        both = measured(models, FLASH[0], str(length), functools.partial(_measure_flash, length))
        found[length], seconds[length] = both.profiles, both.fit_seconds
    name, label = FLASH
    longest = max(found)
    columns = [f"N={length} (ms)" for length in found] + ["N=4096 (GB)"]
    headings = ["row", "implementation", *columns[:-1], f"N={longest} (GiB)", "fit (s), largest"]
    headings += [f"paper: {column}" for column in columns]
    body = []
    for row in next(iter(found.values())):
        fit = max((times[row] for times in seconds.values() if row in times), default=None)
        body.append(
            [
                row,
                _implementation(row),
                *(found[length][row].time() for length in found),
                found[longest][row].memory(),
                MISSING if fit is None else f"{fit:.2f}",
                *beside(label, PUBLISHED.get(row, row), columns),
            ]
        )
    facts = {
        "layer": f"batch 1, 1 head of {HEAD_DIM}, no projections (the paper gives no shape; its "
        "0.313 GB at N=4096 is less than five N x N arrays of one head)",
        "cost": "squared distance of unit vectors, epsilon 1",
        "tiles": "the same loop tile by tile, with memory linear in N; no fused kernel on a CPU",
        "fit": f"{FIT_EXAMPLES} examples in batches of {FIT_BATCH}; the second fit, which compiles "
        "nothing",
        **profiling.facts(),
    }
    values = {
        "lengths": {str(length): rows_ for length, rows_ in found.items()},
        "fit_seconds": {str(length): times for length, times in seconds.items()},
    }
    title = "Unit-norm inputs, squared Euclidean cost: time and memory"
    draw = functools.partial(plots.growth, found, "tokens N")
    missing = [*_not_run(found, FLASH_LENGTHS), "a fused kernel (rows of tiles in its place)"]
    return Result(name, label, title, [Table(headings, body)], facts, values, missing, draw)


def _measure_flash(length: int) -> Measured:
    programs, seconds = flash_programs(length)
    return Measured(profiling.profile(programs), seconds)


PUBLISHED = {
    "Sinkhorn (S=3)": "Sinkhorn normalizer (S=3)",
    "Sinkhorn (S=20)": "Sinkhorn teacher",
    "Sinkhorn (S=3), tiles": "FlashSinkhorn (S=3)",
    "Sinkhorn (S=20), tiles": "FlashSinkhorn (S=20)",
}


def _implementation(row: str) -> str:
    if row.endswith("tiles"):
        return "tiles"
    return "dense loop" if row.startswith("Sinkhorn") else "dense"


def flash_programs(length: int) -> tuple[dict[str, Program], dict[str, float]]:
    """The forward pass of every row at one length, and the seconds of the fits."""
    spec = dataclasses.replace(TEACHER, scale=FLASH_SCALE)

    def tensors(seed: int, batch: int) -> tuple[jax.Array, ...]:
        shape = (3, batch, length, 1, HEAD_DIM)
        query, key, value = jax.random.normal(jax.random.key(seed), shape)
        costs = aj.squared_euclidean_inputs(query, key, scale=FLASH_SCALE)
        assert costs.bias is None  # unit vectors
        return costs.query, costs.key, value

    inputs = tensors(0, 1)
    programs = {}
    for steps in (3, 20):
        budget = dataclasses.replace(spec, num_steps=steps)
        for suffix, implementation in (("", "scaling"), (", tiles", "streaming")):
            attend = functools.partial(
                aj.sinkhorn_attention, spec=budget, implementation=implementation
            )
            programs[f"Sinkhorn (S={steps}){suffix}"] = Program(attend, inputs)
    model = Bare(spec)
    batches = [tensors(1 + i, FIT_BATCH) for i in range(FIT_EXAMPLES // FIT_BATCH)]
    seconds = {}
    for row in fitted_rows((8, 16, 32)):
        compiled, seconds[row.name] = fitted(model, {}, batches, row)
        programs[row.name] = Program(model.apply, (compiled, *inputs))
    return programs, seconds
