"""docs/trust.md names tests that exist, and the library's own messages."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROWS = [
    line.strip("|").split("|")
    for line in (ROOT / "docs" / "trust.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| input", "| damage", "| event"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_every_row_names_its_tests(row):
    files = re.findall(r"`([^`]+)`", row[-1])
    assert files
    assert all((ROOT / "tests" / file).is_file() for file in files)


@pytest.mark.parametrize(
    "message",
    ["not a complete asap_jax file", "do not match their digest", "which save never does"],
)
def test_quoted_messages_are_in_the_library_and_on_the_page(message):
    files = (ROOT / "asap_jax" / "artifact").glob("*.py")
    assert any(message in file.read_text() for file in files)
    assert message in (ROOT / "docs" / "trust.md").read_text()
