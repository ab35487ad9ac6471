"""Downstream accuracy: trained families, and what takes the place of the Sinkhorn teacher."""

import dataclasses
import functools
from collections.abc import Callable

import asap_jax as aj
from train.recipes.evaluation import Evaluation
from train.recipes.schema import Recipe
from train.reporting.table import Table
from train.study.paper import families, plots, replacement, rows
from train.study.paper.columns import COLUMNS, spread
from train.study.paper.families import DIFF, ESP, TRANSFORMER, Family, FamilyLine
from train.study.paper.frozen import Frozen
from train.study.paper.presets import Preset
from train.study.paper.result import Result, beside
from train.study.paper.rows import Row
from train.study.paper.runs import Models
from train.study.paper.summary import MISSING, Line, line

SHOWN = ("calls", "passes", "M", "accuracy (%)", "agreement (%)", "attention rel-l2")
SHOWN += ("output RMSE", "fit time (s)")


@dataclasses.dataclass(frozen=True)
class AccuracyTable:
    """One table of accuracies.

    Attributes:
      name, label, title: see ``Result``.
      recipe: name of the recipe.
      column: the paper's column.
      families: the trained rows.
      choose: from the teachers' spec and the preset to the rows on the frozen teacher.
      shorter: the small preset divides the epochs of its recipe by this number.
      missing: what the table does not have.
      sampled: the small preset measures on some of the test examples only.
      curves: whether the paper plots the validation losses of the trained rows; the models are
        then evaluated while they train.
    """

    name: str
    label: str
    title: str
    recipe: str
    column: str
    families: tuple[Family, ...]
    choose: Callable[[aj.SinkhornSpec, Preset], list[Row]]
    shorter: int = 1
    missing: tuple[str, ...] = ()
    sampled: bool = False
    curves: bool = False


def _replaced(named: Callable[[rows.Compiled], str], keep: Callable[[rows.Compiled], bool]):
    """Chooses rows: the paper's fits that ``keep`` keeps, this library's, smaller budgets."""

    def choose(spec: aj.SinkhornSpec, preset: Preset) -> list[Row]:
        count = preset.num_fit
        fits = [*rows.least_squares(count), *rows.divergence(count), *rows.least_squares(count, 64)]
        kept = [dataclasses.replace(fit, published=named(fit)) for fit in fits if keep(fit)]
        ours = rows.recommended(spec, preset)
        return [*kept, *ours, *rows.budgets(spec), rows.teacher(spec)]

    return choose


_OWN_NAME = lambda fit: fit.name
_WITHOUT_SLICES = lambda fit: fit.name.removesuffix(" (L=32)")
_L32 = lambda fit: fit.fit.num_slices == 32
_CATS = lambda fit: fit.name in ("ASAP-LS-0 (L=32)", "ASAP-KL-0 (L=32)", "ASAP-LS (L=64)")

CIFAR = {"small": "cifar10", "paper": "cifar100"}
TEXTS = {
    "ag_news": ("ag_news", "AG News"),
    "dbpedia": ("dbpedia", "DBpedia-14"),
    "yelp": ("yelp", "Yelp Review Full"),
}


def text(dataset: str) -> AccuracyTable:
    """The table of one text data set."""
    recipe, column = TEXTS[dataset]
    return AccuracyTable(
        f"text_{dataset}",
        "tab:text_classification_main",
        f"Text classification: {column}",
        recipe,
        column,
        (TRANSFORMER, DIFF, ESP),
        _replaced(_WITHOUT_SLICES, _L32),
    )


def cifar(preset: Preset) -> AccuracyTable:
    """The CIFAR table; the small preset trains on CIFAR-10 in the place of CIFAR-100."""
    recipe = CIFAR[preset.name]
    stand_in = () if recipe == "cifar100" else ("CIFAR-10 stands in for CIFAR-100",)
    return AccuracyTable(
        "cifar",
        "tab:cifar100_available",
        "CIFAR with patches of 4",
        recipe,
        "accuracy (%)",
        (TRANSFORMER, DIFF, ESP),
        _replaced(_OWN_NAME, _L32),
        shorter=4,
        missing=stand_in,
        sampled=True,
        curves=True,
    )


