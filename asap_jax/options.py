"""What a compile may choose, checked before any data are touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asap_jax import attention, checks
from asap_jax.spec import SinkhornSpec

RECIPES = ("paper",)
OBJECTIVES = ("ls", "kl")
COEFFICIENTS = ("pooled", "per_head")


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a compile; see ``asap_jax.linen.compile`` for each.

    Raises:
      ValueError, TypeError: a setting that is unknown or out of range, named.
    """

    holdout: float = 0.2
    seed: int = 0
    layers: Sequence[str] | None = None
    recipe: str = "paper"
    objective: str = "ls"
    num_slices: int = 32
    closures: str | int = "two_sided"
    ridge: float = 1e-3
    coefficients: str = "pooled"
    in_memory: bool = True

    def __post_init__(self):
        checks.one_of("recipe", self.recipe, RECIPES)
        checks.one_of("objective", self.objective, OBJECTIVES)
        checks.one_of("coefficients", self.coefficients, COEFFICIENTS)
        checks.static_bool("in_memory", self.in_memory)
        checks.positive_int("num_slices", self.num_slices)
        object.__setattr__(self, "ridge", checks.non_negative_float("ridge", self.ridge))
        if checks.non_negative_float("holdout", self.holdout) >= 1:
            raise ValueError(f"holdout must be in [0, 1), got {self.holdout}")
        if isinstance(self.closures, str):
            checks.one_of("closures", self.closures, attention.CLOSURES)
        else:
            checks.positive_int("closures", self.closures)
            if self.objective == "kl":
                raise ValueError(
                    f"objective='kl' fits the source dual through a key closure: closures must be "
                    f"one of {attention.CLOSURES}, got {self.closures}"
                )
        if isinstance(self.layers, str):
            raise TypeError(f"layers must be a sequence of paths, got the string {self.layers!r}")

    @property
    def before_end(self) -> int | None:
        """Which dual is predicted: None (closure-ready source), or n (aligned)."""
        return None if isinstance(self.closures, str) else int(self.closures)

    def side(self, spec: SinkhornSpec) -> str:
        """The side of the predicted dual."""
        return "query" if self.before_end is None else spec.side_before_end(self.before_end)

    def refuse(self, path: str, spec: SinkhornSpec) -> None:
        """Raises ValueError for a teacher that these options cannot compile, with the reason."""
        if spec.num_steps == 1:
            raise ValueError(
                f"layer {path!r} has num_steps=1, which is row softmax: it has no dual before its "
                f"only step, so there is nothing to compile; leave it out with layers=[...]"
            )
        if self.before_end is not None and self.before_end >= spec.num_steps:
            raise ValueError(
                f"closures={self.closures} needs a teacher of more steps than layer {path!r} "
                f"with num_steps={spec.num_steps}"
            )
