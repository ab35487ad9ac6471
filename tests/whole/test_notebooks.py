"""The notebooks run from top to bottom and are stored without outputs.

They run in this process, so that they share its imports and compiled programs; `make docs` runs
them in Jupyter.
"""

import json
import pathlib
import sys
import warnings

import jax
import matplotlib.pyplot as plt
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
COMPILING = ("2_", "3_", "4_", "5_")
"""Notebooks that compile models: `make docs` runs them too, and stops at any error."""


def cells(name):
    """The code cells of a notebook."""
    notebook = json.loads((FOLDER / name).read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_notebooks_are_numbered():
    assert [name[0] for name in NOTEBOOKS] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_have_no_stored_outputs(name):
    for cell in cells(name):
        assert not cell["outputs"]
        assert cell["execution_count"] is None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith(COMPILING) else [])
        for name in NOTEBOOKS
    ],
)
def test_notebook_runs_and_draws(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    monkeypatch.chdir(FOLDER)
    drawn = []

    def show():
        for number in plt.get_fignums():
            figure = plt.figure(number)
            figure.canvas.draw()  # layout and text too
            drawn.append(len(figure.axes))
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    plt.switch_backend("agg")
    sources = ["".join(cell["source"]) for cell in cells(name)]
    # Training is slow without XLA's optimisations; what else there is, is compiled faster without.
    trains = any("import small_model" in source for source in sources)
    jax.config.update("jax_disable_most_optimizations", not trains)
    names = {}
    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.simplefilter("default")  # as for a user
        for index, source in enumerate(sources):
            exec(compile(source, f"{name}, code cell {index}", "exec"), names)
    assert drawn
    assert all(drawn)
