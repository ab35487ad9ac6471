"""The script for accelerators at tiny sizes: every section has its lines, whatever fails."""

import dataclasses
import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import reference

from asap_jax.solvers import registry
from train.bench.gpu import checking, script, timed, work
from train.bench.gpu.attempts import OVER, Clock, Outcome, Task, attempts
from train.bench.gpu.cards import CARDS
from train.bench.gpu.checking import Setting
from train.bench.gpu.operators import OPERATORS, dense
from train.bench.gpu.page import Page

ONE = ("n=1, rows",)
TINY = script.Plan(
    outputs=(Setting(8, 12, "float32", "highest", masked=True, operators=("n=2, columns",)),),
    gradients=(Setting(8, 12, "bfloat16", "default", masked=True, operators=ONE),),
    ceiling=16,
    operators=("S=3",),
    first_lengths=(8,),
    lengths=(),
    tokens=16,
    paper={"paper, N=8": (1, 8, 2, 8)},
)
OLD = "log", "scaling", "streaming"


@pytest.fixture
def two_that_fail(monkeypatch):
    """Adds an implementation that refuses to run and one that crashes."""

    def failing(fault):
        def apply(p, start, log_target, closures):
            raise fault

        return registry.Implementation(apply)

    added = {
        "refuses": failing(ValueError("needs a card\nand more")),
        "crashes": failing(RuntimeError("an illegal | address")),
    }
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", registry.IMPLEMENTATIONS | added)
    monkeypatch.setattr(registry, "NAMES", (*registry.NAMES, *added))


def test_a_run_writes_every_section_and_the_reason_of_every_failure(
    two_that_fail, tmp_path, monkeypatch
):
    monkeypatch.setattr(timed, "ROUNDS", 1)
    monkeypatch.setattr(timed, "WINDOW", 0.0)
    script.run(minutes=5.0, out=tmp_path, plan=TINY)
    stored = json.loads((tmp_path / "gpu.json").read_text())
    sections = stored["sections"]
    assert {line["what"]: line["value"] for line in sections["Machine"]}["device"].endswith("(cpu)")
    for title, figures in (
        ("Outputs against float64", ("output", "row sums", "column sums")),
        ("Gradients against float64", ("query", "key", "value")),
    ):
        lines = {line["implementation"]: line for line in sections[title]}
        for name in OLD:
            assert lines[name]["result"] == "ok", lines[name]
            assert all(0 < lines[name][figure] < 0.05 for figure in figures)
        assert lines["refuses"]["result"] == "cannot run: needs a card"
        assert lines["crashes"]["result"] == "failed: RuntimeError: an illegal / address"
    assert max(line.get("output", 0) for line in sections["Outputs against float64"]) < 1e-5
    times = sections["Times"]
    assert {line["operator"] for line in times[:2]} == {"copy", "product"}
    for kind in ("forward", "forward + backward"):
        timed_by = {
            line["implementation"]: line["result"]
            for line in times
            if line["shape"] == "N=8, 2 heads of 64" and line["pass"] == kind
        }
        assert {timed_by[name] for name in (*OLD, "jax.nn, xla")} == {"ok"}
        assert timed_by["jax.nn, cudnn"].startswith("failed: ")
        assert timed_by["refuses"] == "cannot run: needs a card"
    on_paper = [line for line in times if line["shape"] == "paper, N=8"]
    assert [line["operator"] for line in on_paper][-2:] == ["ASAP-0, 32 slices", "ASAP, 32 slices"]
    assert all(line["ms"] > 0 and "floor ms" not in line for line in on_paper)
    assert on_paper[0]["over softmax"] == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "no floor: the peak rates of cpu are not known" in page
    assert "| refuses |" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


def test_the_page_says_what_was_not_run_and_needs_no_module_of_the_extra(tmp_path):
    missing = ("matplotlib", "tensorflow_datasets", "array_record", "tokenizers", "PIL")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))  # import raises ImportError
