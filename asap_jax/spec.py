"""The settings of a finite-budget Sinkhorn layer, as one hashable value."""

from __future__ import annotations

import dataclasses

import jax

from asap_jax import checks

KEY_MASSES = ("balanced", "unit")
PADDINGS = ("self", "none")
ENDINGS = ("teacher", "row")
EXPECTED_SPEC = "a SinkhornSpec, as in SinkhornAttention(SinkhornSpec(num_steps=10))"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SinkhornSpec:
    """Settings of one finite-budget Sinkhorn attention layer (paper, Background).

    Frozen, hashable and a static pytree: ``jax.jit`` takes it without ``static_argnames``.

    Attributes:
      num_steps: S >= 1, the number of half-normalisations, rows first. S = 1 is row softmax;
        odd S ends on rows, even S on columns. There is no early stop.
      epsilon: entropic regularisation > 0; the kernel is ``exp(scores / epsilon)``.
      key_mass: target column sum of every active key, attention scale. ``"balanced"``: active
        queries / active keys, so that both marginals can hold; ``"unit"``: 1, the paper's
        padded-text convention.
      padding: which tokens are used for features and regression. ``"self"`` (self-attention):
        tokens active as query and as key; ``"none"`` (cross-attention): every active query and
        key. Unequal numbers of queries and keys are always treated as ``"none"``.
      scale: score scale > 0, or None for ``1 / sqrt(head_dim)``.

    Raises:
      TypeError: a setting of the wrong type.
      ValueError: a setting out of range.

    Example:
      >>> spec = SinkhornSpec(num_steps=10)
      >>> spec.last_step
      'column'
      >>> spec.ended("row").num_steps
      11
    """

    num_steps: int = 10
    epsilon: float = 1.0
    key_mass: str = "balanced"
    padding: str = "self"
    scale: float | None = None

    def __post_init__(self):
        set_field = lambda name, value: object.__setattr__(self, name, value)
        set_field("num_steps", checks.positive_int("num_steps", self.num_steps))
        set_field("epsilon", checks.score_factor("epsilon", self.epsilon))
        if self.scale is not None:
            set_field("scale", checks.score_factor("scale", self.scale))
        checks.one_of("key_mass", self.key_mass, KEY_MASSES)
        checks.one_of("padding", self.padding, PADDINGS)

    def with_padding(self, padding: str | None) -> SinkhornSpec:
        """The spec with this ``padding``; the same spec for None."""
        return self if padding is None else dataclasses.replace(self, padding=padding)

    def ended(self, ending: str) -> SinkhornSpec:
        """The spec whose last steps the closures of a layer repeat.

        ``"row"`` continues a column-ending teacher by one row step; otherwise it is this spec.
        """
        checks.one_of("ending", ending, ENDINGS)
        extra = ending == "row" and self.last_step == "column"
        return dataclasses.replace(self, num_steps=self.num_steps + 1) if extra else self

    @property
    def last_step(self) -> str:
        """``"row"`` for odd ``num_steps``, ``"column"`` for even."""
        return "row" if self.num_steps % 2 else "column"

    def side_before_end(self, before_end: int) -> str:
        """``"query"`` or ``"key"``: which dual step ``num_steps - before_end`` computes."""
        return "query" if (self.num_steps - before_end) % 2 else "key"
