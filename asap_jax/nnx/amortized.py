"""Training an nnx model through compiled layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from asap_jax.compiler import amortized
from asap_jax.compiler.amortized import AmortizedState
from asap_jax.compiler.options import Options
from asap_jax.compiler.single_fit import Candidate
from asap_jax.nnx.calibration import Calibration


class AmortizedTraining(amortized.AmortizedTraining):
    """Trains an nnx model through compiled layers, which are fitted again once in a while.

    ``state = init(model, batch)`` begins, ``state = refresh(state, model, batch)`` fits again,
    every few steps, and the loss calls ``model(state, model)``. The gradient is that of the
    compiled layers and passes through the prediction; the coefficients are constants. All methods
    are pure and work under ``nnx.jit``.

    A call of ``model(state, model)`` changes only the copy. If calls change the model (batch
    statistics, dropout keys), write the layers into it instead, after every refresh:
    ``asap_jax.nnx.attach(model, state.layers)``. Its ``nnx.Param`` stay the same.
    """

    def __init__(
        self,
        *,
        fit: str | Candidate = "moments",
        closures: int | None = None,
        ending: str = "teacher",
        decay: float = 0.8,
        layers: Sequence[str] | None = None,
        apply_kwargs: Mapping[str, Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
    ):
        """Checks the settings; see ``asap_jax.linen.AmortizedTraining``."""
        options = Options(fit, closures, ending, layers)
        super().__init__(Calibration(options, apply_kwargs=apply_kwargs, forward=forward), decay)

    def model(self, state: AmortizedState, model: nnx.Module) -> nnx.Module:
        """A copy of ``model`` that runs the compiled layers."""
        return self.compiled(state, model)["model"]
