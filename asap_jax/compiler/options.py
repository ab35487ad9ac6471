"""What a compile may choose, checked before any data are touched."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asap_jax import checks
from asap_jax.compiler.automatic_fit import AutoFit
from asap_jax.compiler.fit import Fit, check_closures
from asap_jax.compiler.paper_fit import PaperFit
from asap_jax.compiler.single_fit import THOROUGH

NAMED: dict[str, Fit] = {
    **{candidate.name: candidate for candidate in THOROUGH},
    "paper": PaperFit(),
    "auto": AutoFit(),
}
# Settings that were keywords of a compile before fits had a type.
_MOVED = {
    field.name: kind.__name__ for kind in (PaperFit, AutoFit) for field in dataclasses.fields(kind)
}


def explain_moved_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function``: a setting of a fit among its keywords is an error that says where to.

    The signature stays that of ``function``, and other unknown keywords raise as usual.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if name in _MOVED:
                raise TypeError(
                    f"{name} is a setting of a fit now: compile(..., "
                    f"fit={_MOVED[name]}({name}=...))"
                )
            if name == "recipe":
                shown = repr(value) if value in ("paper", "auto") else "..."
                raise TypeError(f"recipe is called fit now: compile(..., fit={shown})")
        return function(*args, **kwargs)

    return wrapped


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a compile, beside the model and the data.

    Attributes:
      fit: a ``PaperFit``, a ``Candidate`` (one way of predicting) or an ``AutoFit`` (the best of
        several), or its name: ``"paper"`` is the paper to the letter, ``"auto"`` the automatic
        choice, and others are those of ``CANDIDATES`` and ``THOROUGH``; ``"moments"`` fits
        moments of all tokens, head by head.
      closures: an int n (n closures from the dual of the side that makes them end as the teacher
        does), and for a ``PaperFit`` also ``"two_sided"`` (ASAP), ``"one_sided"`` (ASAP-0) or
        ``"none"`` (ablation: both duals predicted, no c-transform). When None ``"two_sided"`` for
        a ``PaperFit``; otherwise 2 or, and the report says so, as many as the teacher has steps to
        save.
      layers: paths of the layers to compile; all when None.
      holdout: share of the batches that the fit does not see and the report is measured on.
      seed: seed of slice directions and codebooks.

    Raises:
      ValueError, TypeError: a setting that is unknown, out of range or does not go with the fit; a
        setting of a fit is named with its place.
    """

    fit: str | Fit = "moments"
    closures: str | int | None = None
    layers: Sequence[str] | None = None
    holdout: float = 0.2
    seed: int = 0

    def __post_init__(self):
        set_field = lambda name, value: object.__setattr__(self, name, value)
        if not isinstance(self.fit, Fit):
            if not isinstance(self.fit, str):
                raise TypeError(
                    f"fit must be a PaperFit, a Candidate, an AutoFit or a name, got "
                    f"{checks.told(self.fit)}"
                )
            checks.one_of("fit", self.fit, NAMED)
            set_field("fit", NAMED[self.fit])
        if self.closures is not None:
            set_field("closures", check_closures(self.closures))
        self.fit.check_closures(
            self.fit.default_closures if self.closures is None else self.closures
        )
        if self.layers is not None:
            set_field("layers", checks.items("layers", self.layers))
        if self.layers == ():
            raise ValueError("layers=() chooses no layer; leave it out to compile all")
        if checks.non_negative_float("holdout", self.holdout) >= 1:
            raise ValueError(f"holdout must be in [0, 1), got {self.holdout}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)):
            raise TypeError(f"seed must be an int, got {self.seed!r}")


Options.__init__ = explain_moved_settings(Options.__init__)
