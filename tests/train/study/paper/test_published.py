"""The paper's own figures: there for every row that the paper has, and read as numbers."""

import pytest

from train.recipes import catalogue as recipes
from train.study.paper import (
    accuracy,
    esp,
    frozen_tables,
    layers,
    mnist,
    published,
    rows,
    whole_model,
)
from train.study.paper.presets import PRESETS

PAPER = PRESETS["paper"]


@pytest.mark.parametrize(
    ("label", "row", "column", "text"),
    [
        ("tab:operator_main", "ASAP-LS (L=32)", "attention rel-l2", "0.035 ± 0.070"),
        ("tab:operator_main", "Sinkhorn teacher", "time (ms)", "63.02 ± 0.12"),
        ("tab:operator_marginal_appendix", "ASAP-LS-0 (L=32)", "column error", "(1.24 ± 0.15)e-7"),
        ("tab:operator_ablation_appendix", "ASAP-LS (L=128)", "output RMSE", "0.0014"),
        ("tab:amortization_design_appendix", "ASAP-0, M=512", "speed-up to S=3", "1.76"),
        ("tab:cifar100_available", "Sinkhorn teacher", "accuracy (%)", "64.95 ± 0.06"),
        ("tab:catsdogs_resource_h100", "ESPFormer (Soft)", "train-step GB", "OOM"),
        ("tab:esp_training_sequence", "N=2000", "ESP (hard) ms", "2700.73"),
        ("tab:flashsinkhorn_control", "FlashSinkhorn (S=3)", "N=4096 (GB)", "0.002"),
    ],
)
def test_cells_are_those_of_the_paper(label, row, column, text):
    assert published.cell(label, row, column) == text


def test_a_row_that_the_paper_has_not_is_empty_and_an_unknown_column_is_an_error():
    assert published.cell("tab:operator_main", "Moments, 2 closures", "time (ms)") == "--"
    with pytest.raises(KeyError):
        published.cell("tab:operator_main", "Sinkhorn teacher", "colour")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("14.14 ± 0.03", 14.14),
        ("(1.24 ± 0.15)e-7", 1.24e-7),
        ("5.9e-4", 5.9e-4),
        ("96.87 ± 0.18 / 100.00", 96.87),
        ("OOM", None),
        ("--", None),
    ],
)
def test_the_mean_of_a_cell(text, value):
    assert published.mean(text) == value


def test_every_frozen_row_and_column_of_the_paper_is_in_our_table():
    spec = recipes.RECIPES["imdb"].spec
    for table in frozen_tables.TABLES.values():
        theirs = published.tables()[table.label]
        ours = {rows.published(row) for row in table.choose(spec, PAPER)}
        assert set(theirs) <= ours, table.name
        assert set(table.compared) <= set(next(iter(theirs.values()))), table.name
        assert set(table.compared) - {"final update"} <= set(table.columns), table.name


@pytest.mark.parametrize(
    "table", [accuracy.text("ag_news"), accuracy.cifar(PAPER), accuracy.CATS], ids=lambda t: t.name
)
def test_every_downstream_row_of_the_paper_is_in_our_table(table):
    spec = recipes.RECIPES["cats_vs_dogs"].spec
    ours = {family.name for family in table.families}
    ours |= {rows.published(row) for row in table.choose(spec, PAPER)}
    theirs = published.tables()[table.label]
    assert set(theirs) <= ours
    assert all(table.column in row for row in theirs.values())


def test_every_row_of_the_other_tables_is_in_our_table():
    ours = {rows.published(row) for row in mnist.chosen_rows(recipes.RECIPES["mnist"].spec, PAPER)}
    assert set(published.tables()[mnist.LABEL]) <= ours
    models = set(whole_model.families(recipes.RECIPES["imdb"])) | {"ESPFormer (Hard)"}
    for table in (whole_model.IMDB, whole_model.CATS):
        assert set(published.tables()[table.label]) <= models
    control = set(layers.PUBLISHED.values())
    control |= {row.name for row in layers.fitted_rows((8, 16, 32))}
    assert set(published.tables()[layers.FLASH[1]]) <= control
    columns = {f"{name} {unit}" for name in esp.PUBLISHED.values() for unit in ("ms", "GB")}
    assert all(set(row) <= columns for row in published.tables()[esp.SEQUENCE[1]].values())
