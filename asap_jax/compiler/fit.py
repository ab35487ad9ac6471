"""What all fits have in common: settings (``Fit``) and the work on one layer (``LayerFit``)."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks
from asap_jax.attention import functions
from asap_jax.compiler.report import Rung
from asap_jax.predictor.predictor import DualPair, Predictor
from asap_jax.records import CompiledState, Record, check_mask, stack_mark
from asap_jax.spec import SinkhornSpec

CLOSURES = (*functions.CLOSURES, "none")
Ladder = dict[str, dict[int, Rung]]
Again = Callable[[str], Iterator[Record]]


@dataclasses.dataclass(frozen=True)
class Fit(abc.ABC):
    """How layers are fitted: settings only, checked when they are made.

    Attributes:
      default_closures: what ``closures=None`` means; a number is cut to what a teacher allows.
      reads_batches_again: whether solving goes through the calibration batches again.
    """

    default_closures: ClassVar[str | int] = 2
    reads_batches_again: ClassVar[bool] = False

    @abc.abstractmethod
    def layer_kind(self) -> type[LayerFit]:
        """The class that fits one layer so."""

    def check_closures(self, closures: str | int) -> None:
        """Raises ValueError where this fit cannot fit to ``closures``."""
        if isinstance(closures, str):
            raise ValueError(
                f"closures={closures!r} is for fit=PaperFit(...): this fit needs a number of "
                f"closures"
            )

    def check_teacher(self, path: str, spec: SinkhornSpec, closures: str | int | None) -> None:
        """Raises ValueError for a teacher that cannot be compiled so, with the reason."""
        if spec.num_steps == 1:
            raise ValueError(
                f"layer {path!r} has num_steps=1, which is row softmax: it has no dual before its "
                f"only step, so there is nothing to compile; leave it out with layers=[...]"
            )
        check_steps("closures", closures, path, spec)

    def left_out(self, spec: SinkhornSpec, closures: str | int | None) -> tuple[int, ...]:
        """Default numbers of closures that the teacher has too few steps for."""
        default = self.default_closures
        if closures is not None or isinstance(default, str) or default < spec.num_steps:
            return ()
        return (default,)

    def solve(self, layers: Mapping[str, LayerFit], again: Again) -> dict[str, Solved]:
        """Solves every layer; ``again(path)`` is one more pass over the records of a layer."""
        del again  # for fits that read batches again
        return {path: layer.solve() for path, layer in layers.items()}


Solved = tuple[CompiledState, list[dict[str, Any]]]


class LayerFit(abc.ABC):
    """Collects one layer's calibration data and solves for its predictor.

    A layer stack of a scan is one LayerFit: its layers are solved apart.

    Attributes:
      path, spec, stack: of the layer, see ``Record``.
      fit, seed, holdout: see ``Options``.
      closures: what the layer is compiled to.
      left_out: default numbers of closures that the teacher has too few steps for.
    """

    def __init__(
        self,
        path: str,
        record: Record,
        fit: Fit,
        closures: str | int | None = None,
        seed: int = 0,
        holdout: float = 0.2,
    ):
        """Takes the shapes of the layer from its first ``record``, which is not added.

        Raises:
          ValueError: a teacher that cannot be compiled so.
        """
        fit.check_teacher(path, record.spec, closures)
        self.path, self.fit, self.seed, self.holdout = path, fit, seed, holdout
        self.spec, self.stack = record.spec, record.stack
        default, most = fit.default_closures, self.spec.num_steps - 1
        default = default if isinstance(default, str) else min(default, most)
        self.closures = default if closures is None else closures
        self.left_out = fit.left_out(self.spec, closures)

    @property
    def depth(self) -> int:
        """Layers in the stack, 1 without a scan."""
        return math.prod(self.stack)

    def add(self, record: Record, where: str) -> None:
        """Adds one batch; ``where`` names it in errors.

        Raises:
          ValueError: the batch gives a value that is not finite, a mask has other values than 0
            and 1, or the batch does not fit those before it.
        """
        check_mask(record, self.path, where)
        self._add(record, where)

    @abc.abstractmethod
    def _add(self, record: Record, where: str) -> None:
        """Adds one checked batch."""

    def reduce(self, total: Callable[[Any], Any]) -> None:
        """Replaces sums by their totals over processes, see ``Calibration.reduce``.

        Raises:
          ValueError: the fit keeps activations.
        """
        raise ValueError(
            f"only sums add up over processes, and the fit of layer {self.path!r} keeps "
            f"activations: compile on one process"
        )

    @abc.abstractmethod
    def solve_one(self, index: int) -> tuple[Predictor | DualPair, dict[str, Any]]:
        """The predictor of layer ``index`` of the stack, and figures of its fit."""

    def solve(self) -> Solved:
        """The layer's state, arrays stacked under a scan, and figures of each layer's fit.

        Raises:
          ValueError: no active token was seen, or values that are not finite; names the layer.
        """
        try:
            solved = [self.solve_one(index) for index in range(self.depth)]
        except ValueError as error:
            raise ValueError(f"layer {self.path!r}: {error}") from error
        figures = [dict(numbers, left_out=self.left_out) for _, numbers in solved]
        return self.state([predictor for predictor, _ in solved]), figures

    def layer(self, sums: Any, index: int) -> Any:
        """Arrays of one layer of the stack."""
        depth = len(self.stack)
        return jax.tree.map(lambda x: x.reshape(self.depth, *x.shape[depth:])[index], sums)

    def state(self, predictors: list[Predictor | DualPair]) -> CompiledState:
        """The compiled state of the stack from the predictors of its layers."""
        stacked = jax.tree.map(
            lambda *x: jnp.stack(x).reshape(*self.stack, *jnp.shape(x[0])), *predictors
        )
        return CompiledState(stacked, self.spec, self.closures, stack_mark(self.stack))

    def ladder(self, record: Record, *, timed: bool) -> list[Ladder] | None:
        """Fidelity of other choices on a record, layer by layer; None if there are none."""
        del record, timed


def check_finite(values: Any, record: Record, path: str, where: str) -> None:
    """Raises ValueError, naming batch and layer, unless all arrays of ``values`` are finite."""
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(values)):
        raise ValueError(
            f"{where} gives a value that is not finite at layer {path!r} (query of shape "
            f"{record.query.shape})"
        )


def is_held_out(index: int, share: float) -> bool:
    """Whether batch ``index`` is held out: never the first, then one in every ``1 / share``."""
    before = lambda i: math.ceil(i * share - 1e-9)
    return index > 0 and before(index) > before(index - 1)


def check_steps(name: str, value: Any, path: str, spec: SinkhornSpec) -> None:
    """Raises ValueError for a number of closures, or several, beyond the teacher's steps."""
    counts = value if isinstance(value, tuple) else (value,)
    if any(isinstance(n, int) and n >= spec.num_steps for n in counts):
        raise ValueError(
            f"{name}={value} needs a teacher of more steps than layer {path!r} with "
            f"num_steps={spec.num_steps}"
        )


def check_closures(closures: Any) -> str | int:
    """``closures`` as a known name or a Python int >= 1; ValueError or TypeError otherwise."""
    if isinstance(closures, str):
        checks.one_of("closures", closures, CLOSURES)
        return closures
    return checks.positive_int("closures", closures)
