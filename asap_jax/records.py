"""What a Sinkhorn layer records while calibrating, and the state that compiles it.

Shared by the linen and nnx adapters: the same records and the same state under both.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax.predictor.predictor import DualPair, Predictor
from asap_jax.spec import SinkhornSpec

SHARED_INSTANCE = (
    "the SinkhornAttention at {path!r} was called twice in one forward pass while recording, so "
    "its records would merge: one instance is shared by two layers or calls. Build one "
    "SinkhornAttention per layer (or drop an old {old} from the input)"
)


def stack_mark(stack: tuple[int, ...]) -> jax.Array:
    """The ``mark`` of a stack of layers; of floating dtype, since states are differentiated."""
    return jnp.zeros(stack, jnp.float32)


@flax.struct.dataclass
class Record:
    """The inputs of one attention call, in Flax's layout, and the layer's spec.

    Attributes:
      query ``(..., N, H, d)``, key ``(..., M, H, d)``, value ``(..., M, H, d_v)``.
      bias, mask: rank of the scores, or None.
      mark: 0 inside the layer. It has no axis, so a scan can stack records along axis 0 only.
      spec: the layer's convention.
      ndim: rank of ``query`` inside the layer; further leading axes were added by a scan.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    mark: jax.Array
    spec: SinkhornSpec = flax.struct.field(pytree_node=False)
    ndim: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, query, key, value, bias, mask, spec) -> Record:
        """Records one call as it was made."""
        return cls(query, key, value, bias, mask, stack_mark(()), spec=spec, ndim=query.ndim)

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
      mark: zeros of the stack's shape, 0-d inside a layer (None where nothing is known): it can be
        sliced along axis 0 only, and a stack that comes unsliced is seen.
      probe: told apart from 0 while a compile checks that every layer switches, so that no trace
        from a cache answers for it.
    """

    predictor: Predictor | DualPair
    spec: SinkhornSpec = flax.struct.field(pytree_node=False)
    closures: Any = flax.struct.field(pytree_node=False, default="two_sided")
    mark: jax.Array | None = None
    probe: int = flax.struct.field(pytree_node=False, default=0)

    def check(self, spec: SinkhornSpec, path: str, cure: str) -> None:
        """Raises ValueError when the layer's own spec is another, or a stack came unsliced."""
        if self.mark is not None and self.mark.ndim:
            raise ValueError(
                f"layer {path!r} got the state of a whole stack of {self.mark.shape} layers: "
                f"the transform around it does not slice it. {cure}"
            )
        if self.spec != spec:
            raise ValueError(
                f"layer {path!r} has {spec}, but its compiled state was fitted to "
                f"{self.spec}; compile the layer again"
            )


_probes = itertools.count(1)


def fresh_probe() -> int:
    """A number that no trace has seen."""
    return next(_probes)


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
