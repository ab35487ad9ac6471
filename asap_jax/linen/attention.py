"""Sinkhorn attention for Flax linen: the module."""

from __future__ import annotations

import flax.linen as nn

from asap_jax import records
from asap_jax.attention import functions
from asap_jax.records import Record
from asap_jax.spec import SinkhornSpec

STATE = "asap"
CAPTURE = "asap_capture"
SCAN_HINT = (
    f"inside nn.scan / nn.vmap add the two collections, for instance "
    f"nn.scan(..., variable_axes={{'params': 0, '{STATE}': 0, '{CAPTURE}': 0}}); inside "
    f"another lifted transform let it pass them too"
)


class SinkhornAttention(nn.Module):
    """Sinkhorn attention as ``attention_fn`` of stock linen attention.

    ``nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=SinkhornAttention(spec))``: one
    instance per layer; it has no parameters, so the parameter tree is that of stock attention.

    It runs the teacher, ``sinkhorn_attention``. When the collection ``"asap"`` holds its state
    it runs ``asap_attention`` instead. When the collection ``"asap_capture"`` is mutable it
    records its inputs there, with dropout off where that collection was asked for by name.

    Attributes:
      spec: the teacher's finite-budget convention.
      implementation: see ``sinkhorn_attention``; not part of any saved state.
    """

    spec: SinkhornSpec
    implementation: str = "auto"

    @nn.compact
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
        path = "/".join(self.path)
        if getattr(self.parent, "decode", False):
            raise ValueError(
                f"decode=True is refused at {path!r}: a column-ending layer over one query is "
                f"uniform, and column sums need all queries at once"
            )
        if not self.is_initializing():
            recording = self.is_mutable_collection(CAPTURE)
            if recording:
                if self.has_variable(CAPTURE, "record"):
                    raise ValueError(
                        records.SHARED_INSTANCE.format(path=path, old=f"collection {CAPTURE!r}")
                    )
                record = Record.of(query, key, value, bias, mask, self.spec)
                self.put_variable(CAPTURE, "record", record)
                # Asked for by name; under mutable=True a training step goes on as it was.
                deterministic = deterministic or self.scope.mutable is not True
            records.note("recorded" if recording else "unrecorded", path)
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
        if not self.has_variable(STATE, "state"):
            return functions.sinkhorn_attention(query, key, value, bias, mask, **options)
        state = self.get_variable(STATE, "state")
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