CATS = AccuracyTable(
    "catsdogs",
    "tab:catsdogs_main",
    "Cats and Dogs",
    "cats_vs_dogs",
    "accuracy (%)",
    (
        TRANSFORMER,
        DIFF,
        Family("Sinkformer (S=3)", "sinkhorn", steps=3),
        Family("ESPFormer (Soft, init)", "esp", evaluation="soft, init"),
        Family("ESPFormer (Soft, sharp)", "esp_annealed", evaluation="soft, sharp"),
        Family("ESPFormer (Hard)", "esp_annealed"),
    ),
    _replaced(_OWN_NAME, _CATS),
    shorter=4,
    missing=("memory of a training step is in table catsdogs_resources",),
    sampled=True,
)


def recipe_of(table: AccuracyTable, models: Models) -> tuple[Recipe, str]:
    """The recipe of a table in this preset, and the name of its changes in the run folders."""
    recipe = models.recipe(table.recipe)
    if table.curves and recipe.evaluate is None:
        recipe = dataclasses.replace(recipe, evaluate=Evaluation())
    if models.preset.name != "small" or table.shorter == 1:
        return recipe, ""
    recipe = recipe.with_epochs(round(recipe.epochs / table.shorter))
    return recipe, f"-{recipe.epochs}epochs"


def run(table: AccuracyTable, models: Models, report: Callable[[str], None]) -> Result:
    """Trains the missing models, measures the missing rows, and makes the table."""
    preset = models.preset
    recipe, variant = recipe_of(table, models)
    count = preset.test_examples if table.sampled else None
    trained = [
        families.measure(family, recipe, models, variant, count, report)
        for family in table.families
    ]
    chosen = table.choose(recipe.spec, preset)
    teachers = []
    for one in models.runs(recipe, variant):
        teachers.append(Frozen(one, count))
        replacement.measure(teachers[-1], chosen, True, report)
    lines = [line(row, teachers, recipe.spec, score=True) for row in chosen]
    facts = replacement.facts_of(lines, teachers)
    facts["training"] = f"{recipe.epochs} epochs, batch {recipe.batch_size}"
    if preset.esp_slices_trained is not None:
        facts["ESP"] = f"trained and evaluated with {preset.esp_slices_trained} slices"
    facts["trained rows"] = "; ".join(
        f"{one.name}: {one.accuracy.count} seed(s)" for one in trained
    )
    values = {"families": trained, "rows": lines, "column": table.column, "recipe": recipe.name}
    headings = ["row", *SHOWN, f"paper: {table.column}"]
    body = [_family_cells(one, table) for one in trained]
    body += [_line_cells(one, table) for one in lines]
    tables = [Table(headings, body)]
    curves = {one.name: one.curve for one in trained if one.curve}
    curves[lines[-1].name] = families.held_out_loss(teachers[0].run)
    missing = list(table.missing)
    draw = functools.partial(plots.accuracies, trained, lines, curves if table.curves else {})
    return Result(table.name, table.label, table.title, tables, facts, values, missing, draw)


def _family_cells(one: FamilyLine, table: AccuracyTable) -> list[str]:
    cells = dict.fromkeys(SHOWN, MISSING) | {"accuracy (%)": spread(one.accuracy, "{:.2f}", 100)}
    return [one.name, *cells.values(), *beside(table.label, one.published, [table.column])]


def _line_cells(one: Line, table: AccuracyTable) -> list[str]:
    shown = (COLUMNS[name](one) for name in SHOWN)
    return [one.name, *shown, *beside(table.label, one.published, [table.column])]
