"""One attention call as per-head problems, with layout, dtypes and masks resolved.

Attention functions take Flax's layout ``(..., length, heads, head_dim)``; the rest of the library
works on ``(..., heads, length, head_dim)``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, devices, masks
from asap_jax.scores import dot, squared_norm

FAR = 4.0
SAMPLE = 4
"""See ``Problem.without_key_offset``."""


class Tokens(NamedTuple):
    """The input of features: ``own`` are the tokens of the side to predict, ``other`` the rest.

    ``own (..., N, d)``, ``other (..., M, d)``; ``scale`` is the score scale. The validities are
    bool, ``(..., N)`` and ``(..., M)``, or None if every token is valid. ``axis_name``: as in
    Problem.
    """

    own: jax.Array
    other: jax.Array
    scale: float
    own_valid: jax.Array | None
    other_valid: jax.Array | None
    axis_name: str | None = None

    def swapped(self) -> Tokens:
        """The same tokens with the two sides exchanged."""
        return self._replace(
            own=self.other,
            other=self.own,
            own_valid=self.other_valid,
            other_valid=self.own_valid,
        )

    @property
    def origin(self) -> jax.Array:
        """The first of the own tokens, ``(..., 1, d)``, without a gradient.

        With ``axis_name`` the mean of those of the devices. It only says where to measure from, so
        the gradient through it is 0.
        """
        return devices.mean(jax.lax.stop_gradient(self.own[..., :1, :]), self.axis_name)

    def shift(self) -> jax.Array:
        """The shift ``(..., N)`` from score to cost coordinates, up to a constant.

        It is ``query_shift`` of ``own`` minus that of ``origin``. Squared lengths of tokens that
        are far from 0 would have few float32 digits left; distances from one of them have more.
        """
        steps = self.own - self.origin
        return self.scale * dot(steps, 0.5 * steps + self.origin)

    def absolute_shift(self) -> jax.Array:
        """The shift ``(..., N)`` with its constant, as ``query_shift`` of ``own``."""
        return 0.5 * self.scale * squared_norm(self.own)


@flax.struct.dataclass
class Problem:
    """One attention call, per head: axes ``(..., heads, tokens, ...)``.

    Attributes:
      q ``(..., H, N, d)``, k ``(..., H, M, d)``, v ``(..., H, M, d_v)``: float32 at least, with
        inactive tokens set to 0. v is None where only weights are computed.
      bias: broadcasts to the scores, 0 at masked entries, or None.
      mask: bool, broadcasts to the scores, or None.
      validity: the tokens that take part in the marginals; None if all do.
      scale: the score scale.
      dtype: dtype of the output.
      precision: matmul precision of the scores and of the product with the values.
      whole_tokens: the mask leaves out whole queries and whole keys, so ``validity`` says it all.
      axis_name: the axis of an enclosing ``jax.shard_map`` over which queries and keys are sharded,
        see ``devices``. All arrays are then those of one device.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    bias: jax.Array | None
    mask: jax.Array | None
    validity: masks.Validity | None
    scale: float = flax.struct.field(pytree_node=False)
    dtype: Any = flax.struct.field(pytree_node=False)
    precision: Any = flax.struct.field(pytree_node=False, default=None)
    whole_tokens: bool = flax.struct.field(pytree_node=False, default=False)
    axis_name: str | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def score_shape(self) -> tuple[int, ...]:
        """``(..., H, N, M)``."""
        return (*self.q.shape[:-1], self.k.shape[-2])

    @property
    def products(self) -> jax.Array:
        """The scalar products of queries and keys, ``(..., H, N, M)``."""
        return jnp.einsum("...nd,...md->...nm", self.q, self.k, precision=self.precision)

    @property
    def scores(self) -> jax.Array:
        """Scores with the bias, ``(..., H, N, M)``; the mask is not applied."""
        return self.scores_of(self.products)

    def scores_of(self, products: jax.Array) -> jax.Array:
        """``scores`` from ``products``."""
        s = self.scale * products
        return s if self.bias is None else s + self.bias.astype(s.dtype)

    def log_kernel(self, epsilon: float, products: jax.Array | None = None) -> jax.Array:
        """``scores / epsilon``, -inf where masked: ``(..., H, N, M)``.

        ``products`` are ``self.products`` if they have been computed.
        """
        kernel = self.scores_of(self.products if products is None else products) / epsilon
        return kernel if self.mask is None else jnp.where(self.mask, kernel, -jnp.inf)

    def active(self, side: str) -> jax.Array:
        """Which tokens of ``side`` take part, ``(..., H, N or M)``; a scalar True if all do."""
        return jnp.bool_(True) if self.validity is None else getattr(self.validity, side)

    def log_key_target(self, key_mass: str) -> jax.Array:
        """Log of the column target, see ``masks.log_key_target``."""
        return masks.log_key_target(
            key_mass, self.validity, self.score_shape, self.q.dtype, self.axis_name
        )

    def without_key_offset(self) -> Problem:
        """The problem without an offset that all active keys share in a channel.

        An offset changes the scores by a constant for each query, which a first closure over the
        keys cancels; but float32 scores with a large constant have few digits left. The mean of a
        channel is its offset if it is more than ``FAR`` times as large as the distance of any key
        from it. It is rounded to ``dtype``, so that such keys minus the offset are exact there.
        Without a mask the first ``SAMPLE`` keys (of each device) decide, so that it costs nothing.
        """
        valid = None if self.validity is None else self.validity.key
        sampled = valid is None and isinstance(self.k.shape[-2], int)
        keys = jax.lax.stop_gradient(self.k[..., :SAMPLE, :] if sampled else self.k)
        mean = masks.token_mean(keys, valid, self.axis_name)
        distances = jnp.abs(masks.zero_inactive(keys - mean, valid))
        farthest = devices.largest(jnp.max(distances, -2, keepdims=True), self.axis_name)
        common = jnp.abs(mean) > FAR * farthest
        offset = jnp.where(common, mean, jnp.zeros_like(mean)).astype(self.dtype)
        offset = offset.astype(self.k.dtype)
        return dataclasses.replace(self, k=masks.zero_inactive(self.k - offset, valid))

    def moved(self) -> Problem:
        """The problem with the axes of heads and tokens of q, k and v exchanged."""
        q, k = (jnp.swapaxes(x, -2, -3) for x in (self.q, self.k))
        v = None if self.v is None else jnp.swapaxes(self.v, -2, -3)
        return dataclasses.replace(self, q=q, k=k, v=v)

    def swapped(self) -> Problem:
        """The problem with queries and keys exchanged, without values."""
        turned = lambda x: None if x is None else jnp.swapaxes(x, -1, -2)
        validity = self.validity and masks.Validity(self.validity.key, self.validity.query)
        bias, mask = turned(self.bias), turned(self.mask)
        q, k = self.k, self.q
        return dataclasses.replace(self, q=q, k=k, v=None, bias=bias, mask=mask, validity=validity)

    def tokens(self, side: str, padding: str) -> Tokens:
        """The tokens with ``side`` as ``own``, valid where ``padding`` says they carry features."""
        q_valid, k_valid = masks.feature_validity(self.validity, padding) or (None, None)
        tokens = Tokens(self.q, self.k, self.scale, q_valid, k_valid, self.axis_name)
        return tokens if side == "query" else tokens.swapped()


