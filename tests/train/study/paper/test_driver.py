"""All tables: one that fails does not stop the others; the command line; the page."""

import json

import pytest

from train.cli import parser, table_command
from train.reporting.table import Table
from train.runtime.errors import Stopped, UserError
from train.study.paper import catalogue, driver
from train.study.paper.result import Result

NAMES = (
    *("operator_main", "operator_marginal", "operator_ablation", "amortization_design", "text"),
    *("mnist_replacement", "cifar", "catsdogs", "imdb_resources", "catsdogs_resources"),
    *(
        "runtime_speedup",
        "flashsinkhorn_control",
        "esp_training_sequence",
        "esp_slice_count",
        "esp_soft_hard_switch",
    ),
)


def test_the_list_names_all_tables_with_what_they_train_and_their_time(capsys):
    assert parser.main(["table", "--list"]) == 0
    printed = capsys.readouterr().out
    for name in NAMES:
        assert name in printed
    assert printed.count("  trains: ") == printed.count("about ") == len(catalogue.TABLES)
    # At most 45 is the aim. The frozen tables, whose three teachers take half an hour, miss it, and
    # so do cifar, whose ESP model alone takes 18 minutes, and MNIST, which has nine teachers.
    over = {name for name, entry in catalogue.TABLES.items() if entry.minutes > 45}
    assert over == {
        "operator_main",
        "operator_marginal",
        "amortization_design",
        "cifar",
        "mnist_replacement",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["table"], "give one of: a table NAME, --list, --page"),
        (["table", "nothing"], "no table 'nothing': choose one of operator_main"),
        (["table", "text"], "table text needs --dataset: one of ag_news"),
        (["table", "cifar", "--dataset", "yelp"], "--dataset is for table text, not for cifar"),
    ],
)
def test_a_wrong_command_is_one_line(given, message, capsys):
    assert parser.main(given) == 1
    assert message in capsys.readouterr().err


def _entry(make):
    return catalogue.Entry("a table", "nothing", 1, make)


def _good(models, report):
    report("at work")
    return Result("good", "tab:operator_main", "Good", [Table(["a"], [["1"]])], {}, {"rows": []})


def _bad(models, report):
    raise UserError("no such recipe")


def _broken(models, report):
    raise ZeroDivisionError("a fault")


def test_equal_figures_keep_the_date_and_the_command_of_their_measurement(tmp_path, monkeypatch):
    rows = [["1"]]
    make = lambda value: Result("t", "tab:x", "T", [Table(["a"], rows)], {}, {"rows": [value]})
    facts = lambda: json.loads((tmp_path / "t.json").read_text())["facts"]
    monkeypatch.setattr("sys.argv", ["train", "table", "t"])
    make(0.1).write(tmp_path, "small", (0,))
    first = facts()
    monkeypatch.setattr("time.strftime", lambda *args: "2000-01-01")
    monkeypatch.setattr("sys.argv", ["train", "all"])
    make(0.1).write(tmp_path, "small", (0,))
    assert facts() == first
    assert f"date: {first['date']}\n" in (tmp_path / "t.md").read_text()
    today = ("2000-01-01", "python -m train all")
    make(0.2).write(tmp_path, "small", (0,))
    assert (facts()["date"], facts()["command"]) == today
    (tmp_path / "t.json").write_text("damaged")
    make(0.1).write(tmp_path, "small", (0,))
    assert (facts()["date"], facts()["command"]) == today


@pytest.fixture
def tables(monkeypatch):
    """Three tables in the place of all."""
    chosen = {"bad": _entry(_bad), "broken": _entry(_broken), "good": _entry(_good)}
    for module in (catalogue, driver, table_command):
        monkeypatch.setattr(module, "TABLES", chosen)
    return chosen


def test_all_goes_on_after_a_failure_and_ends_with_status_1(tables, tmp_path, capsys):
    out = tmp_path / "out"
    assert parser.main(["all", "--out", str(out), "--runs", str(tmp_path), "--seeds", "4"]) == 1
    printed = capsys.readouterr()
    assert "bad (no such recipe)" in printed.err
    assert "broken (ZeroDivisionError: a fault)" in printed.err
    assert "table 3 of 3: good" in printed.out
    stored = json.loads((out / "good.json").read_text())
    assert (stored["preset"], stored["seeds"], stored["missing"]) == ("small", [4], [])


def test_all_stops_when_the_user_stops_it(tables, tmp_path, monkeypatch):
    def stop(models, report):
        raise Stopped("stopped and saved at step 3")

    monkeypatch.setitem(tables, "bad", _entry(stop))
    monkeypatch.setitem(tables, "good", _entry(lambda *given: pytest.fail("went on")))
    assert parser.main(["all", "--out", str(tmp_path), "--runs", str(tmp_path)]) == 130


def test_the_page_shows_what_is_there_and_marks_what_is_missing(tmp_path, capsys):
    assert parser.main(["table", "--page", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.count("not run yet") == len(catalogue.TABLES)
    assert "not measured" in text
