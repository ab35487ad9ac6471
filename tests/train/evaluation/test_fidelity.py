"""The fidelity table, the picture and the demo, on a tiny trained model."""

import dataclasses
import io
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import asap_jax as aj
from train.cli import demo
from train.evaluation import compile_teacher, fidelity, operators, picture
from train.evaluation.fidelity_table import COLUMNS
from train.reporting.table import Table
from train.runtime import timing
from train.runtime.errors import UserError

ROWS = [
    "softmax swap",
    "Sinkhorn S=2",
    "Sinkhorn S=3",
    "Sinkhorn S=4",
    "Sinkhorn S=5",
    "ASAP-0",
    "ASAP",
    *(f"Moments, {text}" for text in ("1 closure", "2 closures", "3 closures")),
    *(f"Moments, {text}, row ending" for text in ("1 closure", "2 closures", "3 closures")),
    "teacher",
]


@pytest.fixture(scope="module")
def compiled(trained, examples):
    options = aj.Options(fit=aj.PaperFit(num_slices=8))
    return compile_teacher.compile_teacher(trained, examples, options, num_images=100).variables


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    """A folder with a file of an older demo."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "checkpoints" / "999").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def table(shallow, split, demo_folder):
    """The table of the demo, on fewer images; a minute, so what needs it is a slow test."""
    small = dataclasses.replace(shallow, epochs=1, batch_size=100, drops=())
    few = dataclasses.replace(
        split, train=split.train.take(slice(300)), test=split.test.take(slice(40))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "load_data", lambda recipe: few)
        return demo.run(0, demo_folder, small)


@pytest.mark.slow
def test_the_demo_writes_all_its_files(table, demo_folder):
    assert not (demo_folder / "checkpoints" / "999").exists()
    for name in ("fidelity.md", "fidelity.json", "plans.png", "compiled.npz", "metrics.jsonl"):
        assert (demo_folder / name).exists(), name


@pytest.mark.slow
def test_the_table_has_all_rows_and_columns(table):
    assert [row.name for row in table.rows] == ROWS
    assert [row.calls for row in table.rows] == [1, 3, 3, 5, 5, 2, 4, 2, 3, 4, 1, 2, 3, 7]
    assert list(COLUMNS) == [
        "calls",
        "accuracy",
        "agreement",
        "rel_l2",
        "output_rel_l2",
        "output_rmse",
        "row_error",
        "column_error",
        "milliseconds",
        "ratio",
    ]


@pytest.mark.slow
def test_the_teacher_row_agrees_with_itself(table):
    row = table.row("teacher")
    assert (row.agreement, row.rel_l2, row.output_rmse, row.ratio) == (1.0, 0.0, 0.0, 1.0)


@pytest.mark.slow
def test_each_row_balances_the_side_it_ends_on(table):
    for name, side in {
        "softmax swap": "row_error",
        "Sinkhorn S=2": "column_error",
        "Sinkhorn S=3": "row_error",
        "ASAP-0": "column_error",
        "ASAP": "column_error",
        "teacher": "column_error",
    }.items():
        assert getattr(table.row(name), side) < 1e-5, name
    assert table.row("softmax swap").column_error > 1e-3


@pytest.mark.slow
def test_more_sinkhorn_steps_of_one_parity_come_closer(table):
    errors = {name: table.row(name).rel_l2 for name in ROWS}
    assert errors["Sinkhorn S=4"] < errors["Sinkhorn S=2"]
    assert errors["Sinkhorn S=5"] < errors["Sinkhorn S=3"] < errors["softmax swap"]


def test_attention_columns_are_means_over_batches_and_layers(trained, test_examples, monkeypatch):
    monkeypatch.setattr(fidelity, "BATCH_SIZE", 30)
    reference = operators.teacher(trained.recipe, trained.variables)
    (softmax,) = operators.swaps(trained.recipe, trained.variables, budgets=())
    images = trained.recipe.inputs.prepare(test_examples)
    cases = fidelity.case_values([softmax], reference, trained.recipe, images)["softmax swap"]
    assert len(cases["rel_l2"]) == 4
    figures = fidelity.figures([softmax], reference, trained.recipe, test_examples)["softmax swap"]
    assert figures.cases == cases
    expected = []
    for start, layer in itertools.product((0, 30), (0, 1)):
        records = fidelity.capture(reference, images[start : start + 30])
        record = records[f"block_{layer}", "SinkhornAttention_0"]
        scores = np.einsum("bnhd,bmhd->bhnm", record.query, record.key) / np.sqrt(8)
        scores = scores.astype(np.float64)
        plan = np.exp(scores)
        softmax_plan = plan / plan.sum(-1, keepdims=True)
        for half in range(6):
            plan = plan / plan.sum(-1 - half % 2, keepdims=True)
        norm = lambda x: np.sqrt((x**2).sum((0, 2, 3)))
        expected.append((norm(softmax_plan - plan) / norm(plan)).mean())
    np.testing.assert_allclose(figures.mean("rel_l2"), np.mean(expected), rtol=1e-4)


def test_without_compiled_layers_the_asap_rows_are_left_out(trained, test_examples):
    table = fidelity.measure(
        trained.recipe, trained.variables, test_examples, budgets=(2,), rounds=1
    )
    assert [row.name for row in table.rows] == ["softmax swap", "Sinkhorn S=2", "teacher"]


@pytest.mark.slow
def test_the_table_is_written_with_its_facts(table, tmp_path):
    text, values = table.report().write(tmp_path, "fidelity")
    markdown = text.read_text()
    for words in (
        "| attention | calls | test accuracy | agreement with teacher | attention rel-l2 |",
        "time / teacher |",
        f"JAX {jax.__version__}",
        "cores",
        "40 test images",
        "1 cases",
        "- command: python -m train",
    ):
        assert words in markdown
    assert sum(line.startswith("| ") for line in markdown.splitlines()) == 2 + len(ROWS)
    stored = json.loads(values.read_text())
    assert [row["name"] for row in stored["rows"]] == ROWS
    assert stored["rows"][-1]["rel_l2"] == 0.0
    assert stored["facts"] == table.facts


def test_a_table_wider_than_the_console_loses_nothing():
    out = io.StringIO()
    console = rich.console.Console(file=out, width=40)
    name, cells = "ASAP, residual log-sum-exp fit, token bias (L=256)", ["0.123"] * 8
    Table(["attention", *"abcdefgh"], [[name, *cells]], "wide").print(console)
    assert out.getvalue().count("0.123") == 8
    assert name in out.getvalue()
    assert console.width == 40


@pytest.mark.slow
def test_the_table_prints_whole_in_100_columns(table):
    out = io.StringIO()
    table.report().print(rich.console.Console(file=out, width=100, soft_wrap=True))
    printed = out.getvalue()
    assert "…" not in printed
    assert all(name in printed for name in ROWS)


def test_both_endings_use_one_fit(trained, compiled):
    zero, full = operators.compiled(trained.recipe, compiled)
    for path in full.states:
        assert zero.states[path].closures == "one_sided"
        assert full.states[path].closures == "two_sided"
        assert zero.states[path].predictor is full.states[path].predictor


def test_calibration_images_are_drawn_once_each_and_normalised(trained, examples):
    batches = list(compile_teacher.calibration_batches(trained, examples, 100))
    assert [batch.shape for batch in batches] == [(20, 28, 28, 1)] * 5
    assert len({image.tobytes() for batch in batches for image in batch}) == 100
    assert batches[0].dtype == np.float32


def test_a_softmax_teacher_cannot_be_compiled(trained, examples):
    softmax = dataclasses.replace(
        trained, recipe=dataclasses.replace(trained.recipe, attention="softmax")
    )
    with pytest.raises(UserError, match="only Sinkhorn attention can be compiled"):
        compile_teacher.compile_teacher(softmax, examples, aj.Options())


def test_masked_tokens_are_not_part_of_the_marginals():
    record = aj.linen.SinkhornAttention  # only the fields of a record matter here
    fields = {"query": jnp.zeros((1, 3, 1, 2)), "key": jnp.zeros((1, 4, 1, 2))}
    mask = jnp.array([1, 1, 0])[:, None] * jnp.array([1, 1, 1, 0])
    record = type("Record", (), {**fields, "mask": mask[None, None]})
    query_valid, key_valid, target = fidelity.marginals(record, "balanced")
    assert query_valid.tolist() == [[[True, True, False]]]
    assert key_valid.tolist() == [[[True, True, True, False]]]
    np.testing.assert_allclose(target, 2 / 3, rtol=1e-6)
    assert fidelity.marginals(record, "unit")[2] == 1.0
    record.mask = None
    assert fidelity.marginals(record, "balanced") == (None, None, 0.75)


def test_times_are_medians_of_interleaved_calls(monkeypatch):
    order, clock = [], iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    times = timing.interleaved(
        {name: lambda name=name: order.append(name) for name in "abc"}, rounds=3
    )
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert times == {"a": 1000.0, "b": 1000.0, "c": 1000.0}


def test_the_picture_shows_the_same_head_under_three_operators(
    trained, compiled, test_examples, tmp_path
):
    panels, _, where = picture.panels(trained.recipe, compiled, test_examples)
    assert [panel.title.split(",")[0] for panel in panels] == [
        "teacher: Sinkhorn S=6",
        "Sinkhorn S=4",
        "ASAP",
    ]
    assert all(panel.weights.shape == (17, 17) for panel in panels)
    np.testing.assert_allclose(panels[0].weights.sum(0), 1, atol=1e-5)
    assert panels[0].rel_l2 == 0
    assert where.startswith("layer ")
    path = picture.draw(trained.recipe, compiled, test_examples, tmp_path / "plans.png")
    assert path.read_bytes().startswith(b"\x89PNG")
