"""The one declaration of what Flax passes an attention function.

``flax.linen`` reads the signature of an ``attention_fn`` and passes only the keywords it names, so
a ``**kwargs`` function would silently lose masks and dropout. ``attention_function`` and
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
    """What a static type checker sees; the keywords are those of ``Call``."""

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
        """``own`` are the function's own keywords; others raise TypeError."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one attention call, as Flax passes them.

    Attributes:
      query: ``(..., N, heads, head_dim)``.
      key: ``(..., M, heads, head_dim)``; value: ``(..., M, heads, value_dim)``.
      bias, mask: rank of the scores ``(..., heads, N, M)``, or None.
      return_weights: static; also return the weights.
      dropout_rng, dropout_rate, broadcast_dropout, deterministic: dropout on the normalised
        weights; it breaks the marginals.
      dtype: computation dtype of the inputs and the output; inside, float32 at least.
      precision: matmul precision of the scores and of the product with the values.
      module: a Flax module to sow the weights into.
      is_causal, qk_attn_weights_einsum, attn_weights_value_einsum: refused, with the reason.
    """

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
        """The call with other arguments."""
        return dataclasses.replace(self, **changes)

    def problem(self, scale: float | None) -> Problem:
        """The call as per-head problems.

        Raises:
          ValueError: a causal call, einsums, shapes that do not fit; TypeError: dtypes.
        """
        if self.is_causal is not False and checks.static_bool("is_causal", self.is_causal):
            raise ValueError(
                "is_causal=True is refused: the only lower-triangular matrix with unit row and "
                "column sums is the identity, and a key closure reads later queries, so no causal "
                "doubly-stochastic attention exists"
            )
        if self.qk_attn_weights_einsum is not None or self.attn_weights_value_einsum is not None:
            raise ValueError(
                "qk_attn_weights_einsum and attn_weights_value_einsum are not supported: "
                "scores and closures are computed in float32 at least"
            )
        return make_problem(*self.arrays, scale=scale, dtype=self.dtype, precision=self.precision)


_PARAMETERS = tuple(inspect.signature(Call).parameters.values())
_NAMES = frozenset(parameter.name for parameter in _PARAMETERS)
_M = TypeVar("_M", bound=Callable[..., Any])


def attention_function(core: Callable[..., Result]) -> AttentionFunction:
    """Turns ``core(call, *, own keywords)`` into a function with Flax's whole signature.

    ``core`` stays reachable as ``.core``, for modules that hold a Call already.
    """
    signature = _signature(core)

    @functools.wraps(core)
    def function(*args, **kwargs):
        call, own = _bind(core.__name__, signature, args, kwargs)
        return core(call, **own)

    function.__signature__ = signature
    function.core = core
    return function


def attention_method(core: _M) -> _M:
    """The same for a method ``core(self, call)``."""
    signature = _signature(core, leading=1)

    @functools.wraps(core)
    def method(self, *args, **kwargs):
        call, own = _bind(type(self).__name__, signature, (self, *args), kwargs)
        return core(self, call, **own)

    method.__signature__ = signature
    return method


def _signature(core: Callable, leading: int = 0) -> inspect.Signature:
    """Flax's parameters in the place of ``core``'s call, then its own keywords."""
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
