"""What a compile may choose, checked before any data are touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from asap_jax import checks
from asap_jax.attention import functions
from asap_jax.features import FAMILIES, check_families, directions
from asap_jax.fitting.candidates import Candidate
from asap_jax.fitting.least_squares import RIDGE_SCALES
from asap_jax.predictor.predictor import BASELINES
from asap_jax.spec import PADDINGS, SinkhornSpec

RECIPES = ("paper", "auto")
OBJECTIVES = ("ls", "kl")
COEFFICIENTS = ("pooled", "per_head", "shared")
ROWS = ("active", "all")
WEIGHTINGS = ("none", "gauss_newton")
LADDER = (1, 2, 3)
# Settings that the automatic recipe takes from its candidates.
_PAPER_ONLY = (
    "objective", "num_slices", "ridge", "ridge_scale", "rows", "padding", "weighting", "damping",
    "coefficients", "in_memory", "features", "slice_kind", "baseline", "token_bias",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a compile.

    Attributes:
      holdout: share of the batches that the fit does not see and the report is measured on.
      seed: seed of the slice directions.
      layers: paths of the layers to compile; all when None.
      recipe: ``"paper"`` (ASAP), or ``"auto"``: several candidates are fitted to the aligned
        dual and the best of each layer, on held-out calibration batches that are not those of the
        report, is kept. Calibration records stay in memory then; of the settings of the fit only
        ``closures``, ``candidates``, ``time_limit``, ``ladder`` and ``seed`` apply.
      objective: ``"ls"`` (ASAP-LS) or ``"kl"`` (ASAP-KL, started at LS).
      num_slices: L.
      closures: ``"two_sided"`` (ASAP), ``"one_sided"`` (ASAP-0), an int n (n closures from the
        aligned dual), or ``"none"`` (ablation: both duals predicted, no c-transform). By default
        ``"two_sided"``; under ``"auto"`` the budget, an int, by default 2 or, and the report says
        so, as many as the teacher has steps to save.
      ridge: lambda >= 0, unnormalised unless ``ridge_scale`` says otherwise.
      ridge_scale: ``"absolute"``, ``"trace"`` or ``"diagonal"``, see ``NormalEquations.solve``.
      rows: regression rows: ``"active"`` tokens, or ``"all"`` that take part in the closures
        (padded queries under a key-only mask too).
      padding: which tokens carry features, see ``Predictor``; None leaves it to the layer's spec.
      weighting: ``"none"``, or ``"gauss_newton"``: rows weighted by the curvature of the KL
        objective of one closure (``closures="one_sided"`` or ``1``).
      damping: in (0, 1], the share of plain least squares in a weighted fit.
      coefficients: ``"pooled"`` over the heads of a layer, ``"per_head"``, or ``"shared"``
        (ablation: one vector for all layers).
      in_memory: KL only: keep q, k, mask, features and targets of the fit batches, or, when
        False, run the model over re-iterable batches again on every evaluation.
      features: name of a family (``"sliced_potentials"``, ``"moments"``, ``"raw_projections"``,
        ``"rank_displacement"``), names joined by ``"+"``, or a tuple of names and family
        instances.
      slice_kind: see ``slice_directions``.
      baseline: ``"none"``, or ``"first_step"``: residual log-sum-exp dual fit.
      token_bias: fit one bias per token position too; lengths must then be fixed.
      candidates: ``"auto"``: the ``Candidate`` s to try, cheapest to run first; ``CANDIDATES`` when
        None, ``THOROUGH`` has more.
      time_limit: ``"auto"``: keep no candidate that takes longer, measured while compiling, than
        this times the teacher (the fastest, and the report says so, if all do); None for fidelity
        alone, whatever it takes.
      ladder: ``"auto"``: numbers of closures that the report compares, beside the budget; when
        None those of 1, 2 and 3 that the teacher has steps for, and the report says which not.
      default_budget: whether ``closures`` was left to its default.

    Raises:
      ValueError, TypeError: a setting that is unknown, out of range or does not go with another.
    """

    holdout: float = 0.2
    seed: int = 0
    layers: Sequence[str] | None = None
    recipe: str = "paper"
    objective: str = "ls"
    num_slices: int = 32
    closures: str | int | None = None
    ridge: float = 1e-3
    ridge_scale: str = "absolute"
    rows: str = "active"
    padding: str | None = None
    weighting: str = "none"
    damping: float = 0.1
    coefficients: str = "pooled"
    in_memory: bool = True
    features: str | tuple[Any, ...] = "sliced_potentials"
    slice_kind: str = "gaussian"
    baseline: str = "none"
    token_bias: bool = False
    candidates: Sequence[Candidate] | None = None
    time_limit: float | None = 1.0
    ladder: Sequence[int] | None = None
    default_budget: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        checks.one_of("recipe", self.recipe, RECIPES)
        object.__setattr__(self, "default_budget", self.closures is None)
        if self.closures is None:
            default = 2 if self.recipe == "auto" else "two_sided"
            object.__setattr__(self, "closures", default)
        checks.one_of("objective", self.objective, OBJECTIVES)
        checks.one_of("coefficients", self.coefficients, COEFFICIENTS)
        checks.one_of("ridge_scale", self.ridge_scale, RIDGE_SCALES)
        checks.one_of("rows", self.rows, ROWS)
        if self.padding is not None:
            checks.one_of("padding", self.padding, PADDINGS)
        checks.one_of("weighting", self.weighting, WEIGHTINGS)
        object.__setattr__(self, "damping", checks.positive_float("damping", self.damping))
        if self.damping > 1:
            raise ValueError(f"damping must be in (0, 1], got {self.damping}")
        checks.one_of("slice_kind", self.slice_kind, directions.KINDS)
        checks.one_of("baseline", self.baseline, BASELINES)
        checks.static_bool("in_memory", self.in_memory)
        checks.static_bool("token_bias", self.token_bias)
        checks.positive_int("num_slices", self.num_slices)
        object.__setattr__(self, "ridge", checks.non_negative_float("ridge", self.ridge))
        if checks.non_negative_float("holdout", self.holdout) >= 1:
            raise ValueError(f"holdout must be in [0, 1), got {self.holdout}")
        if not isinstance(self.features, str):
            object.__setattr__(self, "features", checks.items("features", self.features))
        if not self.features:
            raise ValueError("features must name a family or hold at least one")
        creatable = [name for name, family in FAMILIES.items() if hasattr(family, "create")]
        for family in self.families:
            if isinstance(family, str):
                checks.one_of("features", family, creatable)
            else:
                check_families("features", (family,))
        if isinstance(self.closures, str):
            checks.one_of("closures", self.closures, (*functions.CLOSURES, "none"))
        else:
            set_closures = checks.positive_int("closures", self.closures)
            object.__setattr__(self, "closures", set_closures)
        for name in ("layers", "candidates", "ladder"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.items(name, getattr(self, name)))
        if self.layers == ():
            raise ValueError("layers=() chooses no layer; leave it out to compile all")
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)):
            raise TypeError(f"seed must be an int, got {self.seed!r}")
        self._check_automatic()
        self._refuse_combinations()

    def _check_automatic(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        foreign = _PAPER_ONLY if self.recipe == "auto" else ("candidates", "time_limit", "ladder")
        for name in foreign:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} does not go with recipe={self.recipe!r}: leave it out")
        for rung in self.ladder or ():
            checks.positive_int("ladder", rung)
        if self.recipe != "auto":
            return
        if self.time_limit is not None:
            limit = checks.positive_float("time_limit", self.time_limit)
            object.__setattr__(self, "time_limit", limit)
        if isinstance(self.closures, str):
            raise ValueError(f"recipe='auto' needs a number of closures, got {self.closures!r}")
        if self.candidates is not None:
            for candidate in self.candidates:
                checks.instance("candidates", candidate, Candidate, "Candidates in a tuple")
            names = [candidate.name for candidate in self.candidates]
            if not names or len(set(names)) < len(names):
                raise ValueError(
                    f"candidates must be one or more Candidates of different names, got {names}"
                )
            if not any(c.suits(self.closures, masked=False) for c in self.candidates):
                raise ValueError(f"no candidate of {names} suits closures={self.closures}")

    def _refuse_combinations(self) -> None:
        if self.objective == "kl":
            plain = dict(
                closures=functions.CLOSURES,
                coefficients=("pooled", "per_head"),
                baseline=("none",),
                token_bias=(False,),
                ridge_scale=("absolute",),
                rows=("active",),
                weighting=("none",),
            )
            for name, allowed in plain.items():
                if getattr(self, name) not in allowed:
                    raise ValueError(
                        f"objective='kl' fits the source dual through one key closure, layer by "
                        f"layer: {name} must be one of {allowed}, got {getattr(self, name)!r}"
                    )
        if self.weighting != "none" and self.closures not in ("one_sided", 1):
            raise ValueError(
                f"weighting={self.weighting!r} is for one closure (closures='one_sided' or 1), got "
                f"closures={self.closures!r}"
            )
        if self.closures == "none" and (self.token_bias or self.baseline != "none"):
            raise ValueError("closures='none' goes with baseline='none' and token_bias=False")
        if self.coefficients == "shared" and self.token_bias:
            raise ValueError("coefficients='shared' goes with token_bias=False")

    @property
    def families(self) -> tuple[Any, ...]:
        """The chosen feature families, by name or as they were given."""
        chosen = self.features
        return tuple(chosen.split("+")) if isinstance(chosen, str) else tuple(chosen)

    @property
    def rungs(self) -> tuple[int, ...]:
        """The numbers of closures that the ladder compares where the teacher has the steps."""
        return LADDER if self.ladder is None else tuple(self.ladder)

    @property
    def targets(self) -> tuple[str | int, ...]:
        """The duals to predict, as ``calibrate.target_dual`` names them."""
        if self.closures == "none":
            return ("final_query", "final_key")
        return ("source",) if isinstance(self.closures, str) else (int(self.closures),)

    def refuse(self, path: str, spec: SinkhornSpec) -> None:
        """Raises ValueError for a teacher that these options cannot compile, with the reason."""
        if spec.num_steps == 1:
            raise ValueError(
                f"layer {path!r} has num_steps=1, which is row softmax: it has no dual before its "
                f"only step, so there is nothing to compile; leave it out with layers=[...]"
            )
        asked = {"ladder": self.ladder or ()}
        if isinstance(self.closures, int) and not self.default_budget:
            asked["closures"] = (self.closures,)
        for name, counts in asked.items():
            if max(counts, default=0) >= spec.num_steps:
                raise ValueError(
                    f"{name}={getattr(self, name)} needs a teacher of more steps than layer "
                    f"{path!r} with num_steps={spec.num_steps}"
                )
