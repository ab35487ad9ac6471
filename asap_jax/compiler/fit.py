"""The parts common to all fits: settings (``Fit``) and the work on one layer (``LayerFit``)."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks
from asap_jax.attention import functions
from asap_jax.compiler import progress
from asap_jax.compiler.report import Ladder
from asap_jax.fitting import targets
from asap_jax.predictor import DualPair, Predictor
from asap_jax.predictor.statistics import Sums, with_limits
from asap_jax.records import CompiledState, Record, check_mask, stack_mark
from asap_jax.spec import SinkhornSpec

MOST_REPORTED = 100  # held-out batches that stay in memory
CLOSURES = (*functions.CLOSURES, "none")
Again = Callable[[str], Iterator[Record]]
Solved = tuple[CompiledState, list[dict[str, Any]]]
L = TypeVar("L", bound="LayerFit")


@dataclasses.dataclass(frozen=True)
class Fit(abc.ABC, Generic[L]):
    """Settings of a fit; ``L`` is the class that fits one layer with them.

    Attributes:
      default_closures: the meaning of ``closures=None`` for ``ending="teacher"``; a number is
        reduced to the most that the teacher allows.
      memory_limit: GiB of activations that a fit may store over all layers. Fits that need only
        sums over the batches store none.
      guard: shrink tokens that are far larger than those of the calibration before the layer
        predicts from them, see ``Predictor.statistics``.

    Raises:
      ValueError, TypeError: ``memory_limit`` is not a number > 0, ``guard`` is not a bool.
    """

    default_closures: ClassVar[str | int] = 2

    memory_limit: float = dataclasses.field(default=8.0, kw_only=True)
    guard: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self):
        checks.positive_float("memory_limit", self.memory_limit)
        checks.static_bool("guard", self.guard)

    @property
    def reads_batches_again(self) -> bool:
        """Whether solving reads the calibration batches again."""
        return False

    @abc.abstractmethod
    def layer_kind(self) -> type[L]:
        """The class that fits one layer."""

    @abc.abstractmethod
    def check_closures(self, closures: str | int) -> None:
        """Raises ValueError if this fit does not support ``closures``."""

    def check_teacher(
        self, path: str, spec: SinkhornSpec, closures: str | int | None, ending: str
    ) -> None:
        """Raises ValueError, with the reason, for a teacher that this fit cannot compile."""
        if spec.num_steps == 1:
            raise ValueError(
                f"layer {path!r} has num_steps=1, which is row softmax: it has no dual before its "
                f"only step, so there is nothing to compile; leave it out with layers=[...]"
            )
        check_steps("closures", closures, path, spec, ending)

    def default(self, ending: str) -> str | int:
        """The meaning of ``closures=None``: a number is 1 for ``ending="row"``, one softmax."""
        default = self.default_closures
        return 1 if ending == "row" and isinstance(default, int) else default

    def left_out(self, spec: SinkhornSpec, closures: str | int | None) -> tuple[int, ...]:
        """Default numbers of closures for which the teacher has too few steps."""
        default = self.default_closures
        if closures is not None or isinstance(default, str) or default < spec.num_steps:
            return ()
        return (default,)

    def solve(self, layers: Mapping[str, L], again: Again) -> dict[str, Solved]:
        """Solves every layer; ``again(path)`` gives the records of a layer once more."""
        return {path: layer.solve() for path, layer in layers.items()}


class LayerFit(abc.ABC):
    """Collects one layer's calibration data and solves for its predictor.

    A stack of layers under a scan is one LayerFit; each layer of the stack is solved separately.

    Attributes:
      path, spec, stack: of the layer, see ``Record``.
      target: the spec that the closures end as: ``spec``, or that continued by one row step.
      fit, seed, holdout, ending: see ``Options``.
      closures: the closures that the layer is compiled to.
      observed: sums of the calibration statistics; None before the first batch.
      left_out: see ``Fit.left_out``.
      stored_bytes: of the activations that it stores.
    """

    fit: Fit
    closures: str | int
    stored_bytes: int = 0
    observed: Sums | None = None

    def __init__(
        self,
        path: str,
        record: Record,
        fit: Fit,
        closures: str | int | None = None,
        seed: int = 0,
        holdout: float = 0.2,
        ending: str = "teacher",
    ):
        """Reads the shapes of the layer from its first ``record``, but does not add the record.

        Raises:
          ValueError: a teacher that this fit cannot compile.
        """
        fit.check_teacher(path, record.spec, closures, ending)
        self.path, self.fit, self.seed, self.holdout = path, fit, seed, holdout
        self.spec, self.stack, self.ending = record.spec, record.stack, ending
        self.target = self.spec.ended(ending)
        default, most = fit.default(ending), self.target.num_steps - 1
        default = default if isinstance(default, str) else min(default, most)
        self.closures = default if closures is None else closures
        self.left_out = fit.left_out(self.target, closures)

    @property
    def depth(self) -> int:
        """Layers in the stack, 1 without a scan."""
        return math.prod(self.stack)

    def add(self, record: Record, where: str) -> None:
        """Adds one batch; ``where`` names it in errors.

        Raises:
          ValueError: the batch gives a value that is not finite, its mask has values other than 0
            and 1, or it does not fit earlier batches.
        """
        check_mask(record, self.path, where)
        self._add(dataclasses.replace(record, spec=self.target), where)
        new = targets.statistics_sums(record)
        self.observed = new if self.observed is None else jax.tree.map(jnp.add, self.observed, new)

    @abc.abstractmethod
    def _add(self, record: Record, where: str) -> None:
        """Adds one batch with a checked mask; its spec is ``target``."""

    def reduce(self, total: Callable[[Any], Any]) -> None:
        """Replaces sums by their totals over processes, see ``Calibration.reduce``.

        Raises:
          ValueError: the fit stores activations.
        """
        raise ValueError(
            f"only sums add up over processes, but the fit of layer {self.path!r} stores "
            f"activations: compile on one process"
        )

    @abc.abstractmethod
    def _solve_layers(self) -> Sequence[tuple[Predictor | DualPair, dict[str, Any]]]:
        """The predictor of each layer of the stack, and figures of its fit."""

    @property
    def num_steps(self) -> int:
        """Steps of ``solve`` that it reports as progress."""
        return 1

    def solve(self) -> Solved:
        """The compiled state, with arrays stacked under a scan, and figures of each layer's fit.

        Raises:
          ValueError: no active token, or values that are not finite; the message names the layer.
        """
        progress.begin(f"layer {self.path!r}")
        try:
            solved = self._solve_layers()
        except ValueError as error:
            raise ValueError(f"layer {self.path!r}: {error}") from error
        predictor = jax.tree.map(
            lambda *x: jnp.stack(x).reshape(*self.stack, *jnp.shape(x[0])),
            *(self._described(i, predictor) for i, (predictor, _) in enumerate(solved)),
        )
        figures = [
            dict(numbers, left_out=self.left_out, **self._facts(i, predictor))
            for i, (predictor, numbers) in enumerate(solved)
        ]
        mark = stack_mark(self.stack)
        return CompiledState(predictor, self.spec, self.closures, mark, ending=self.ending), figures

    def calibration_scales(self) -> Sequence[float]:
        """Multiples of the queries that the fit saw."""
        return (1.0,)

    def guarded(self) -> bool:
        """Whether the predictor gets limits, see ``Fit.guard``."""
        return self.fit.guard

    def _described(self, index: int, predictor: Predictor | DualPair) -> Predictor | DualPair:
        """The predictor of one layer with its calibration statistics."""
        if self.observed is None or not np.asarray(self.observed.count).all():
            return predictor
        sums: Sums = self.layer(self.observed, index)
        statistics = sums.statistics(self.calibration_scales())
        if self.guarded():
            statistics = with_limits(statistics)
        described = lambda p: dataclasses.replace(p, statistics=statistics)
        if isinstance(predictor, DualPair):
            query, key = described(predictor.query), described(predictor.key)
            return DualPair(query, key, predictor.offset)
        return described(predictor)

    def _facts(self, index: int, predictor: Predictor | DualPair) -> dict[str, Any]:
        """What the report's advice depends on."""
        if self.observed is None:
            return {}
        one = predictor.query if isinstance(predictor, DualPair) else predictor
        lost = float(np.asarray(self.layer(self.observed, index).featureless).sum())
        padding = one.padding or self.spec.padding
        return dict(
            setting=self.setting(),
            num_coefficients=sum(leaf.size for leaf in jax.tree.leaves(one.head)),
            featureless_queries=0.0 if padding == "none" else lost,
        )

    def setting(self) -> str:
        """The fit in short, for the report: its class, or the name of a candidate."""
        return type(self.fit).__name__

    def layer(self, sums: Any, index: int) -> Any:
        """The arrays of layer ``index`` of the stack."""
        depth = len(self.stack)
        return jax.tree.map(lambda x: x.reshape(self.depth, *x.shape[depth:])[index], sums)

    def ladder(self, record: Record, *, timed: bool) -> list[Ladder] | None:
        """Fidelity of other choices on a record, layer by layer; None if there are none."""
        return None


