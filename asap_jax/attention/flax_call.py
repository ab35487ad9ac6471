"""The arguments that Flax passes to an attention function, declared once.

``flax.linen`` passes only those keywords that the signature of an ``attention_fn`` names, so a
function with ``**kwargs`` would silently lose masks and dropout. ``attention_function`` and
``attention_method`` give a function of one ``Call`` the full signature.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax
from jax.typing import ArrayLike

from asap_jax import checks
from asap_jax.problem import Problem, make_problem

Result = jax.Array | tuple[jax.Array, jax.Array]


class AttentionFunction(Protocol):
    """The type of an attention function, with the keywords of ``Call``."""

    core: Callable[..., Result]

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        return_weights: bool = False,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
        **own: Any,
    ) -> Result:
        """``own`` are the keywords of this function; others raise TypeError."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one attention call; ``sinkhorn_attention`` describes them."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    _: dataclasses.KW_ONLY
    return_weights: Any = False
    dropout_rng: Any = None
    dropout_rate: Any = 0.0
    broadcast_dropout: Any = True
    deterministic: Any = True
    dtype: Any = None
    precision: Any = None
    module: Any = None
    is_causal: Any = False
    qk_attn_weights_einsum: Any = None
    attn_weights_value_einsum: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """``(query, key, value, bias, mask)``."""
        return self.query, self.key, self.value, self.bias, self.mask

    def replace(self, **changes: Any) -> Call:
        """The call with some arguments changed."""
        return dataclasses.replace(self, **changes)

    def problem(self, scale: float | None, axis_name: str | None = None) -> Problem:
        """The call as a Problem.

        Raises:
          ValueError: a causal call, einsums, shapes that do not fit.
          TypeError: dtypes that are not real floating.
        """
        if self.is_causal is not False and checks.static_bool("is_causal", self.is_causal):
            raise ValueError(
                "is_causal=True is refused: the only lower-triangular matrix with unit row and "
                "column sums is the identity, so no causal doubly-stochastic attention exists"
            )
        if self.qk_attn_weights_einsum is not None or self.attn_weights_value_einsum is not None:
            raise ValueError(
                "qk_attn_weights_einsum and attn_weights_value_einsum are not supported: "
                "scores and closures are computed in float32 at least"
            )
        return make_problem(
            *self.arrays,
            scale=scale,
            dtype=self.dtype,
            precision=self.precision,
            axis_name=axis_name,
        )


# Those of the protocol, which have types; its first parameter is self, its last is **own.
_PARAMETERS = tuple(inspect.signature(AttentionFunction.__call__).parameters.values())[1:-1]
_NAMES = frozenset(parameter.name for parameter in _PARAMETERS)
_M = TypeVar("_M", bound=Callable[..., Any])


def attention_function(core: Callable[..., Result]) -> AttentionFunction:
    """Gives ``core(call, *, own keywords)`` the full signature of Flax.

    ``.core`` of the result is ``core``, for modules that already have a Call.
    """
    signature = _signature(core)

    def function(*args, **kwargs):
        call, own = _bind(core.__name__, signature, args, kwargs)
        return core(call, **own)

    wrapped: Any = functools.wraps(core)(function)
    wrapped.__signature__, wrapped.core = signature, core
    return wrapped


def attention_method(core: _M) -> _M:
    """``attention_function`` for a method ``core(self, call)``."""
    signature = _signature(core, leading=1)

    def method(self, *args, **kwargs):
        call, own = _bind(type(self).__name__, signature, (self, *args), kwargs)
        return core(self, call, **own)

    wrapped: Any = functools.wraps(core)(method)
    wrapped.__signature__ = signature
    return wrapped


def _signature(core: Callable, leading: int = 0) -> inspect.Signature:
    """The signature of ``core``, with Flax's parameters in place of the call."""
    parameters = list(inspect.signature(core).parameters.values())
    own = parameters[leading + 1 :]
    return inspect.Signature([*parameters[:leading], *_PARAMETERS, *own])


def _bind(
    name: str, signature: inspect.Signature, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Call, dict[str, Any]]:
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None
    arguments.pop("self", None)
    call = Call(**{key: arguments.pop(key) for key in _NAMES & arguments.keys()})
    return call, arguments
