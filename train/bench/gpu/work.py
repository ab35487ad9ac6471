"""The least work of an attention layer, and the time that a card needs for it at its peak rates."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable

from train.bench.gpu.cards import Card


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call must do at least.

    Attributes:
      moved: bytes read from or written to memory.
      kept: bytes of one array that is passed over ``passes`` times. They count only if the array
        is larger than the card's cache.
      passes: see ``kept``.
      products: operations in matrix products.
      exponentials: their number.
    """

    moved: float = 0.0
    kept: float = 0.0
    passes: int = 0
    products: float = 0.0
    exponentials: float = 0.0

    def seconds(self, card: Card, dtype: str) -> dict[str, float]:
        """Time of each kind of work at the peak rates of ``card``, for inputs of ``dtype``."""
        kept = self.kept * self.passes if self.kept > card.cache else 0.0
        return {
            "memory": (self.moved + kept) / card.bandwidth,
            "products": self.products / card.products(dtype),
            "exponentials": self.exponentials / card.exponentials,
        }

    def floor(self, card: Card, dtype: str) -> tuple[float, str]:
        """Milliseconds if all kinds of work overlap, and the kind that takes longest."""
        seconds = self.seconds(card, dtype)
        longest = max(seconds, key=lambda kind: seconds[kind])
        return 1e3 * seconds[longest], longest


@dataclasses.dataclass(frozen=True)
class Shape:
    """Self-attention of ``problems`` (batch times heads) of ``length`` tokens, width ``width``."""

    problems: int
    length: int
    width: int
    item_bytes: int

    @property
    def pairs(self) -> float:
        """Scores of all problems."""
        return float(self.problems) * self.length**2

    @property
    def array_bytes(self) -> float:
        """Bytes of the queries, of the keys, of the values or of the output."""
        return float(self.problems) * self.length * self.width * self.item_bytes


def attention(
    shape: Shape, half_steps: int, *, on_rows: bool, stored: str = "", gradient: bool = False
) -> Work:
    """The work of ``half_steps`` closures and of the product with the values.

    One closure that ends on rows is softmax attention. The first reading and the last writing of
    every input, output and gradient are counted.

    Args:
      shape: the layer.
      half_steps: number of closures.
      on_rows: whether the last one is on rows. Otherwise the product with the values is one more
        pass over the scores, because the last scaling of a column is known only at its end.
      stored: what is kept of N x N scores: ``""`` for nothing, so that every pass computes all
        scores and exponentials again; ``"kernel"`` for exponentials, ``"scores"`` for scores, both
        in float32.
      gradient: with the gradient. In a backward pass a closure takes three products (scores, and
        those for queries and for keys), the product with the values takes five.
    """
    product = 2.0 * shape.pairs * shape.width
    arrays = (8 if gradient else 4) * shape.array_bytes
    if stored:
        passes = half_steps + 2 + (half_steps + 4 if gradient else 0)
        evaluated = passes - 1 if stored == "scores" else 1
        return Work(
            moved=arrays,
            kept=4 * shape.pairs,
            passes=passes,
            products=product * (6 if gradient else 2),
            exponentials=shape.pairs * evaluated,
        )
    calls = half_steps if on_rows else half_steps + 1
    products = calls + 1 + (3 * (calls - 1) + 5 if gradient else 0)
    exponentials = calls * (2 if gradient else 1)
    return Work(moved=arrays, products=product * products, exponentials=shape.pairs * exponentials)


def moments(shape: Shape, *, gradient: bool = False) -> Work:
    """A dual from moments: two covariances and a quadratic form."""
    products = 6.0 * shape.problems * shape.length * shape.width**2
    return Work(products=products * (3 if gradient else 1))


def slices(shape: Shape, count: int) -> Work:
    """A dual from slices: the projections on them, without the sorting."""
    return Work(products=4.0 * shape.problems * shape.length * shape.width * count)


def projections(shape: Shape, tokens: int, model: int) -> Work:
    """Four projections between a model of width ``model`` and the heads, for ``tokens`` tokens."""
    inner = shape.array_bytes / tokens / shape.item_bytes
    moved = shape.item_bytes * (2.0 * tokens * model + 4 * model * inner)
    return Work(moved=moved, products=8.0 * tokens * model * inner)


def total(parts: Iterable[Work]) -> Work:
    """Work of one call that does all parts; at most one of them keeps an array."""
    fields = [field.name for field in dataclasses.fields(Work)]
    return functools.reduce(
        lambda a, b: Work(*(operator.add(getattr(a, f), getattr(b, f)) for f in fields)), parts
    )
