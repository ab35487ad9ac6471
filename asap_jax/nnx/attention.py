"""Sinkhorn attention for Flax nnx: the module."""

from __future__ import annotations

from flax import nnx

from asap_jax import checks, records
from asap_jax.attention import functions
from asap_jax.records import Record
from asap_jax.spec import SinkhornSpec

SCAN_HINT = (
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

    def __call__(
        self,
        query,
        key,
        value,
        bias=None,
        mask=None,
        *,
        return_weights=False,
        dropout_rng=None,
        dropout_rate=0.0,
        broadcast_dropout=True,
        deterministic=True,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):
        """Arguments and result as ``sinkhorn_attention``."""
        for slot in getattr(self, "__captures__", ()):
            if type(slot) is AsapCapture:
                self._record(slot, Record.of(query, key, value, bias, mask, self.spec))
                deterministic = True
        options = dict(
            spec=self.spec,
            implementation=self.implementation,
            return_weights=return_weights,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            module=module,
            is_causal=is_causal,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        if self.asap is None:
            return functions.sinkhorn_attention(query, key, value, bias, mask, **options)
        state = self.asap.get_value()
        path = self.asap.get_metadata("path", "SinkhornAttention")
        state.check(self.spec, path, SCAN_HINT)
        records.note("compiled", path)
        return functions.asap_attention(
            query,
            key,
            value,
            bias,
            mask,
            predictor=state.predictor,
            closures=state.closures,
            **options,
        )

    def _record(self, slot: AsapCapture, record: Record) -> None:
        path = slot.get_metadata("path", "SinkhornAttention")
        records.note("recorded", path)
        if "record" in slot.get_value():
            raise ValueError(records.SHARED_INSTANCE.format(path=path, old="AsapCapture state"))
        self.sow(
            AsapCapture, "record", record, init_fn=lambda: None, reduce_fn=lambda old, new: new
        )
