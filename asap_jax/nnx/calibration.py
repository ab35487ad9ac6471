"""Compiling an nnx model: its records, and the states written back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from flax import linen, nnx

from asap_jax import checks, records
from asap_jax.compiler import calibration as compiling
from asap_jax.compiler import diagnosis, programs
from asap_jax.compiler.diagnosis import Diagnosis
from asap_jax.compiler.fit import Fit
from asap_jax.compiler.options import Options, explain_fit_settings
from asap_jax.nnx.attention import SCAN_HINT, AsapCapture, AsapState, SinkhornAttention
from asap_jax.records import CompiledState, Passed


def sinkhorn_layers(model: nnx.Module) -> dict[str, SinkhornAttention]:
    """The SinkhornAttention modules of a model by path, ``"blocks/0/attention/attention_fn"``.

    Raises:
      ValueError: a name on a path has a "/", or two layers have one path.
    """
    layers: dict[str, SinkhornAttention] = {}
    for names, module in nnx.iter_modules(model):
        if isinstance(module, SinkhornAttention):
            path = records.layer_path(names)
            if path in layers:
                raise ValueError(
                    f"two SinkhornAttention layers have the path {path!r}: a number and a string "
                    f"that look the same are keys on the way to them; rename one"
                )
            layers[path] = module
    return layers


class Calibration(compiling.Calibration):
    """Calibration of an nnx model, also while it still trains.

    Call ``add(model, batch)`` for each batch, then ``finish(model, report_batches)``. ``compile``
    does both with a frozen model.
    """

    hint = SCAN_HINT
    _probe: ClassVar[int] = records.fresh_probe()  # changes after every failed trace

    def __init__(
        self,
        options: Options | None = None,
        *,
        apply_kwargs: Mapping[str, Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
    ):
        """Arguments as ``compile``."""
        super().__init__(options, apply_kwargs, forward)
        self._run = forward or _Call(tuple(sorted(self.apply_kwargs.items())))
        # A forward may read other values in every compile, so it shares no program.
        self._recorded = programs.bind(_record, self._run, share=forward is None)

    def teacher(self, model: nnx.Module) -> nnx.Module:
        """A copy of the model without compiled states."""
        return _evaluating(model)

    def passed(self, model: nnx.Module, batch: Any) -> Passed:
        """One forward pass of a copy of ``model`` in evaluation mode."""
        probe = _evaluating(model, compiled=True)
        for path, layer in sinkhorn_layers(probe).items():
            # As nnx.capture does, but on these modules only. The number prevents trace-cache hits.
            slot = AsapCapture({}, path=path, probe=Calibration._probe)
            layer.__captures__ = nnx.data((slot,))
        try:
            return self._recorded(*nnx.split(probe), batch)
        except ValueError:
            Calibration._probe = records.fresh_probe()
            raise

    def _trace(self, teacher: nnx.Module, states: Mapping[str, CompiledState], batch: Any) -> None:
        probe = _evaluating(teacher)
        attach(probe, states)
        graph, state = nnx.split(probe)
        jax.eval_shape(lambda s, b: self._run(nnx.merge(graph, s), b), state, batch)

    def compiled(self, teacher: nnx.Module, states: Mapping[str, CompiledState]) -> dict[str, Any]:
        """A copy of the teacher with these states, as ``model``."""
        model = nnx.clone(teacher)
        attach(model, states)
        return {"model": model}


@explain_fit_settings
def compile(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    fit: str | Fit = "moments",
    closures: str | int | None = None,
    ending: str = "teacher",
    layers: Sequence[str] | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    apply_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
) -> compiling.CompileResult:
    """Compiles the SinkhornAttention layers of a trained nnx model (paper, algorithm 1).

    Args:
      model: any nnx module that uses ``SinkhornAttention`` as ``attention_fn``; left unchanged. A
        copy in evaluation mode, with dropout off, is calibrated.
      batches: as ``asap_jax.linen.compile``.
      fit, closures, ending, layers, holdout, seed: see ``asap_jax.Options``.
      apply_kwargs: further keywords of the call.
      forward: ``forward(model, batch)`` instead of calling the model.

    Returns:
      CompileResult with ``.model``, a compiled copy of ``model``, and ``.report``.

    Raises:
      ValueError, TypeError: as ``asap_jax.linen.compile``.
    """
    options = Options(fit, closures, ending, layers, holdout, seed)
    return Calibration(options, apply_kwargs=apply_kwargs, forward=forward).run(model, batches)


def _evaluating(model: nnx.Module, *, compiled: bool = False) -> nnx.Module:
    """A copy of a model in evaluation mode, without compiled states unless ``compiled``."""
    if not isinstance(model, nnx.Module):
        hint = "; call asap_jax.linen.compile" if isinstance(model, linen.Module) else ""
        raise TypeError(f"model must be an nnx.Module, got {checks.describe(model)}{hint}")
    teacher = nnx.clone(model)
    for layer in () if compiled else sinkhorn_layers(teacher).values():
        layer.asap = None
    for _, module in nnx.iter_modules(teacher):
        if isinstance(module, nnx.Dropout):
            module.rate = 0.0  # for calls with deterministic=False
    teacher.eval()
    return teacher


def attach(model: nnx.Module, states: Mapping[str, CompiledState]) -> None:
    """Writes states, by layer path, into the SinkhornAttention modules of ``model``, in place."""
    modules = sinkhorn_layers(model)
    for path, state in states.items():
        modules[path].asap = AsapState(state, path=path)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The default forward, which calls the model on a batch; equal for equal keywords."""

    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, model: Any, batch: Any) -> Any:
        args, kwargs = records.split_batch(batch)
        return model(*args, **{**kwargs, **dict(self.keywords)})


def _record(run: Callable[[Any, Any], Any], graph: Any, state: Any, batch: Any) -> Passed:
    """Runs one forward pass."""
    model = nnx.merge(graph, state)
    # A trace that fails is not kept, so the next call checks again.
    with records.observe() as observer:
        output = run(model, batch)
    recorded = {}
    for path, layer in sinkhorn_layers(model).items():
        (slot,) = layer.__captures__
        if "record" in slot.get_value():
            recorded[path] = slot.get_value()["record"]
    lost = [path for path in observer.recorded if path not in recorded]
    if lost:
        raise ValueError(
            f"layers {lost} ran but their records were dropped by a transform around them: "
            f"{SCAN_HINT}"
        )
    return Passed(recorded, records.array_leaves(output))


def diagnose(
    model: nnx.Module,
    batch: Any,
    *,
    teacher: bool = False,
    apply_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
) -> Diagnosis:
    """Whether the compiled layers of an nnx model still fit the data that they run on.

    Args:
      model: the compiled model; left unchanged. A copy in evaluation mode runs.
      batch, teacher, apply_kwargs, forward: as ``asap_jax.linen.diagnose``, for nnx.

    Returns:
      Diagnosis, as ``asap_jax.linen.diagnose``.

    Raises:
      ValueError, TypeError: as ``asap_jax.linen.diagnose``.
    """
    calibration = Calibration(apply_kwargs=apply_kwargs, forward=forward)
    recorded = calibration.passed(model, diagnosis.checked_batch(batch)).records
    slots = {path: layer.asap for path, layer in sinkhorn_layers(model).items()}
    states = {path: slot.get_value() for path, slot in slots.items() if slot is not None}
    return diagnosis.diagnose(recorded, states, teacher=teacher)
