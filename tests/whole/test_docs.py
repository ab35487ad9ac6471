"""The documentation: links lead somewhere, public names have a page, code blocks run."""

import contextlib
import doctest
import importlib
import json
import pathlib
import re

import numpy as np
import pytest

import asap_jax as aj

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "api").glob("*.md"))]
GUIDES = ("from-softmax.md", "padded-text.md", "fits.md", "one-call.md")
EXAMPLES = ("asap_jax.metrics", "asap_jax.scores", "asap_jax.spec", "asap_jax.solvers.ctransform")
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def text_of(page):
    """A page's Markdown without code; of a notebook, the cells of text."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return BLOCK.sub("", page.read_text())


def anchors(page):
    """The anchors that a code host and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if not link.startswith(("http:", "https:")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("module", [aj, aj.linen, aj.nnx], ids=lambda module: module.__name__)
def test_every_public_name_has_an_entry(module):
    listed = []
    for page in (DOCS / "api").glob("*.md"):
        for part in page.read_text().split(".. currentmodule:: ")[1:]:
            if part.split()[0] == module.__name__:
                listed += re.findall(r"^\.\. auto\w+:: (\w+)", part, re.MULTILINE)
    modules = {"linen", "metrics", "nnx"}  # each has a page of its own
    assert sorted(listed) == sorted(set(module.__all__) - modules)


@pytest.mark.parametrize("name", GUIDES)
def test_code_blocks_of_guides_run_alone(name):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        names = {}
        with contextlib.redirect_stdout(None):
            exec(compile(block, name, "exec"), names)
        if "y" in names:
            assert np.isfinite(np.asarray(names["y"])).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
