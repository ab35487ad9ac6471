"""All methods and ablations of the paper's tables, on one trained teacher.

A setting says how a layer is compiled and with which closures. Settings with the same fit share
one compile. The rows have the names of the paper.
"""

import dataclasses
from collections.abc import Callable, Sequence

import asap_jax as aj
from train.data.examples import Examples
from train.evaluation import breakeven, compile_teacher, fidelity, operators
from train.evaluation.fidelity_table import FidelityTable
from train.evaluation.operators import Operator
from train.reporting import progress
from train.training.splits import Split
from train.training.teacher import Teacher

SLICES = (8, 16, 32, 64, 128)
IMAGES = (512, 1024, 4096)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
      name: the paper's name of the row.
      fit: how the layers are fitted.
      closures: see ``aj.asap_attention``. All values except ``"none"`` share one fit.
      num_images: number of calibration examples, the paper's M.
    """

    name: str
    fit: aj.PaperFit
    closures: str
    num_images: int = compile_teacher.NUM_IMAGES

    @property
    def compiled_closures(self) -> str:
        """The closures to compile for. Layers compiled for two-sided closures run one-sided too."""
        return "none" if self.closures == "none" else "two_sided"


def settings(fit: aj.PaperFit, images: Sequence[int] = IMAGES) -> list[Setting]:
    """All rows: main methods, fit sizes, slice counts, design ablations, the MNIST variant.

    Args:
      fit: the fit that the rows change.
      images: numbers of calibration examples to try.
    """
    change = lambda **changes: dataclasses.replace(fit, **changes)
    kinds = (("-0", "one_sided"), ("", "two_sided"))
    length = fit.num_slices
    rows = []
    for objective in ("ls", "kl"):
        for suffix, closures in kinds:
            name = f"ASAP-{objective.upper()}{suffix} (L={length})"
            rows.append(Setting(name, change(objective=objective), closures))
    for count in images:
        for suffix, closures in kinds:
            rows.append(Setting(f"ASAP{suffix}, M={count}", fit, closures, count))
    for count in SLICES:
        for suffix, closures in kinds:
            name = f"ASAP-LS{suffix} (L={count})"
            if count != length:
                rows.append(Setting(name, change(num_slices=count), closures))
    design = {
        "ASAP shared coefficients": change(coefficients="shared"),
        "ASAP per-head coefficients": change(coefficients="per_head"),
        "ASAP orthogonal slices": change(slice_kind="orthogonal"),
        "Raw projections + ASAP transform": change(features="raw_projections"),
        "Rank displacement + ASAP transform": change(features="rank_displacement"),
    }
    rows += [Setting(name, changed, "two_sided") for name, changed in design.items()]
    rows.append(Setting("Predict both duals, no c-transform", fit, "none"))
    residual = residual_fit(fit, num_slices=256)
    for suffix, closures in kinds:
        name = f"ASAP{suffix}, residual log-sum-exp fit, token bias (L=256)"
        rows.append(Setting(name, residual, closures))
    return rows


def residual_fit(fit: aj.PaperFit, *, num_slices: int) -> aj.PaperFit:
    """The paper's MNIST variant: a fit of the residual to the first row step, and a token bias."""
    return dataclasses.replace(fit, num_slices=num_slices, baseline="first_step", token_bias=True)


def fit_key(row: Setting) -> tuple:
    """Rows with equal keys share one fit."""
    return row.fit, row.compiled_closures, row.num_images


def compile_rows(
    teacher: Teacher,
    examples: Examples,
    rows: list[Setting],
    report: Callable[[str], None] = lambda text: None,
) -> list[Operator]:
    """Compiles every setting and gives its table row; settings with the same fit share it.

    Args:
      teacher: a trained teacher.
      examples: the training split; labels are not used.
      rows: what to compile.
      report: called with the name of the row being compiled.
    """
    fitted: dict[tuple, aj.CompileResult] = {}
    result = []
    for row in rows:
        key = fit_key(row)
        if key not in fitted:
            report(row.name)
            options = aj.Options(fit=row.fit, closures=row.compiled_closures, seed=teacher.seed)
            fitted[key] = compile_teacher.compile_teacher(
                teacher, examples, options, num_images=row.num_images
            )
        variables = fitted[key].variables
        result.append(operators.compiled_row(row.name, teacher.recipe, variables, row.closures))
    return result


def run(
    teacher: Teacher, split: Split, *, rounds: int = 10
) -> tuple[FidelityTable, list[breakeven.BreakEven]]:
    """One table with every row, and the break-even points of the default fit.

    Args:
      teacher: a trained teacher with Sinkhorn attention.
      split: its data. Fit sizes larger than the training split are left out.
      rounds: timed calls of each row.
    """
    fit = aj.PaperFit()
    images = tuple(count for count in IMAGES if count <= len(split.train))
    rows = settings(fit, images)
    options = aj.Options(fit=fit, seed=teacher.seed)
    default = compile_teacher.compile_teacher(teacher, split.train, options)
    fits = len({fit_key(row) for row in rows})
    with progress.bar("compile", fits) as report:
        counted = iter(range(1, fits + 1))
        more = compile_rows(
            teacher, split.train, rows, lambda name: report(next(counted), f"compile {name}")
        )
    table = fidelity.measure(
        teacher.recipe,
        teacher.variables,
        split.test,
        compiled=default.variables,
        more=more,
        rounds=rounds,
    )
    left_out = [str(count) for count in IMAGES if count not in images]
    facts = {"fit": f"M={compile_teacher.NUM_IMAGES} images unless the row says otherwise"}
    if left_out:
        facts["left out"] = f"M={', '.join(left_out)}: more than {len(split.train)} images"
    points = breakeven.report(table, default.report.fit_seconds, teacher.recipe.spec)
    facts["break-even"] = "; ".join(map(str, points))
    return dataclasses.replace(table, facts={**facts, **table.facts}), points
