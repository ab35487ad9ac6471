"""The paper's fits: ASAP-LS and ASAP-KL, with the ablations of its tables (algorithm 1)."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from asap_jax import checks
from asap_jax.attention import functions
from asap_jax.compiler.fit import Again, Fit, LayerFit, Solved, check_finite, num_bytes
from asap_jax.features import FAMILIES, check_families, directions
from asap_jax.fitting import kl_data, kl_search, targets
from asap_jax.fitting.least_squares import NormalEquations, Regression
from asap_jax.predictor import DualPair, LinearHead, Predictor
from asap_jax.predictor.predictor import BASELINES
from asap_jax.records import Record, unstack
from asap_jax.spec import PADDINGS

OBJECTIVES = ("ls", "kl")
COEFFICIENTS = ("pooled", "per_head", "shared")
WEIGHTINGS = ("none", "gauss_newton")


@dataclasses.dataclass(frozen=True)
class PaperFit(Fit["PaperLayerFit"]):
    """The paper's fit: one linear map from features to a dual (paper, algorithm 1).

    The defaults are exactly the paper's: ASAP-LS with 32 slices, and ``closures="two_sided"``.

    Attributes:
      objective: ``"ls"`` (ASAP-LS) or ``"kl"`` (ASAP-KL, started at LS).
      num_slices: L.
      ridge: lambda >= 0, unnormalised unless ``ridge_scale`` says otherwise.
      ridge_scale: ``"absolute"``, ``"trace"`` or ``"diagonal"``, see ``NormalEquations.solve``.
      rows: regression rows: ``"active"`` tokens, or ``"all"`` tokens that take part in the
        closures (under a key-only mask also padded queries).
      padding: which tokens carry features, see ``Predictor``; None: as in the layer's spec.
      weighting: ``"none"``, or ``"gauss_newton"``: rows weighted by the curvature of the KL
        objective of one closure (``closures="one_sided"`` or ``1``).
      damping: in (0, 1], the share of plain least squares in a weighted fit.
      coefficients: ``"pooled"`` over the heads of a layer, ``"per_head"``, or ``"shared"``
        (ablation: one vector for all layers).
      in_memory: KL only: store q, k, bias, mask, features and targets of the fit batches, up to
        ``memory_limit``. When False, store nothing, and run the model over re-iterable batches
        again on every evaluation.
      features: name of a family (``"sliced_potentials"``, ``"moments"``, ``"raw_projections"``,
        ``"rank_displacement"``), names joined by ``"+"``, or a tuple of names and family
        instances.
      slice_kind: see ``slice_directions``.
      baseline: ``"none"``, or ``"first_step"``: residual log-sum-exp dual fit.
      token_bias: also fit one bias per token position; all batches must then have one length.
      memory_limit: most GiB of activations that the fit may store over all layers.
      guard: shrink tokens far larger than those of the calibration before the layer predicts.

    Raises:
      ValueError, TypeError: a setting that is unknown, out of range or does not fit the others.
    """

    default_closures: ClassVar[str] = "two_sided"

    objective: str = "ls"
    num_slices: int = 32
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

    def __post_init__(self):
        super().__post_init__()
        set_field = lambda name, value: object.__setattr__(self, name, value)
        checks.one_of("objective", self.objective, OBJECTIVES)
        checks.one_of("coefficients", self.coefficients, COEFFICIENTS)
        _ = self.regression  # checks its settings
        if self.padding is not None:
            checks.one_of("padding", self.padding, PADDINGS)
        checks.one_of("weighting", self.weighting, WEIGHTINGS)
        set_field("damping", checks.positive_float("damping", self.damping))
        if self.damping > 1:
            raise ValueError(f"damping must be in (0, 1], got {self.damping}")
        checks.one_of("slice_kind", self.slice_kind, directions.KINDS)
        checks.one_of("baseline", self.baseline, BASELINES)
        checks.static_bool("in_memory", self.in_memory)
        checks.static_bool("token_bias", self.token_bias)
        checks.positive_int("num_slices", self.num_slices)
        if not isinstance(self.features, str):
            set_field("features", checks.items("features", self.features))
        if not self.features:
            raise ValueError("features must name a family or hold at least one")
        creatable = [name for name, family in FAMILIES.items() if hasattr(family, "create")]
        for family in self.families:
            if isinstance(family, str):
                checks.one_of("features", family, creatable)
            else:
                check_families("features", (family,))
        if self.coefficients == "shared" and self.token_bias:
            raise ValueError("coefficients='shared' needs token_bias=False")
        if self.objective == "kl":
            self._check_kl()

    def _check_kl(self) -> None:
        plain = dict(
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

    @property
    def regression(self) -> Regression:
        """Settings of its least-squares fits."""
        per_head = self.coefficients == "per_head"
        return Regression(self.rows, per_head, self.ridge, self.ridge_scale)

    @property
    def families(self) -> tuple[Any, ...]:
        """The chosen feature families, by name or as instances."""
        chosen = self.features
        return tuple(chosen.split("+")) if isinstance(chosen, str) else tuple(chosen)

    @property
    def reads_batches_again(self) -> bool:
        """Whether solving reads the calibration batches again (KL with ``in_memory=False``)."""
        return self.objective == "kl" and not self.in_memory

    def check_closures(self, closures: str | int) -> None:
        """Raises ValueError if another setting does not allow ``closures``."""
        if self.objective == "kl" and closures not in functions.CLOSURES:
            raise ValueError(
                f"objective='kl' fits the source dual through one key closure: closures must be "
                f"one of {functions.CLOSURES}, got {closures!r}"
            )
        if self.weighting != "none" and closures not in ("one_sided", 1):
            raise ValueError(
                f"weighting={self.weighting!r} is for one closure (closures='one_sided' or 1), got "
                f"closures={closures!r}"
            )
        if closures == "none" and (self.token_bias or self.baseline != "none"):
            raise ValueError("closures='none' needs baseline='none' and token_bias=False")

    def layer_kind(self) -> type[PaperLayerFit]:
        """Normal equations, and the items of the KL objective."""
        return PaperLayerFit

    def solve(self, layers: Mapping[str, PaperLayerFit], again: Again) -> dict[str, Solved]:
        """Solves every layer; shared coefficients are solved from the sums over all layers."""
        totals = None
        if self.coefficients == "shared":
            parts = zip(*(layer.total() for layer in layers.values()), strict=True)
            totals = [functools.reduce(operator.add, sums) for sums in parts]
        for path, layer in layers.items():
            layer.shared = totals
            layer.stream = functools.partial(again, path)
        return super().solve(layers, again)


class PaperLayerFit(LayerFit):
    """Sums of one layer, then its coefficients.

    Least squares stores normal equations only. The KL objective also stores a ``KLItem`` per batch
    and layer, unless the fit reads the batches again.

    Attributes:
      shared: normal equations over all layers, one per target, which replace the layer's own.
      stream: gives the layer's records again, one pass per call.
    """

    fit: PaperFit
    shared: list[NormalEquations] | None = None
    stream: Callable[[], Iterator[Record]]

    def __init__(self, path: str, record: Record, fit: PaperFit, **settings: Any):
        super().__init__(path, record, fit, **settings)
        closures = self.closures
        self.targets: tuple[str | int, ...] = (closures,)
        if isinstance(closures, str):
            self.targets = ("final_query", "final_key") if closures == "none" else ("source",)
        self.head_dim = record.query.shape[-1]
        self.families = tuple(self._family(family) for family in fit.families)
        self.sums: list[NormalEquations] = []
        self.offset: Any = None
        self.items: list[list[kl_data.KLItem]] = [[] for _ in range(self.depth)]
        self.num_problems = 0

    def _family(self, family: Any) -> Any:
        """A feature family from its name; slice directions are the same for every layer."""
        if not isinstance(family, str):
            return family
        kind: Any = FAMILIES[family]
        settings = dict(num_slices=self.fit.num_slices, slice_kind=self.fit.slice_kind)
        return kind.create(jax.random.key(self.seed), self.head_dim, **settings)

    def _add(self, record: Record, where: str) -> None:
        fit = self.fit
        record = record.with_padding(fit.padding)
        settings = dict(
            baseline=fit.baseline,
            token_bias=fit.token_bias,
            rows=fit.rows,
            damping=fit.damping if fit.weighting == "gauss_newton" else None,
        )
        new = [
            targets.layer_sums(record, self.families, target=target, **settings)
            for target in self.targets
        ]
        check_finite(new, record, self.path, where)
        if self.sums and self.sums[0].moment.shape != new[0].moment.shape:
            raise ValueError(
                f"{where} has queries of shape {record.query.shape} at layer {self.path!r}: "
                f"token_bias=True needs batches of one length"
            )
        self.sums = _plus(self.sums, new) if self.sums else new
        if self.closures == "none":
            offset = targets.key_offset(record)
            self.offset = offset if self.offset is None else _plus(self.offset, offset)
        if fit.objective == "kl":
            shape = record.query.shape[len(self.stack) :]
            self.num_problems += math.prod(shape[:-3]) * shape[-2]
            if fit.in_memory:
                for items, layer in zip(self.items, unstack(record), strict=True):
                    items.append(kl_data.kl_item(layer, self.families))
                    self.stored_bytes += num_bytes(items[-1])

    def reduce(self, total: Callable[[Any], Any]) -> None:
        """Replaces the sums by their totals over processes; ValueError for the KL objective."""
        if self.fit.objective == "kl":
            super().reduce(total)
        self.sums, self.offset, self.observed = total((self.sums, self.offset, self.observed))

    def total(self) -> list[NormalEquations]:
        """Normal equations over all layers of the stack and all heads, one per target."""
        depth = len(self.stack)
        return [jax.tree.map(lambda x: x.sum(tuple(range(depth + 1))), s) for s in self.sums]

    def _solve_layers(self) -> list[tuple[Predictor | DualPair, dict[str, Any]]]:
        return [self._solve_one(index) for index in range(self.depth)]

    def _solve_one(self, index: int) -> tuple[Predictor | DualPair, dict[str, Any]]:
        fit, all_sums = self.fit, self.shared or self.layer(self.sums, index)
        solutions = [self._solution(index, sums) for sums in all_sums]
        (head, figures), bias = solutions[0], None
        predictor = functools.partial(Predictor, self.families, padding=fit.padding)
        if self.closures == "none":
            query, key = (LinearHead(coefficients) for coefficients, _ in solutions)
            total, count = (x.sum(-1) for x in self.layer(self.offset, index))
            offset = total / jnp.maximum(count, jnp.ones_like(count))
            pair = DualPair(predictor(query, side="query"), predictor(key, side="key"), offset)
            return pair, figures
        if fit.token_bias:
            width = sum(family.num_features(self.head_dim) for family in self.families)
            head, bias = head[..., :width], head[..., width:]
        closures = self.closures
        side = "query" if isinstance(closures, str) else self.target.side_before_end(closures)
        settings = dict(token_bias=bias, side=side, baseline=fit.baseline)
        return predictor(LinearHead(head), **settings), figures

    def _solution(self, index: int, sums: NormalEquations) -> tuple[jax.Array, dict[str, Any]]:
        """Coefficients of one target by the fit's objective, and figures."""
        sums, coefficients, figures = self.fit.regression.solve(sums)
        if self.fit.objective == "ls":
            return coefficients, figures
        items = self.items[index]
        result = kl_search.minimise(
            sums,
            kl_data.groups(items) if items else _StreamedItems(self, index),
            kl_data.KLItem.block,
            epsilon=self.spec.epsilon,
            ridge=self.fit.ridge,
            num_problems=self.num_problems,
        )
        return result.coefficients, figures | dict(
            kl_reason=result.reason,
            kl_converged=result.converged,
            kl_steps=result.num_steps,
            plan_kl=result.plan_kl,
        )


@dataclasses.dataclass(frozen=True)
class _StreamedItems(Iterable):
    """A layer's KL items, computed again from the model's records on every pass."""

    layer: PaperLayerFit
    index: int

    def __iter__(self) -> Iterator[kl_data.KLItem]:
        for record in self.layer.stream():
            record = dataclasses.replace(record, spec=self.layer.target)
            record = record.with_padding(self.layer.fit.padding)
            yield kl_data.kl_item(unstack(record)[self.index], self.layer.families)


_plus = functools.partial(jax.tree.map, jnp.add)
