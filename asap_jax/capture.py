"""What a Sinkhorn layer records while calibrating, and the state that compiles it.

Shared by the linen and nnx adapters: the same records and the same state under both.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any

import flax.struct
import jax

from asap_jax.predictor import DualPair, Predictor
from asap_jax.spec import SinkhornSpec

SHARED_INSTANCE = (
    "the SinkhornAttention at {path!r} was called twice in one forward pass while recording, so "
    "its records would merge: one instance is shared by two layers or calls. Build one "
    "SinkhornAttention per layer (or drop an old {old} from the input)"
)


@flax.struct.dataclass
class Record:
    """The inputs of one attention call, in Flax's layout, and the layer's spec.

    Attributes:
      query ``(..., N, H, d)``, key ``(..., M, H, d)``, value ``(..., M, H, d_v)``.
      bias, mask: rank of the scores, or None.
      spec: the layer's convention.
      ndim: rank of ``query`` inside the layer; further leading axes were added by a scan.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    spec: SinkhornSpec = flax.struct.field(pytree_node=False)
    ndim: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, query, key, value, bias, mask, spec) -> Record:
        """Records one call as it was made."""
        return cls(query, key, value, bias, mask, spec=spec, ndim=query.ndim)

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the layer axes that a scan put in front."""
        return self.query.shape[: self.query.ndim - self.ndim]


@flax.struct.dataclass
class CompiledState:
    """State whose presence makes a SinkhornAttention module run the compiled operator.

    Attributes:
      predictor: the fitted predictor (a DualPair for closures ``"none"``); a leading axis on
        every array under scan.
      spec: the teacher's convention that it was fitted to.
      closures: ``"one_sided"``, ``"two_sided"``, ``"none"`` or an int, see ``asap_attention``.
    """

    predictor: Predictor | DualPair
    spec: SinkhornSpec = flax.struct.field(pytree_node=False)
    closures: Any = flax.struct.field(pytree_node=False, default="two_sided")

    def check(self, spec: SinkhornSpec, path: str) -> None:
        """Raises ValueError when the layer's own spec is another."""
        if self.spec != spec:
            raise ValueError(
                f"layer {path!r} has {spec}, but its compiled state was fitted to "
                f"{self.spec}; compile the layer again"
            )


class Observer:
    """Paths of the layers that ran while an ``observe`` block was open, by what they did."""

    def __init__(self):
        self.recorded: dict[str, None] = {}
        self.unrecorded: dict[str, None] = {}
        self.compiled: dict[str, None] = {}


_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
    "asap_jax_observer", default=None
)


@contextlib.contextmanager
def observe():
    """Notes, at trace time, which layers record and which run compiled."""
    observer = Observer()
    token = _observer.set(observer)
    try:
        yield observer
    finally:
        _observer.reset(token)


def note(kind: str, path: str) -> None:
    """Tells an open ``observe`` block that the layer at ``path`` did ``kind``."""
    observer = _observer.get()
    if observer is not None:
        getattr(observer, kind)[path] = None
