"""Runs: what a table knows without checkpoint and data, and which data the seeds share."""

import dataclasses

import pytest

from train.data import text
from train.recipes import catalogue as recipes
from train.study.paper import runs
from train.study.paper.runs import Data


@pytest.fixture
def loaded(monkeypatch):
    """The folders for which data are read; each gets a tokenizer unless it has one."""
    folders = []

    def load(recipe, data_dir, path):
        folders.append(path.name)
        path.mkdir(parents=True, exist_ok=True)
        if recipe.is_text and not (path / text.FILE).exists():
            (path / text.FILE).write_text("pieces")
        return object()

    monkeypatch.setattr(runs, "load_data", load)
    monkeypatch.setattr(runs, "announce", lambda split: None)
    return folders


def test_seeds_of_a_text_recipe_share_data_and_tokenizer(loaded, tmp_path):
    data, recipe = Data(None), recipes.find("ag_news", "small")
    first = data.split(recipe, tmp_path / "a")
    assert data.split(recipe, tmp_path / "b") is first
    assert (tmp_path / "b" / text.FILE).read_text() == "pieces"
    assert loaded == ["a"]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / text.FILE).write_text("other pieces")
    assert data.split(recipe, tmp_path / "c") is not first
    assert loaded == ["a", "c"]


def test_another_preparation_of_the_same_data_is_read_again(loaded, tmp_path):
    data, recipe = Data(None), recipes.find("mnist", "small")
    first = data.split(recipe, tmp_path / "a")
    patches = dataclasses.replace(recipe.model, patch_size=14)
    assert data.split(dataclasses.replace(recipe, model=patches), tmp_path / "b") is first
    moved = dataclasses.replace(recipe.inputs, shift=3)
    assert data.split(dataclasses.replace(recipe, inputs=moved), tmp_path / "c") is not first
    assert loaded == ["a", "c"]


def test_descriptions_of_a_recipe_do_not_change_a_run():
    recipe = recipes.find("mnist", "small")
    described = dataclasses.replace(recipe, summary="x", cost="y", expected="z")
    assert runs.compared(described) == runs.compared(recipe)
    longer = dataclasses.replace(recipe, epochs=recipe.epochs + 1)
    assert runs.compared(longer) != runs.compared(recipe)