def check_finite(values: Any, record: Record, path: str, where: str) -> None:
    """Raises ValueError, naming batch and layer, unless all arrays of ``values`` are finite.

    Traced values are not checked.
    """
    leaves = [x for x in jax.tree.leaves(values) if not isinstance(x, jax.core.Tracer)]
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in leaves):
        raise ValueError(
            f"{where} gives a value that is not finite at layer {path!r} (query of shape "
            f"{record.query.shape})"
        )


def num_bytes(tree: Any) -> int:
    """The bytes of the arrays of a pytree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def is_held_out(index: int, share: float) -> bool:
    """Whether batch ``index`` is held out: never the first, then one in every ``1 / share``."""
    before = lambda i: math.ceil(i * share - 1e-9)
    return index > 0 and before(index) > before(index - 1)


def is_reported(index: int, share: float) -> bool:
    """Whether batch ``index`` is held out for the report: the first ``MOST_REPORTED`` that may."""
    before = math.ceil((index - 1) * share - 1e-9)  # batches held out before this one
    return is_held_out(index, share) and before < MOST_REPORTED


def check_steps(name: str, value: Any, path: str, spec: SinkhornSpec, ending: str) -> None:
    """Raises ValueError if a number of closures, or one of a tuple, is too large for a teacher."""
    counts, most = value if isinstance(value, tuple) else (value,), spec.ended(ending).num_steps - 1
    if any(isinstance(n, int) and n > most for n in counts):
        raise ValueError(
            f"{name}={value} needs a teacher of more steps than layer {path!r} with "
            f"num_steps={spec.num_steps}: at most {most} for ending={ending!r}"
        )


def check_closures(closures: Any) -> str | int:
    """``closures`` as a known name or a Python int >= 1; ValueError or TypeError otherwise."""
    if isinstance(closures, str):
        checks.one_of("closures", closures, CLOSURES)
        return closures
    return checks.positive_int("closures", closures)


def number_of_closures(closures: str | int) -> int:
    """``closures`` as a number; ValueError for a name."""
    if isinstance(closures, str):
        raise ValueError(
            f"closures={closures!r} is for fit=PaperFit(...): this fit needs a number of closures"
        )
    return closures
