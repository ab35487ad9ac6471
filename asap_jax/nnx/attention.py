"""Sinkhorn attention for Flax nnx: the module, compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import linen, nnx

from asap_jax import checks, records
from asap_jax.attention import functions
from asap_jax.attention.flax_call import Call, Result, attention_method
from asap_jax.compiler import calibration as compiling
from asap_jax.compiler.options import Options
from asap_jax.fitting.candidates import Candidate
from asap_jax.nnx.baselines import DiffAttention, EspAttention, EspSetting, set_esp_temperature
from asap_jax.records import CompiledState, Record
from asap_jax.spec import SinkhornSpec

__all__ = [
    "AsapCapture",
    "AsapState",
    "Calibration",
    "DiffAttention",
    "EspAttention",
    "EspSetting",
    "SinkhornAttention",
    "compile",
    "set_esp_temperature",
]


SCAN_CURE = (
    "inside nnx.scan / nnx.vmap slice the two variable types along axis 0, for instance "
    "nnx.StateAxes({nnx.Param: 0, AsapState: 0, AsapCapture: 0, ...: None})"
)


class AsapState(nnx.Variable):
    """Holds the CompiledState of one layer."""


class AsapCapture(nnx.Variable):
    """Holds the Record of one layer while calibrating, see ``nnx.capture``."""


class SinkhornAttention(nnx.Module):
    """Sinkhorn attention as ``attention_fn`` of stock nnx attention.

    ``nnx.MultiHeadAttention(..., attention_fn=SinkhornAttention(spec))``: one instance per layer;
    it has no ``nnx.Param``, so the parameters are those of stock attention.

    It runs the teacher, ``sinkhorn_attention``; once its ``asap`` slot holds an ``AsapState`` it
    runs ``asap_attention``. Under ``nnx.capture(..., AsapCapture)`` it records its inputs, with
    dropout off, for calibration.

    Attributes:
      spec: the teacher's finite-budget convention.
      implementation: see ``sinkhorn_attention``; not part of any saved state.
      asap: None, or the AsapState that compiles the layer.
    """

    def __init__(self, spec: SinkhornSpec, *, implementation: str = "auto"):
        checks.instance("spec", spec, SinkhornSpec, "a SinkhornSpec")
        self.spec = spec
        self.implementation = implementation
        self.asap: AsapState | None = nnx.data(None)

    @attention_method
    def __call__(self, call: Call) -> Result:
        """Arguments and result as ``sinkhorn_attention``."""
        for slot in getattr(self, "__captures__", ()):
            if type(slot) is AsapCapture:
                self._record(slot, Record.of(*call.arrays, self.spec))
                call = call.replace(deterministic=True)
        options = dict(spec=self.spec, implementation=self.implementation)
        if self.asap is None:
            return functions.sinkhorn_attention.core(call, **options)
        state = self.asap.get_value()
        path = self.asap.get_metadata("path", "SinkhornAttention")
        state.check(self.spec, path, SCAN_CURE)
        records.note("compiled", path)
        return functions.asap_attention.core(
            call, predictor=state.predictor, closures=state.closures, **options
        )

    def _record(self, slot: AsapCapture, record: Record) -> None:
        path = slot.get_metadata("path", "SinkhornAttention")
        records.note("recorded", path)
        if "record" in slot.get_value():
            raise ValueError(records.SHARED_INSTANCE.format(path=path, old="AsapCapture state"))
        self.sow(
            AsapCapture, "record", record, init_fn=lambda: None, reduce_fn=lambda old, new: new
        )


def sinkhorn_layers(model: nnx.Module) -> dict[str, SinkhornAttention]:
    """The SinkhornAttention modules of a model by path, ``"blocks/0/attention/attention_fn"``."""
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, SinkhornAttention)
    }


class Calibration(compiling.Calibration):
    """Calibration of an nnx model, also while it still trains.

    ``add(model, batch)`` as often as wanted, then ``finish(model, report_batches)``; ``compile``
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
        found = {}
        for path, layer in sinkhorn_layers(model).items():
            (slot,) = layer.__captures__
            if "record" in slot.get_value():
                found[path] = slot.get_value()["record"]
        return found

    def records(self, teacher: nnx.Module, batch: Any) -> Mapping[str, Record]:
        """The records of every layer of the model ``teacher``."""
        probe = _evaluating(teacher)
        for path, layer in sinkhorn_layers(probe).items():
            # As nnx.capture does, on these modules alone; the number keeps old traces away.
            slot = AsapCapture({}, path=path, probe=self._probe)
            layer.__captures__ = nnx.data((slot,))
        with records.observe() as observer:
            found = self._recorded(*nnx.split(probe), batch)
        lost = [path for path in observer.recorded if path not in found]
        if lost:
            raise ValueError(
                f"layers {lost} ran but their records were dropped by a transform around them: "
                + SCAN_CURE
            )
        return found

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
                f"not run them on the model it was given, or a transform drops their state. "
                + SCAN_CURE
            )
        compiled = nnx.clone(teacher)
        attach(compiled, states)
        return {"model": compiled}