def make_problem(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None,
    dtype: Any = None,
    precision: Any = None,
    axis_name: str | None = None,
) -> Problem:
    """Checks the arrays of one attention call and converts them to a Problem.

    Raises:
      ValueError: ranks, lengths, head counts, masks or biases that do not fit, ``scale <= 0``; with
        an ``axis_name``, masks and biases that do not leave out whole tokens.
      TypeError: dtypes that are not real floating.
    """
    query, key, value = promote(query, key, value, dtype=dtype)
    key, value = match_heads(query, key, value)
    q, k, v = [jnp.swapaxes(checks.at_least_f32(x), -2, -3) for x in (query, key, value)]
    scale, shape = checks.score_scale(scale, q.shape[-1]), (*q.shape[:-1], k.shape[-2])
    if axis_name is not None:
        _check_sharded(axis_name, dict(query=query, key=key, value=value))
        _check_masks_of_a_device(axis_name, shape, dict(bias=bias, mask=mask))
    bias, allowed = masks.as_bias(bias, shape)
    q, v = masks.spoiled(mask, q, v)
    mask = masks.as_mask(mask, shape)
    validity = masks.joint_validity(mask, allowed, shape, axis_name)
    if validity is not None:
        q = masks.zero_inactive(q, validity.query)
        k = masks.zero_inactive(k, validity.key)
        v = masks.zero_inactive(v, validity.key)
        if bias is not None:
            bias = masks.zero_masked(masks.zero_masked(bias, mask), allowed)
    whole = masks.leaves_out_tokens(mask) and masks.leaves_out_tokens(allowed)
    mask = masks.combine(mask, allowed)
    return Problem(q, k, v, bias, mask, validity, scale, query.dtype, precision, whole, axis_name)


