"""Who may import whom: the tables of docs/architecture.md, checked against the imports."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("asap_jax", "train")
# The outermost modules may import everything.
OUTERMOST = {"__init__", "__main__"}


@functools.cache
def modules(package):
    """Dotted name to syntax tree of every module of a package."""
    trees = {}
    for path in (ROOT / package).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        trees[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return trees


def imported(tree, names):
    """The modules among `names` that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in names else node.module)
    return found & names


def entry(name):
    """The entry at the top of the package that a module belongs to."""
    return name.split(".")[1] if "." in name else "__init__"


def edges(package):
    """Pairs of different entries of a package, the importing one first."""
    trees = modules(package)
    names = set(trees)
    return {
        (entry(name), entry(other))
        for name, tree in trees.items()
        for other in imported(tree, names)
        if entry(name) != entry(other)
    }


def table(package):
    """Entry to its row in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = text.split(f"| `{package}/` |")[1].split("\n\n")[0].splitlines()[2:]
    return {
        name.rstrip("/"): number
        for number, row in enumerate(rows)
        for name in re.findall(r"`([a-z_]+/?)`", row.split("|")[1])
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_every_entry_has_a_row(package):
    entries = {entry(name) for name in modules(package)}
    assert entries - OUTERMOST == set(table(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_entries_import_only_those_above_them(package):
    row = table(package)
    upward = {
        (a, b)
        for a, b in edges(package)
        if a not in OUTERMOST and not (b in row and row[b] < row[a])
    }
    assert upward == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_cycles(package):
    trees = modules(package)
    names = set(trees)
    graph = {name: imported(tree, names) - {name} for name, tree in trees.items()}
    done = set()
    while len(done) < len(graph):
        free = {name for name, needs in graph.items() if name not in done and needs <= done}
        assert free, f"in or behind a circle: {sorted(set(graph) - done)}"
        done |= free


def test_the_library_does_not_import_train():
    foreign = set(modules("train"))
    for name, tree in modules("asap_jax").items():
        assert not imported(tree, foreign), name


def test_packages_have_few_top_level_entries():
    count = lambda package: len({entry(name) for name in modules(package)})
    assert count("asap_jax") <= 20
    assert count("train") <= 12