import train.reporting.progress as progress
progress.need = None
from train.cli import parser
sys.exit(parser.main(["bench", "gpu", "--minutes", "0", "--out", {str(tmp_path)!r}]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert {line["result"] for line in sections.pop("Machine")} == {"ok"}
    assert all(sections.values())
    assert {line["result"] for lines in sections.values() for line in lines} == {OVER}
    page = (tmp_path / "gpu.md").read_text()
    assert "| N=8192, 32 heads of 64 | forward | S=20 | scaling |" in page


def test_a_run_that_is_cut_off_leaves_the_page_so_far(monkeypatch, tmp_path):
    def cut(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(timed, "measure", cut)
    plan = dataclasses.replace(TINY, outputs=(), gradients=())
    with pytest.raises(KeyboardInterrupt):
        script.run(out=tmp_path, plan=plan)
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert sections["Machine"]
    assert sections["Times"] == []
    assert "version of jax" in (tmp_path / "gpu.md").read_text()


def test_tasks_that_fail_or_hang_do_not_stop_the_others(tmp_path):
    def fail(fault):
        raise fault

    works = {
        "hangs": lambda: time.sleep(5),
        "fails": lambda: fail(KeyError("x")),
        "memory": lambda: fail(RuntimeError("RESOURCE_EXHAUSTED: 90 GiB")),
        "works": lambda: {"value": 3.0},
    }
    tasks = [Task({"what": name}, work) for name, work in works.items()]
    page = Page("Title", [script.MACHINE], tmp_path)
    for outcome in attempts(tasks, Clock(1.0), workers=2, limit=0.3):
        page.add(script.MACHINE, outcome)
    results = {line["what"]: line["result"] for line in page.lines["Machine"]}
    assert results == {
        "hangs": "failed: no result after 0.3 s",
        "fails": "failed: KeyError: 'x'",
        "memory": "out of memory: RESOURCE_EXHAUSTED: 90 GiB",
        "works": "ok",
    }
    assert "| works | 3 | ok |" in (tmp_path / "gpu.md").read_text()


def test_no_task_is_started_after_its_share_of_the_time():
    task = Task({"what": "x"}, lambda: 1)
    assert list(attempts([task], Clock(0.0))) == [Outcome(task, reason=OVER)]
    assert list(attempts([task], Clock(1.0), share=0.0)) == [Outcome(task, reason=OVER)]
    assert list(attempts([task], Clock(1.0))) == [Outcome(task, 1)]


def test_floors_of_a_known_card():
    card = CARDS["NVIDIA H200"]
    shape = work.Shape(problems=64, length=4096, width=64, item_bytes=2)
    softmax = work.attention(shape, 1, on_rows=True)
    seconds = softmax.seconds(card, "bfloat16")
    entries = 64 * 4096**2
    assert seconds["products"] == pytest.approx(2 * 2 * 64 * entries / 989.5e12)
    assert seconds["exponentials"] == pytest.approx(entries / (16 * 132 * 1.98e9))
    assert seconds["memory"] == pytest.approx(4 * 64 * 4096 * 64 * 2 / 4.8e12)
    milliseconds, kind = softmax.floor(card, "bfloat16")
    assert (round(milliseconds, 3), kind) == (0.278, "products")
    # Twenty steps end on columns: 21 calls, each with all exponentials.
    twenty = work.attention(shape, 20, on_rows=False)
    milliseconds, kind = twenty.floor(card, "bfloat16")
    assert (round(milliseconds, 2), kind) == (round(21 * 1e3 * seconds["exponentials"], 2), kind)
    assert kind == "exponentials"
    # A stored kernel is written once, read in every step and once for the values.
    stored = work.attention(shape, 20, on_rows=False, stored="kernel")
    milliseconds, kind = stored.floor(card, "bfloat16")
    assert kind == "memory"
    moved = 22 * 4 * entries + 4 * 64 * 4096 * 64 * 2
    assert milliseconds == pytest.approx(1e3 * moved / 4.8e12)


def test_an_array_in_the_cache_is_not_moved():
    card = CARDS["NVIDIA H200"]
    part = work.Work(moved=4.8e9, kept=49e6, passes=1000)
    assert part.floor(card, "float32") == (1.0, "memory")
    assert dataclasses.replace(part, kept=51e6).floor(card, "float32")[0] > 10


def test_figures_hold_the_floor_of_the_card():
    row = timed.Row("", "S=3", 0.5, 2.0, 1.0, None, low=0.9, high=1.1)
    shape = work.Shape(64, 4096, 64, 2)
    least = timed.least(shape, "n=1, rows", "streaming")
    line = timed.Timed({}, abs, (), "bfloat16", least)
    found = timed.figures(row, line, CARDS["NVIDIA H200"], softmax=0.5)
    products = 4 * 64 * 64 * 4096**2 + 6 * 64 * 4096 * 64**2
    assert found["floor ms"] == f"{1e3 * products / 989.5e12:.3g} (products)"
    assert found["over floor"] == pytest.approx(1 / (1e3 * products / 989.5e12))
    assert found["over softmax"] == 2


@pytest.mark.parametrize("keys", [6, 4])
@pytest.mark.parametrize("name", ["S=3", "S=10"])
def test_the_formulas_are_those_of_the_reference(name, keys, rng):
    q, k, v = (rng.normal(size=(n, 5)) for n in (6, keys, keys))
    weights = reference.matrix_sinkhorn(
        reference.scores(q, k), num_steps=OPERATORS[name].half_steps
    )
    np.testing.assert_allclose(dense(np, OPERATORS[name], q, k, v), weights @ v, atol=1e-12)


def test_an_output_that_is_wrong_is_called_wrong(monkeypatch):
    setting = TINY.outputs[0]
    expected = checking.expected_output(setting, "n=2, columns")
    monkeypatch.setattr(checking, "expected_output", lambda *_: 1.01 * expected)
    line = checking.check_output(setting, "n=2, columns", "log")
    assert line["result"] == "WRONG: above 0.0001"
    assert checking.verdict(float("nan"), 1.0) == "WRONG: above 1"


def test_settings_hold_every_pair_of_properties():
    rows = [(s.width, s.length, s.dtype, s.precision, s.masked) for s in script.FULL.outputs]
    for i in range(5):
        for j in range(i):
            assert len({(row[i], row[j]) for row in rows}) == 4, (i, j)


def test_projected_attention_is_attention_between_projections():
    function = lambda q, k, v: q + 2 * k + 3 * v
    x = jax.random.normal(jax.random.key(2), (1, 3, timed.WIDTH))
    attend, weights = timed.projected(function), timed.projection_weights(2, 4)
    assert attend(x, *weights).shape == x.shape
    twice = attend(2 * x, *weights)
    np.testing.assert_allclose(twice, 2 * attend(x, *weights), rtol=1e-3, atol=1e-3)