def _check_sharded(axis_name: Any, arrays: dict[str, jax.Array]) -> None:
    """Raises an error if ``axis_name`` is not an axis over which the arrays are sharded.

    TypeError: not a string. ValueError: not an axis of a ``shard_map``, or an array is the same on
    all devices, as far as JAX knows (with ``check_vma=False`` it does not).
    """
    checks.instance("axis_name", axis_name, str, "the name of an axis")
    devices.size(axis_name)
    for name, array in arrays.items():
        if not devices.may_differ(array, axis_name):
            raise ValueError(
                f"axis_name={axis_name!r} is for tokens that are sharded over this axis, but "
                f"{name} of shape {array.shape} is the same on all devices: shard its tokens in "
                "the in_specs of jax.shard_map"
            )


def _check_masks_of_a_device(axis_name: str, shape: tuple, arrays: dict[str, Any]) -> None:
    """Raises ValueError for masks and biases with which devices cannot share the tokens.

    With one query or key on a device the shape does not tell whether whole tokens are left out.
    ``shape`` is that of the scores of one device.
    """
    for name, array in arrays.items():
        if array is None:
            continue
        if 1 in shape[-2:]:
            raise ValueError(
                f"axis_name={axis_name!r} with a {name} needs two or more queries and keys on "
                f"each device, got scores of shape {shape} there"
            )
        array = checks.array(name, array)
        n, m = shape[-2:]
        if array.ndim == len(shape) and array.shape[-2:] not in ((1, m), (n, 1), (1, 1)):
            raise ValueError(
                f"axis_name={axis_name!r} takes a {name} of the keys, (..., heads, 1, M), or of "
                f"the queries, (..., heads, N, 1), sharded as they are: {(1, m)} or {(n, 1)} on "
                f"each device, got shape {array.shape}. Give one as mask and the other as bias to "
                "leave out both"
            )


def promote(
    query: Any, key: Any, value: Any, *, dtype: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three inputs in one real floating dtype: ``dtype``, or their common one if None."""
    query = checks.real_array("query", query)
    key = checks.real_array("key", key)
    value = checks.real_array("value", value)
    if dtype is None:
        dtype = jnp.promote_types(jnp.promote_types(query.dtype, key.dtype), value.dtype)
    else:
        dtype = checks.float_dtype("dtype", dtype)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def match_heads(
    query: jax.Array, key: jax.Array, value: jax.Array, group: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Checks shapes; repeats ``group`` key and value heads at a time up to the query heads."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value must be (..., length, heads, head_dim) of equal "
            f"rank >= 3, got {shapes}"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"batch axes of query, key and value differ: {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"head_dim of query and key differ: {shapes}")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"lengths of key and value differ: {shapes}")
    if key.shape[-2] != value.shape[-2] or key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"heads of key and value must be equal and divide those of query: {shapes}"
        )
    if 0 in query.shape[-3:] or 0 in key.shape[-3:]:
        raise ValueError(f"query, key and value must hold a token, a head and a channel: {shapes}")
    repeats = query.shape[-2] // key.shape[-2]
    if repeats == 1:
        return key, value

    def repeat(x):
        if group == 1:
            return jnp.repeat(x, repeats, axis=-2)
        groups = x.reshape(*x.shape[:-2], -1, group, x.shape[-1])
        return jnp.repeat(groups, repeats, axis=-3).reshape(*x.shape[:-2], -1, x.shape[-1])

    return repeat(key), repeat(value)
