"""Compiling an nnx model: its records, and the states written back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import linen, nnx

from asap_jax import checks, records
from asap_jax.compiler import calibration as compiling
from asap_jax.compiler.fit import Fit
from asap_jax.compiler.options import Options, explain_moved_settings
from asap_jax.nnx.attention import SCAN_HINT, AsapCapture, AsapState, SinkhornAttention
from asap_jax.records import CompiledState, Record


def sinkhorn_layers(model: nnx.Module) -> dict[str, SinkhornAttention]:
    """The SinkhornAttention modules of a model by path, ``"blocks/0/attention/attention_fn"``."""
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, SinkhornAttention)
    }


class Calibration(compiling.Calibration):
    """Calibration of an nnx model, also while it still trains.

    ``add(model, batch)`` as often as needed, then ``finish(model, report_batches)``; ``compile``
    does both. Layers accumulated while the teacher trains are fitted to the sequence of its
    states.
    """

    def __init__(
        self,
        options: Options | None = None,
        *,
        apply_kwargs: Mapping[str, Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
    ):
        """Arguments as ``compile``."""
        super().__init__(options, apply_kwargs, forward)
        self._run = forward or _call(self.apply_kwargs)
        self._recorded = jax.jit(self._record)
        self._probe = records.fresh_probe()

    def _record(self, graph, state, batch):
        model = nnx.merge(graph, state)
        self._run(model, batch)
        recorded = {}
        for path, layer in sinkhorn_layers(model).items():
            (slot,) = layer.__captures__
            if "record" in slot.get_value():
                recorded[path] = slot.get_value()["record"]
        return recorded

    def records(self, teacher: nnx.Module, batch: Any) -> Mapping[str, Record]:
        """The records of every layer of the model ``teacher``."""
        probe = _evaluating(teacher)
        for path, layer in sinkhorn_layers(probe).items():
            # As nnx.capture does, on these modules alone; the number prevents trace-cache hits.
            slot = AsapCapture({}, path=path, probe=self._probe)
            layer.__captures__ = nnx.data((slot,))
        with records.observe() as observer:
            recorded = self._recorded(*nnx.split(probe), batch)
        lost = [path for path in observer.recorded if path not in recorded]
        if lost:
            raise ValueError(
                f"layers {lost} ran but their records were dropped by a transform around them: "
                + SCAN_HINT
            )
        return recorded

    def attach(self, teacher: nnx.Module, states: Mapping[str, CompiledState], batch: Any) -> dict:
        """``model``, a compiled copy; fails if any layer did not switch."""
        number = records.fresh_probe()
        ran = self.records(teacher, batch)
        probe = _evaluating(teacher)
        attach(probe, {path: state.replace(probe=number) for path, state in states.items()})
        graph, state = nnx.split(probe)
        with records.observe() as observer:
            jax.eval_shape(lambda s, b: self._run(nnx.merge(graph, s), b), state, batch)
        missing = [path for path in states if path in ran and path not in observer.compiled]
        if missing:
            raise ValueError(
                f"layers {missing} did not switch to the compiled operator: the forward pass did "
                f"not run them on its model, or a transform drops their state. " + SCAN_HINT
            )
        compiled = nnx.clone(teacher)
        attach(compiled, states)
        return {"model": compiled}


@explain_moved_settings
def compile(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    fit: str | Fit = "moments",
    closures: str | int | None = None,
    layers: Sequence[str] | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    apply_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
) -> compiling.CompileResult:
    """Compiles the SinkhornAttention layers of a trained nnx model (paper, algorithm 1).

    Args:
      model: any nnx module that uses ``SinkhornAttention`` as ``attention_fn``; left unchanged,
        calibrated in evaluation mode (``model.eval()``), so with dropout off.
      batches: as ``asap_jax.linen.compile``.
      fit, closures, layers, holdout, seed: see ``asap_jax.Options``.
      apply_kwargs: further keywords of the call.
      forward: ``forward(model, batch)`` instead of calling the model.

    Returns:
      CompileResult with ``.model``, a compiled copy in the mode of ``model``, and ``.report``.

    Raises:
      ValueError, TypeError: as ``asap_jax.linen.compile``.
    """
    options = Options(fit, closures, layers, holdout, seed)
    return Calibration(options, apply_kwargs=apply_kwargs, forward=forward).run(model, batches)


def _evaluating(model: nnx.Module) -> nnx.Module:
    """A copy of the teacher in evaluation mode, without compiled states."""
    if not isinstance(model, nnx.Module):
        hint = "; call asap_jax.linen.compile" if isinstance(model, linen.Module) else ""
        raise TypeError(f"model must be an nnx.Module, got {checks.told(model)}{hint}")
    teacher = nnx.clone(model)
    for module in sinkhorn_layers(teacher).values():
        module.asap = None
    for _, module in nnx.iter_modules(teacher):
        if isinstance(module, nnx.Dropout):
            module.rate = 0.0  # also where the call itself says deterministic=False
    teacher.eval()
    return teacher


def attach(model: nnx.Module, states: Mapping[str, CompiledState]) -> None:
    """Writes states into the SinkhornAttention modules of ``model``, in place."""
    modules = sinkhorn_layers(model)
    for path, state in states.items():
        modules[path].asap = AsapState(state, path=path)


def _call(apply_kwargs):
    """The default forward: the model called on a batch."""

    def run(model, batch):
        args, kwargs = records.split_batch(batch)
        return model(*args, **{**kwargs, **apply_kwargs})

    return run