def compile(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    apply_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    layers: Sequence[str] | None = None,
    recipe: str = "paper",
    objective: str = "ls",
    num_slices: int = 32,
    closures: str | int | None = None,
    ridge: float = 1e-3,
    ridge_scale: str = "absolute",
    rows: str = "active",
    padding: str | None = None,
    weighting: str = "none",
    damping: float = 0.1,
    coefficients: str = "pooled",
    in_memory: bool = True,
    features: str | tuple[Any, ...] = "sliced_potentials",
    slice_kind: str = "gaussian",
    baseline: str = "none",
    token_bias: bool = False,
    candidates: Sequence[Candidate] | None = None,
    time_limit: float | None = 1.0,
    ladder: Sequence[int] | None = None,
) -> compiling.CompileResult:
    """Compiles the SinkhornAttention layers of a trained nnx model (paper, algorithm 1).

    Args:
      model: any nnx module that uses ``SinkhornAttention`` as ``attention_fn``; left unchanged,
        calibrated in evaluation mode (``model.eval()``), so with dropout off.
      batches: as ``asap_jax.linen.compile``.
      apply_kwargs: further keywords of the call.
      forward: ``forward(model, batch)`` instead of calling the model.
      holdout, seed, layers, recipe, objective, num_slices, closures, ridge,
        ridge_scale, rows, padding, weighting, damping, coefficients, in_memory, features,
        slice_kind, baseline, token_bias, candidates, time_limit, ladder: see ``asap_jax.Options``.

    Returns:
      CompileResult with ``.model``, a compiled copy in the mode of ``model``, and ``.report``.

    Raises:
      ValueError, TypeError: as ``asap_jax.linen.compile``.
    """
    options = Options(
        holdout=holdout,
        seed=seed,
        layers=layers,
        recipe=recipe,
        objective=objective,
        num_slices=num_slices,
        closures=closures,
        ridge=ridge,
        ridge_scale=ridge_scale,
        rows=rows,
        padding=padding,
        weighting=weighting,
        damping=damping,
        coefficients=coefficients,
        in_memory=in_memory,
        features=features,
        slice_kind=slice_kind,
        baseline=baseline,
        token_bias=token_bias,
        candidates=candidates,
        time_limit=time_limit,
        ladder=ladder,
    )
    return Calibration(options, apply_kwargs=apply_kwargs, forward=forward).run(model, batches)


def _evaluating(model: nnx.Module) -> nnx.Module:
    """A copy of the teacher in evaluation mode, without compiled states."""
    if not isinstance(model, nnx.Module):
        cure = "; call asap_jax.linen.compile" if isinstance(model, linen.Module) else ""
        raise TypeError(f"model must be an nnx.Module, got {checks.told(model)}{cure}")
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
    from asap_jax.linen import split_batch

    def run(model, batch):
        args, kwargs = split_batch(batch)
        return model(*args, **{**kwargs, **apply_kwargs})

    return run
