"""What a Sinkhorn layer records while calibrating, and the state that compiles it.

The linen and nnx adapters share these classes and the functions on one record.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks
from asap_jax.predictor import DualPair, Predictor
from asap_jax.predictor.key_bias import KeyBias, key_bias
from asap_jax.problem import Problem, make_problem
from asap_jax.spec import SinkhornSpec

SHARED_INSTANCE = (
    "the SinkhornAttention at {path!r} was called twice in one forward pass while recording, so "
    "its records would merge: one instance is shared by two layers or calls. Build one "
    "SinkhornAttention per layer (or drop an old {old} from the input)"
)


def check_whole(axis_name: str | None, path: str) -> None:
    """Raises ValueError for a layer that would record the tokens of one device alone."""
    if axis_name is not None:
        raise ValueError(
            f"the SinkhornAttention at {path!r} cannot record with axis_name={axis_name!r}, where "
            f"a device has only some of the tokens: compile the model with axis_name=None, outside "
            f"of jax.shard_map, and set axis_name afterwards"
        )


def stack_mark(stack: tuple[int, ...]) -> jax.Array:
    """The ``mark`` of a stack of layers; floating, because states are differentiated."""
    return jnp.zeros(stack, jnp.float32)


@flax.struct.dataclass
class Record:
    """The inputs of one attention call, in Flax's layout, and the layer's spec.

    Attributes:
      query ``(..., N, H, d)``, key ``(..., M, H, d)``, value ``(..., M, H, d_v)``.
      bias, mask: rank of the scores, or None.
      mark: 0-d inside the layer, so that a scan can stack records along axis 0 only.
      spec: the layer's convention.
      ndim: rank of ``query`` inside the layer; a scan adds leading axes.
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
    def of(
        cls,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None,
        mask: jax.Array | None,
        spec: SinkhornSpec,
    ) -> Record:
        """The record of one call."""
        return cls(query, key, value, bias, mask, stack_mark(()), spec=spec, ndim=query.ndim)

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the leading axes that scans over layers added."""
        return self.query.shape[: self.query.ndim - self.ndim]

    @property
    def tokens(self) -> tuple[jax.Array | None, ...]:
        """Query, key, value, bias and mask: the arguments of an attention function."""
        return self.query, self.key, self.value, self.bias, self.mask

    def with_padding(self, padding: str | None) -> Record:
        """The record with this ``padding`` in its spec; the same for None."""
        return dataclasses.replace(self, spec=self.spec.with_padding(padding))

    def with_queries(self, scale: float) -> Record:
        """The record with its queries times ``scale``; the same for 1."""
        return self if scale == 1 else dataclasses.replace(self, query=scale * self.query)


class Passed(NamedTuple):
    """One forward pass: the records of its layers by path, and the arrays of its output."""

    records: dict[str, Record]
    outputs: list[jax.Array]


def array_leaves(output: Any) -> list[jax.Array]:
    """The arrays of a model's output, in the order of its pytree."""
    return [leaf for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)]


@flax.struct.dataclass
class CompiledState:
    """The state with which a SinkhornAttention module runs the compiled operator.

    Attributes:
      predictor: the fitted predictor (a DualPair for closures ``"none"``); under a scan every
        array has a leading layer axis.
      spec: the teacher's convention to which it was fitted.
      closures, ending: see ``asap_attention``.
      mark: zeros of the stack's shape, so 0-d inside a layer. ``check`` reads it to detect a stack
        that no scan sliced along axis 0; None skips that check.
      probe: nonzero while a compile checks that every layer switches, to force a fresh trace.
    """

    predictor: Predictor | DualPair
    spec: SinkhornSpec = flax.struct.field(pytree_node=False)
    closures: Any = flax.struct.field(pytree_node=False, default="two_sided")
    mark: jax.Array | None = None
    probe: int = flax.struct.field(pytree_node=False, default=0)
    ending: str = flax.struct.field(pytree_node=False, default="teacher")

    def to_bias(self, query: Any, key: Any, bias: Any = None, mask: Any = None) -> KeyBias:
        """The layer as plain attention with a bias on the keys, see ``KeyBias``.

        For a state of ``closures=1`` that ends on rows. Then

          bias, scale, rows = state.to_bias(query, key, None, mask)
          out = jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale)

        is the layer's output, times ``rows`` if they are not None. The mask is needed in both
        calls; that function takes bool masks only.

        Args:
          query: ``(..., N, heads, head_dim)``; key: ``(..., M, heads, head_dim)``.
          bias, mask: rank of the scores, as in a call of the layer.

        Raises:
          ValueError: more than one closure, a layer that ends on columns, or a stack of layers.
        """
        if self.mark is not None and self.mark.ndim:
            raise ValueError(
                f"this is the state of a stack of {self.mark.shape} layers: take one of them, for "
                f"instance with jax.tree.map(lambda x: x[0], state)"
            )
        if self.closures != 1:
            raise ValueError(f"only closures=1 is a bias on the keys, got {self.closures!r}")
        predictor = checks.instance("predictor", self.predictor, Predictor, "a Predictor")
        return key_bias(predictor, query, key, bias, mask, spec=self.spec, ending=self.ending)

    def check(self, spec: SinkhornSpec, path: str, hint: str) -> None:
        """Raises ValueError when the layer's own spec differs, or a stack was not sliced."""
        if self.mark is not None and self.mark.ndim:
            raise ValueError(
                f"layer {path!r} got the state of a whole stack of {self.mark.shape} layers: "
                f"the transform around it does not slice it. {hint}"
            )
        if self.spec != spec:
            raise ValueError(
                f"layer {path!r} has {spec}, but its compiled state was fitted to "
                f"{self.spec}; compile the layer again"
            )


