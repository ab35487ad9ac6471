"""Every Python block of the README runs as printed, in order, in one session."""

import pathlib
import re

import numpy as np

README = pathlib.Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_code_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 3
    names = {}
    outputs = []
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), names)
        outputs.append(np.asarray(names["y"]))
    assert "attention rel-l2" in capsys.readouterr().out
    assert all(np.isfinite(y).all() and y.shape == (8, 49, 64) for y in outputs)
    assert names["out"].shape == (2, 49, 4, 16)


def test_the_first_code_block_has_at_most_ten_lines():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 10
