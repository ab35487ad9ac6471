"""Sinkhorn attention for Flax linen: the module."""

from __future__ import annotations

import flax.linen as nn

from asap_jax import checks, records
from asap_jax.attention import functions
from asap_jax.attention.flax_call import Call, Result, attention_method
from asap_jax.records import Record
from asap_jax.spec import EXPECTED_SPEC, SinkhornSpec

STATE = "asap"
CAPTURE = "asap_capture"
SCAN_HINT = (
    f"inside nn.scan / nn.vmap add the two collections, for instance "
    f"nn.scan(..., variable_axes={{'params': 0, '{STATE}': 0, '{CAPTURE}': 0}}); another lifted "
    f"transform must pass them too"
)


class SinkhornAttention(nn.Module):
    """Sinkhorn attention as ``attention_fn`` of stock linen attention.

    Use ``nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=SinkhornAttention(spec))``, with
    one instance per layer. It has no parameters, so the parameter tree is that of stock attention.

    It runs the teacher, ``sinkhorn_attention``, or ``asap_attention`` when the collection
    ``"asap"`` has its state. When the collection ``"asap_capture"`` is mutable, it records its
    inputs there; dropout is then off, except under ``mutable=True``.

    Attributes:
      spec: the teacher's finite-budget convention.
      implementation: see ``sinkhorn_attention``; not part of any saved state.
      detach_key_dual: see ``sinkhorn_attention``; a compiled layer has no loop and ignores it.
      axis_name: see ``sinkhorn_attention``; not used by ``init``, and not part of any saved state.
        Compile the model without it.
    """

    spec: SinkhornSpec
    implementation: str = "auto"
    detach_key_dual: bool = False
    axis_name: str | None = None

    def __post_init__(self):
        checks.instance("spec", self.spec, SinkhornSpec, EXPECTED_SPEC)
        super().__post_init__()

    @attention_method
    def __call__(self, call: Call) -> Result:
        """Arguments and result as ``sinkhorn_attention``."""
        if self.scope is None:
            raise ValueError(
                "this layer runs inside a linen module: in an nnx model use "
                "asap_jax.nnx.SinkhornAttention, elsewhere the function sinkhorn_attention"
            )
        path = "/".join(self.path)
        if getattr(self.parent, "decode", False):
            raise ValueError(
                f"decode=True is not supported at {path!r}: column sums need all queries at once; "
                f"over a single query a column-ending layer is uniform"
            )
        if not self.is_initializing():
            recording = self.is_mutable_collection(CAPTURE)
            if recording:
                if self.has_variable(CAPTURE, "record"):
                    raise ValueError(
                        records.SHARED_INSTANCE.format(path=path, old=f"collection {CAPTURE!r}")
                    )
                records.check_whole(self.axis_name, path)
                arrays = call.query, call.key, call.value, call.bias, call.mask
                self.put_variable(CAPTURE, "record", Record.of(*arrays, self.spec))
                # mutable=True may be a training step, which needs its dropout.
                off = call.deterministic or getattr(self.scope, "mutable", None) is not True
                call = call.replace(deterministic=off)
            records.note("recorded" if recording else "unrecorded", path)
        axis_name = None if self.is_initializing() else self.axis_name
        options = dict(spec=self.spec, implementation=self.implementation, axis_name=axis_name)
        if not self.has_variable(STATE, "state"):
            return functions.sinkhorn_attention.core(
                call, detach_key_dual=self.detach_key_dual, **options
            )
        state = records.compiled_state(self.get_variable(STATE, "state"), path)
        state.check(self.spec, path, SCAN_HINT)
        records.note("compiled", path)
        return functions.asap_attention.core(
            call, predictor=state.predictor, closures=state.closures, ending=state.ending, **options
        )