def compiled_state(value: Any, path: str) -> CompiledState:
    """``value``, the state of layer ``path``; TypeError if a checkpoint gave it another type."""
    if not isinstance(value, CompiledState):
        raise TypeError(
            f"the state of layer {path!r} must be a CompiledState, got {checks.describe(value)}: "
            f"a checkpoint was restored without its types. Restore it into a compiled model (with "
            f"orbax: restore(directory, target), where target has the shapes of what was saved), "
            f"or use asap_jax.save and asap_jax.load"
        )
    return value


_probes = itertools.count(1)


def fresh_probe() -> int:
    """A new value of ``CompiledState.probe``, one that no cached trace has."""
    return next(_probes)


class Observer:
    """Paths of the layers that ran inside an ``observe`` block, by what they did."""

    def __init__(self) -> None:
        self.recorded: dict[str, None] = {}
        self.unrecorded: dict[str, None] = {}
        self.compiled: dict[str, None] = {}


_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
    "asap_jax_observer", default=None
)


@contextlib.contextmanager
def observe() -> Iterator[Observer]:
    """Collects, at trace time, which layers record and which run compiled."""
    observer = Observer()
    token = _observer.set(observer)
    try:
        yield observer
    finally:
        _observer.reset(token)


def note(kind: str, path: str) -> None:
    """Adds ``path`` to the ``kind`` of an open ``observe`` block."""
    observer = _observer.get()
    if observer is not None:
        getattr(observer, kind)[path] = None


def problem(record: Record) -> Problem:
    """The per-head problem of a record."""
    return make_problem(*record.tokens, scale=record.spec.scale)


def call(record: Record, function: Callable[..., Any], **settings: Any) -> tuple[jax.Array, ...]:
    """Output and weights of an attention function on a record, in float32 at least."""
    tokens = (checks.at_least_f32(x) for x in (record.query, record.key, record.value))
    return function(*tokens, record.bias, record.mask, return_weights=True, **settings)


def over_stack(function: Callable[..., Any], record: Record, *rest: Any) -> Any:
    """``function(record, *rest)``; for a stacked record, on one layer after the other."""
    if not record.stack:
        return function(record, *rest)
    inner = lambda args: over_stack(function, *args)
    return jax.lax.map(inner, (record, *rest))


def unstack(record: Record) -> list[Record]:
    """The records of the single layers of a stack, in order."""
    if not record.stack:
        return [record]
    depth, count = len(record.stack), math.prod(record.stack)
    flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[depth:]), record)
    return [jax.tree.map(lambda x, i=i: x[i], flat) for i in range(count)]


def check_mask(record: Record, path: str, where: str) -> None:
    """Raises ValueError for a mask with values that are neither 0 nor 1, unless it is traced."""
    if record.mask is None or isinstance(record.mask, jax.core.Tracer):
        return
    mask = np.asarray(record.mask)
    if mask.dtype != bool and not np.isin(mask, (0, 1)).all():
        raise ValueError(
            f"{where} has a mask of shape {mask.shape} at layer {path!r} that must hold only 0 and "
            f"1; give additive masks as bias"
        )


def split_batch(batch: Any) -> tuple[tuple, dict]:
    """A batch as ``(args, kwargs)``: from a tuple, a dict, or a single array."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def layer_path(names: Iterable[Any]) -> str:
    """The names on the way to a layer as its path ``"a/b"``.

    Raises:
      ValueError: a name has a "/", so that two layers could have one path.
    """
    parts = [str(name) for name in names]
    for part in parts:
        if "/" in part:
            raise ValueError(
                f"the name {part!r} on the way to a SinkhornAttention layer has a '/', which "
                f"separates the names in the path of a layer: rename it"
            )
    return "/".join(parts)


def group_by_path(tree: Mapping, leaf_type: type, prefix: tuple = ()) -> dict[str, Any]:
    """Flattens nested mappings to ``{"a/b": leaf}``, for ``tree["a"]["b"][name] = leaf``."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, leaf_type):
            leaves[layer_path(prefix)] = value
        elif isinstance(value, Mapping):
            leaves.update(group_by_path(value, leaf_type, (*prefix, name)))
    return leaves
