"""Makes and writes matplotlib figures."""

import pathlib
from typing import Any

from train.runtime.errors import need

INK, SOFT = "#1b2432", "#8a94a6"


def blank(width: float, height: float, **settings) -> Any:
    """A white matplotlib figure; ``width`` and ``height`` are in inches."""
    figure = need("matplotlib.figure").Figure
    return figure(figsize=(width, height), dpi=150, facecolor="white", **settings)


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Writes a figure as PNG and returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
