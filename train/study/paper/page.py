"""The results page: every table that exists in a folder, and the paper's claims."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from train.study.paper import claims
from train.study.paper.catalogue import TABLES

FILE = "README.md"
INTRODUCTION = (
    "Every table is one command, and this page is made from their JSON files by `python -m train "
    "table --page`. `python -m train table --list` says what each trains and how long it takes."
)


def read(folder: pathlib.Path) -> dict[str, Mapping[str, Any]]:
    """The JSON values of the tables in a folder, by table name."""
    found = {}
    for name in TABLES:
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
    return found


def text(results: Mapping[str, Mapping[str, Any]], folder: pathlib.Path) -> str:
    """The page as Markdown."""
    parts = [
        "# The paper's tables",
        INTRODUCTION,
        "## Claims",
        _claims(results),
        "## Tables",
        _overview(results),
    ]
    parts += [_section(name, result, folder) for name, result in results.items()]
    return "\n\n".join(parts) + "\n"


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes the page of a folder and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    draft = path.with_name(f"{FILE}.new")
    draft.write_text(text(read(folder), folder))
    draft.replace(path)
    return path


def _claims(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| claim | verdict | figures |", "| --- | --- | --- |"]
    for one in claims.check(results):
        lines.append(f"| {one.text} | {one.verdict} | {one.figures} |")
    return "\n".join(lines)


def _overview(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| table | in the paper | preset | seeds | date | missing |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, entry in TABLES.items():
        if name not in results:
            lines.append(f"| {name} | {entry.summary} | - | - | - | not run yet |")
            continue
        result = results[name]
        facts, seeds = result["facts"], ", ".join(map(str, result["seeds"]))
        missing = "; ".join(result["missing"]) or "nothing"
        link = f"[{name}]({name}.md)"
        shown = (link, result["label"], result["preset"], seeds, facts["date"], missing)
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _section(name: str, result: Mapping[str, Any], folder: pathlib.Path) -> str:
    """One table: its picture and the facts that let it be repeated; the cells are in its file."""
    facts = result["facts"]
    lines = [f"### {result['title']}"]
    if (folder / f"{name}.png").exists():
        lines.append(f"![{result['title']}]({name}.png)")
    counts = [f"- {key}: {facts[key]}" for key in ("teachers", "cases", "accuracy") if key in facts]
    shown = [f"- all cells: [{name}.md]({name}.md)", f"- command: `{facts['command']}`", *counts]
    shown += [f"- {key}: {facts[key]}" for key in ("preset", "seeds", "date", "machine", "missing")]
    lines.append("\n".join(shown))
    return "\n\n".join(lines)
