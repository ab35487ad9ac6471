"""Every Python block of the README runs as printed, each by itself."""

import pathlib
import re

import numpy as np
import pytest

README = pathlib.Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
SHAPES = [(8, 49, 64)] * 4 + [(8, 49, 4, 16)]


def test_every_block_is_tested():
    assert len(BLOCKS) == len(SHAPES)


@pytest.mark.parametrize(("block", "shape"), list(zip(BLOCKS, SHAPES, strict=False)))
def test_code_block_runs_alone(block, shape, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, str(README), "exec"), names)
    out = np.asarray(names["y"] if "y" in names else names["out"])
    assert out.shape == shape
    assert np.isfinite(out).all()
    if "report" in block:
        assert "attention rel-l2" in capsys.readouterr().out


def test_the_first_code_block_has_at_most_ten_lines():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 10
