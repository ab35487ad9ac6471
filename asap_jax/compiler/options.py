"""The settings of a compile, checked before any data are read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from asap_jax import checks
from asap_jax.compiler.automatic_fit import AutoFit
from asap_jax.compiler.fit import Fit, check_closures
from asap_jax.compiler.paper_fit import PaperFit
from asap_jax.compiler.single_fit import THOROUGH
from asap_jax.spec import ENDINGS

NAMED: dict[str, Fit] = {
    **{candidate.name: candidate for candidate in THOROUGH},
    "paper": PaperFit(),
    "auto": AutoFit(),
}
_FIT_SETTINGS = {
    field.name: kind.__name__ for kind in (PaperFit, AutoFit) for field in dataclasses.fields(kind)
}
_P = ParamSpec("_P")
_R = TypeVar("_R")


def explain_fit_settings(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps ``function``: a keyword of an older version raises a TypeError with its new place.

    Other unknown keywords raise as usual.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "recipe" in kwargs:
            value = kwargs["recipe"]
            raise TypeError(f"recipe is called fit now: compile(..., fit={value!r})")
        for name in kwargs:
            if name in _FIT_SETTINGS:
                fit = f"{_FIT_SETTINGS[name]}({name}=...)"
                raise TypeError(f"{name} is a setting of a fit: compile(..., fit={fit})")
        return function(*args, **kwargs)

    return wrapped


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a compile other than the model and the data.

    Attributes:
      fit: a ``PaperFit``, a ``Candidate`` (one way to predict) or an ``AutoFit`` (the best of
        several candidates), or a name: ``"paper"`` is ``PaperFit()``, ``"auto"`` is ``AutoFit()``,
        and a name from ``CANDIDATES`` or ``THOROUGH`` is that candidate. ``"moments"`` fits
        moments of all tokens, head by head.
      closures: an int n: n closures, from the side with which they end as the teacher does. A
        ``PaperFit`` also takes ``"two_sided"`` (ASAP), ``"one_sided"`` (ASAP-0) and ``"none"``
        (ablation: both duals predicted, no c-transform). None is ``"two_sided"`` for a
        ``PaperFit`` and otherwise 2, or 1 for a teacher of two steps (the report mentions that) and
        for ``ending="row"``.
      ending: ``"teacher"``, or ``"row"``: the closures end on rows even if the teacher ends on
        columns, see ``asap_attention``. One closure is then one softmax attention.
      layers: paths of the layers to compile; all when None.
      holdout: share of the batches that the fit does not see; the report is measured on them. At
        most 100 batches are held out; they stay in memory.
      seed: seed of slice directions and codebooks.

    Raises:
      ValueError, TypeError: a setting that is unknown, out of range or does not fit the others.
    """

    fit: str | Fit = "moments"
    closures: str | int | None = None
    ending: str = "teacher"
    layers: Sequence[str] | None = None
    holdout: float = 0.2
    seed: int = 0

    def __post_init__(self):
        set_field = lambda name, value: object.__setattr__(self, name, value)
        fit = named_fit(self.fit)
        set_field("fit", fit)
        if self.closures is not None:
            set_field("closures", check_closures(self.closures))
        checks.one_of("ending", self.ending, ENDINGS)
        closures = fit.default(self.ending) if self.closures is None else self.closures
        fit.check_closures(closures)
        if self.ending == "row" and closures in ("one_sided", "none"):
            raise ValueError(f"closures={closures!r} does not end on rows, got ending='row'")
        if self.layers is not None:
            set_field("layers", checks.items("layers", self.layers))
        if self.layers == ():
            raise ValueError("layers=() chooses no layer; leave it out to compile all")
        if checks.non_negative_float("holdout", self.holdout) >= 1:
            raise ValueError(f"holdout must be in [0, 1), got {self.holdout}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)):
            raise TypeError(f"seed must be an int, got {self.seed!r}")


# dataclasses generates __init__, so it can only be wrapped afterwards.
Options.__init__ = explain_fit_settings(Options.__init__)  # type: ignore[method-assign]


def named_fit(fit: str | Fit) -> Fit:
    """The fit of a name; a Fit itself is returned unchanged.

    Raises:
      ValueError: an unknown name.
      TypeError: neither a name nor a Fit.
    """
    if isinstance(fit, Fit):
        return fit
    checks.instance("fit", fit, str, "a PaperFit, a Candidate, an AutoFit or a name")
    checks.one_of("fit", fit, NAMED)
    return NAMED[fit]
