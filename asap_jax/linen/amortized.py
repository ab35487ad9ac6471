"""Training a linen model through compiled layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn

from asap_jax.compiler import amortized
from asap_jax.compiler.amortized import AmortizedState
from asap_jax.compiler.options import Options
from asap_jax.compiler.single_fit import Candidate
from asap_jax.linen.calibration import Calibration


class AmortizedTraining(amortized.AmortizedTraining):
    """Trains a linen model through compiled layers, which are fitted again once in a while.

    ``state = init(variables, batch)`` begins, ``state = refresh(state, variables, batch)`` fits
    again, every few steps, and the loss applies the model to
    ``variables(state, {"params": params})``. The gradient is that of the compiled layers and passes
    through the prediction; the coefficients are constants. All methods are pure and work under
    ``jax.jit``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fit: str | Candidate = "moments",
        closures: int | None = None,
        ending: str = "teacher",
        decay: float = 0.8,
        layers: Sequence[str] | None = None,
        apply_kwargs: Mapping[str, Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
    ):
        """Checks the settings.

        Args:
          model: any linen module that uses ``SinkhornAttention`` as ``attention_fn``.
          fit: a Candidate that needs nothing but sums over the batches, or its name.
          closures, ending, layers: see ``asap_jax.Options``; other layers train with the loop.
          decay: factor of the running sums at every refresh, in [0, 1]. 1 forgets nothing, 0 fits
            to the latest batch alone.
          apply_kwargs, forward: see ``compile``; they are for the refresh.

        Raises:
          ValueError: a fit that needs more than sums, or a setting out of range.
          TypeError: a setting of the wrong type.
        """
        options = Options(fit, closures, ending, layers)
        calibration = Calibration(model, options, apply_kwargs=apply_kwargs, forward=forward)
        super().__init__(calibration, decay)

    def variables(self, state: AmortizedState, variables: Mapping[str, Any]) -> dict[str, Any]:
        """``variables``, such as ``{"params": params}``, with the states of the compiled layers.

        ``model.apply`` runs the compiled layers with them.
        """
        return self.compiled(state, variables)["variables"]
