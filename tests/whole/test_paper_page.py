"""docs/paper.md names functions, tests and tables that exist."""

import functools
import importlib
import pathlib
import re

import pytest

from train.study.paper.catalogue import TABLES

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text()
TESTS = (ROOT / "tests" / "whole" / "test_propositions.py").read_text()


def section(title):
    """The rows of a section's table, as lists of cells."""
    text = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    assert rows
    return rows


def names(cell):
    """The names in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def found(name):
    """The object of the library with this dotted name."""
    *folders, last = name.split(".")
    module = importlib.import_module(".".join(["asap_jax", *folders]))
    return getattr(module, last)


@pytest.mark.parametrize("row", section("Equations"), ids=lambda row: row[0].strip())
def test_every_equation_has_functions_and_tests(row):
    _, _, functions, tests = row
    assert names(functions)
    assert all(callable(found(name)) for name in names(functions))
    assert names(tests)
    assert all((ROOT / "tests" / name).is_file() for name in names(tests))


def test_every_proposition_has_its_tests():
    rows = section("Propositions")
    assert len(rows) == 18
    for _, tests in rows:
        assert names(tests)
        assert all(f"\ndef {name}(" in TESTS for name in names(tests))


def test_every_table_of_the_command_line_is_on_the_page():
    listed = functools.reduce(
        set.union, (set(names(row[1])) for row in section("Tables and figures"))
    )
    assert set(TABLES) <= listed
