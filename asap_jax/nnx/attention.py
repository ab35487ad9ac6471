"""Sinkhorn attention for Flax nnx: the module."""

from __future__ import annotations

from flax import nnx

from asap_jax import checks, records
from asap_jax.attention import functions
from asap_jax.attention.flax_call import Call, Result, attention_method
from asap_jax.records import Record
from asap_jax.spec import EXPECTED_SPEC, SinkhornSpec

SCAN_HINT = (
    "inside nnx.scan / nnx.vmap slice the two variable types along axis 0, for instance "
    "nnx.StateAxes({nnx.Param: 0, AsapState: 0, AsapCapture: 0, ...: None})"
)


class AsapState(nnx.Variable):
    """Holds the CompiledState of one layer."""


class AsapCapture(nnx.Variable):
    """Holds the Record of one layer during calibration, see ``nnx.capture``."""


class SinkhornAttention(nnx.Module):
    """Sinkhorn attention as ``attention_fn`` of stock nnx attention.

    Use ``nnx.MultiHeadAttention(..., attention_fn=SinkhornAttention(spec))``, with one instance per
    layer. It has no ``nnx.Param``, so the parameters are those of stock attention.

    It runs the teacher, ``sinkhorn_attention``, or ``asap_attention`` when its ``asap`` attribute
    is an ``AsapState``. Under ``nnx.capture(..., AsapCapture)`` it records its inputs for
    calibration, with dropout off.

    Attributes:
      spec: the teacher's finite-budget convention.
      implementation: see ``sinkhorn_attention``; not part of any saved state.
      detach_key_dual: see ``sinkhorn_attention``; a compiled layer has no loop and ignores it.
      axis_name: see ``sinkhorn_attention``; not part of any saved state. Set it after compiling.
      asap: None, or the AsapState of the compiled layer.
    """

    __captures__: tuple[AsapCapture, ...]  # set by nnx.capture

    def __init__(
        self,
        spec: SinkhornSpec,
        *,
        implementation: str = "auto",
        detach_key_dual: bool = False,
        axis_name: str | None = None,
    ):
        checks.instance("spec", spec, SinkhornSpec, EXPECTED_SPEC)
        self.spec = spec
        self.implementation = implementation
        self.detach_key_dual = detach_key_dual
        self.axis_name = axis_name
        self.asap: AsapState | None = nnx.data(None)

    @attention_method
    def __call__(self, call: Call) -> Result:
        """Arguments and result as ``sinkhorn_attention``."""
        for slot in getattr(self, "__captures__", ()):
            if type(slot) is AsapCapture:
                records.check_whole(self.axis_name, slot.get_metadata("path", "SinkhornAttention"))
                arrays = call.query, call.key, call.value, call.bias, call.mask
                self._record(slot, Record.of(*arrays, self.spec))
                call = call.replace(deterministic=True)
        options = dict(spec=self.spec, implementation=self.implementation, axis_name=self.axis_name)
        if self.asap is None:
            return functions.sinkhorn_attention.core(
                call, detach_key_dual=self.detach_key_dual, **options
            )
        path = self.asap.get_metadata("path", "SinkhornAttention")
        state = records.compiled_state(self.asap.get_value(), path)
        state.check(self.spec, path, SCAN_HINT)
        records.note("compiled", path)
        return functions.asap_attention.core(
            call, predictor=state.predictor, closures=state.closures, ending=state.ending, **options
        )

    def _record(self, slot: AsapCapture, record: Record) -> None:
        path = slot.get_metadata("path", "SinkhornAttention")
        records.note("recorded", path)
        if "record" in slot.get_value():
            raise ValueError(records.SHARED_INSTANCE.format(path=path, old="AsapCapture state"))
        self.sow(
            AsapCapture, "record", record, init_fn=lambda: None, reduce_fn=lambda old, new: new
        )
