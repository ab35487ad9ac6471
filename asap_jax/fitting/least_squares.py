"""Ridge least squares by streaming normal equations (paper, eq. asap_ls_closed_form)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from asap_jax import checks

RIDGE_SCALES = ("absolute", "trace", "diagonal")
ROWS = ("active", "all")
einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@flax.struct.dataclass
class LeastSquaresFit:
    """Result of a ridge fit.

    Attributes:
      coefficients: omega ``(F,)``, or ``(H, F)`` when fitted per head; finite for finite data.
      r_squared: share of the target's second moment that is explained, ``()`` or ``(H,)``.
      num_rows: regression rows used.
      ok: bool, False when the data were empty or not finite (the coefficients are then 0).
    """

    coefficients: jax.Array
    r_squared: jax.Array
    num_rows: jax.Array
    ok: jax.Array


@flax.struct.dataclass
class NormalEquations:
    """Running sums of one regression: Gram ``X'X``, ``X'y``, ``y'y`` and row count.

    Sums add, so partial results merge across batches, devices and hosts
    (``a + b``, or ``jax.lax.psum(equations, axis_name)``).
    """

    gram: jax.Array
    moment: jax.Array
    target_square: jax.Array
    num_rows: jax.Array

    @classmethod
    def zero(
        cls, num_features: int, *, num_heads: int | None = None, dtype: Any = jnp.float32
    ) -> NormalEquations:
        """Empty sums for F features, with a leading axis of heads when ``num_heads`` is given."""
        lead = () if num_heads is None else (checks.positive_int("num_heads", num_heads),)
        f = checks.positive_int("num_features", num_features)
        dtype = checks.float_dtype("dtype", dtype)
        shapes = (*lead, f, f), (*lead, f), lead, lead
        return cls(*(jnp.zeros(shape, dtype) for shape in shapes))

    def add(
        self, features: ArrayLike, targets: ArrayLike, valid: ArrayLike | None = None
    ) -> NormalEquations:
        """The sums with further rows: features ``(..., N, F)``, targets ``(..., N)``.

        Rows where ``valid`` (bool, broadcasting to the targets) is False may hold anything. If the
        sums have an axis of heads, the heads of the features are on axis -3.

        Raises:
          ValueError: shapes that do not fit.
          TypeError: dtypes that are not real floating.
        """
        return self.add_weighted(features, targets, lambda z: z, valid)

    def add_weighted(
        self,
        features: ArrayLike,
        targets: ArrayLike,
        weigh: Callable[[jax.Array], jax.Array],
        valid: ArrayLike | None = None,
    ) -> NormalEquations:
        """Adds ``X'HX``, ``X'Hy`` and ``y'Hy`` for a symmetric H >= 0 over the tokens.

        Arguments and errors as ``add``, and ``weigh``: the product with H, from ``(..., N, F + 1)``
        to the same shape.
        """
        x, y = _rows(features, targets)
        if x.shape[-1] != self.gram.shape[-1]:
            raise ValueError(
                f"features of shape {x.shape} do not fit normal equations of "
                f"{self.gram.shape[-1]} features"
            )
        valid, dtype = checks.validity("valid", valid, y), self.gram.dtype
        both = jnp.concatenate([x.astype(dtype), y[..., None].astype(dtype)], -1)
        both = jnp.where(valid[..., None], both, jnp.zeros_like(both))
        weighed = weigh(both)
        if self.gram.ndim == 2:
            both, weighed = (z.reshape(-1, z.shape[-1]) for z in (both, weighed))
            num_rows = jnp.sum(valid, dtype=dtype)
        elif x.ndim < 3 or x.shape[-3] != self.gram.shape[0]:
            raise ValueError(
                f"features of shape {x.shape} must have {self.gram.shape[0]} heads on axis -3"
            )
        else:
            both, weighed = rows_by_head(both, 1), rows_by_head(weighed, 1)
            num_rows = jnp.sum(rows_by_head(valid, 0), -1, dtype=dtype)
        product = einsum("...rf,...rg->...fg", both, weighed)
        return NormalEquations(
            self.gram + product[..., :-1, :-1],
            self.moment + product[..., :-1, -1],
            self.target_square + product[..., -1, -1],
            self.num_rows + num_rows,
        )

    def __add__(self, other: NormalEquations) -> NormalEquations:
        if not isinstance(other, NormalEquations):
            return NotImplemented
        return jax.tree.map(jnp.add, self, other)

    def pooled(self) -> NormalEquations:
        """The sums over heads, for one coefficient vector per layer."""
        return self if self.gram.ndim == 2 else jax.tree.map(lambda x: x.sum(0), self)

    @functools.partial(jax.jit, static_argnames="floor")
    def whitening(self, floor: float = 1e-6) -> jax.Array:
        """``T (..., F, F)`` such that the second moments of ``x @ T`` are the identity.

        Eigenvalues below ``floor``, with every feature scaled to unit size, count as ``floor``.
        """
        count = jnp.maximum(self.num_rows, jnp.ones_like(self.num_rows))[..., None]
        size = jnp.sqrt(jnp.diagonal(self.gram, axis1=-2, axis2=-1) / count)
        size = jnp.where(size > 0, size, jnp.ones_like(size))
        system = self.gram / count[..., None] / (size[..., :, None] * size[..., None, :])
        values, vectors = jnp.linalg.eigh(system)
        return vectors / size[..., None] / jnp.sqrt(jnp.maximum(values, floor))[..., None, :]

    def solve(self, ridge: float = 1e-3, ridge_scale: str = "absolute") -> LeastSquaresFit:
        """The minimiser of ``|X w - y|^2 + ridge w'Dw`` (no intercept).

        The system is solved by a symmetric eigendecomposition. Directions below the rounding floor
        are dropped, so the result is never NaN; at ridge 0 it is the minimum-norm solution.

        Args:
          ridge: lambda >= 0.
          ridge_scale: ``"absolute"``: D = I, the paper's unnormalised ridge; ``"trace"``:
            D = I tr(X'X) / F, which grows with the data; ``"diagonal"``: D = diag(X'X), which also
            adapts to the size of each feature.

        Raises:
          ValueError: ``ridge < 0`` or not finite, an unknown scale.
        """
        ridge = checks.non_negative_float("ridge", ridge)
        checks.one_of("ridge_scale", ridge_scale, RIDGE_SCALES)
        return _solution(self, ridge, ridge_scale=ridge_scale, regularised=ridge > 0)


def rows_by_head(x: jax.Array, trailing: int) -> jax.Array:
    """``(..., H, N, *rest)`` to ``(H, rows, *rest)``, where rest has ``trailing`` axes."""
    head = -2 - trailing
    return jnp.moveaxis(x, head, 0).reshape(x.shape[head], -1, *x.shape[x.ndim - trailing :])


@dataclasses.dataclass(frozen=True)
class Regression:
    """Settings that all least-squares fits of one layer share.

    Attributes:
      rows: ``"active"`` tokens, or ``"all"`` tokens that take part in the closures.
      per_head: one coefficient vector per head, or one for all heads.
      ridge, ridge_scale: see ``NormalEquations.solve``.

    Raises:
      ValueError, TypeError: a setting that is unknown, out of range or of the wrong type.
    """

    rows: str
    per_head: bool
    ridge: float
    ridge_scale: str

    def __post_init__(self):
        checks.one_of("rows", self.rows, ROWS)
        checks.non_negative_float("ridge", self.ridge)
        checks.one_of("ridge_scale", self.ridge_scale, RIDGE_SCALES)

    def solve(self, sums: NormalEquations) -> tuple[NormalEquations, jax.Array, dict[str, Any]]:
        """The sums that were solved (pooled or per head), the coefficients, and figures of the fit.

        Raises:
          ValueError: no active token, or values that are not finite. Under a trace the coefficients
            are then 0; figures are arrays there.
        """
        sums = sums if self.per_head else sums.pooled()
        solution = sums.solve(self.ridge, self.ridge_scale)
        if isinstance(solution.ok, jax.core.Tracer):
            r_squared, num_rows = solution.r_squared.mean(), solution.num_rows.sum()
            return sums, solution.coefficients, dict(r_squared_fit=r_squared, num_rows=num_rows)
        if not bool(np.asarray(solution.ok).all()):
            raise ValueError("no active token in the calibration batches, or a value not finite")
        figures = dict(
            r_squared_fit=float(np.asarray(solution.r_squared).mean()),
            num_rows=float(np.asarray(solution.num_rows).sum()),
        )
        return sums, solution.coefficients, figures


@functools.partial(jax.jit, static_argnames=("ridge_scale", "regularised"))
def _solution(
    sums: NormalEquations, ridge: ArrayLike, *, ridge_scale: str, regularised: bool
) -> LeastSquaresFit:
    """``NormalEquations.solve``; one program for all values of ``ridge``."""
    finite = (
        jnp.isfinite(sums.gram).all((-1, -2))
        & jnp.isfinite(sums.moment).all(-1)
        & jnp.isfinite(sums.target_square)
    )
    ok = finite & (sums.num_rows > 0)
    gram = jnp.where(ok[..., None, None], sums.gram, jnp.zeros_like(sums.gram))
    moment = jnp.where(ok[..., None], sums.moment, jnp.zeros_like(sums.moment))
    if not regularised:
        w = _pseudo_solve(gram, moment)
    else:  # unit diagonal first: features of any size then share one rounding floor
        square = jnp.diagonal(gram, axis1=-2, axis2=-1)
        penalty = ridge * _ridge_size(square, ridge_scale)
        size = jnp.sqrt(square + penalty)
        size = jnp.where(size > 0, size, jnp.ones_like(size))
        unit = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
        system = gram + penalty[..., None] * unit
        system = system / (size[..., :, None] * size[..., None, :])
        w = _pseudo_solve(system, moment / size) / size
    w = jnp.where(jnp.isfinite(w), w, jnp.zeros_like(w))
    residual = (
        sums.target_square
        - 2 * jnp.sum(w * moment, -1)
        + einsum("...f,...fg,...g->...", w, gram, w)
    )
    r_squared = 1 - residual / jnp.maximum(sums.target_square, jnp.finfo(gram.dtype).tiny)
    r_squared = jnp.where(ok, r_squared, jnp.zeros_like(r_squared))
    return LeastSquaresFit(w, r_squared, sums.num_rows, ok)


def _ridge_size(square: jax.Array, ridge_scale: str) -> jax.Array:
    """The diagonal of D (see ``NormalEquations.solve``) from the diagonal of the Gram matrix."""
    if ridge_scale == "absolute":
        return jnp.ones_like(square)
    if ridge_scale == "trace":
        return jnp.broadcast_to(square.mean(-1, keepdims=True), square.shape)
    return square


def _pseudo_solve(matrix: jax.Array, rhs: jax.Array) -> jax.Array:
    """Minimum-norm solution; eigenvalues below the rounding floor of the sums are dropped."""
    values, vectors = jnp.linalg.eigh(matrix)
    floor = jnp.finfo(matrix.dtype).eps * matrix.shape[-1] * jnp.abs(values).max(-1, keepdims=True)
    large = values > floor
    inverse = 1 / jnp.where(large, values, jnp.ones_like(values))
    inverse = jnp.where(large, inverse, jnp.zeros_like(values))
    rotated = inverse * einsum("...fe,...f->...e", vectors, rhs)
    return einsum("...fe,...e->...f", vectors, rotated)


def fit_ls(
    features: ArrayLike,
    targets: ArrayLike,
    *,
    ridge: float = 1e-3,
    valid: ArrayLike | None = None,
) -> LeastSquaresFit:
    """Pooled ridge least squares of a dual on features (paper, eq. asap_ls).

    Args:
      features: ``(..., N, F)``; all leading axes, heads included, are pooled.
      targets: ``(..., N)`` centred duals, cost coordinates.
      ridge: unnormalised lambda >= 0 (``M N lambda_risk`` in the paper's risk units).
      valid: bool, broadcasting to the targets: the rows to use.

    Returns:
      LeastSquaresFit with ``.coefficients (F,)``.

    Raises:
      ValueError: shapes that do not fit, ``ridge < 0``, data that are empty or not finite in a
        valid row (under a trace ``.ok`` is False instead).
      TypeError: dtypes that are not real floating.
    """
    x, y = _rows(features, targets)
    dtype = jnp.float64 if jnp.float64 in (x.dtype, y.dtype) else jnp.float32
    fit = NormalEquations.zero(x.shape[-1], dtype=dtype).add(x, y, valid).solve(ridge)
    if not isinstance(fit.ok, jax.core.Tracer) and not bool(np.asarray(fit.ok)):
        raise ValueError(
            f"features of shape {x.shape} and targets of shape {y.shape} hold no valid row, or a "
            f"value that is not finite"
        )
    return fit


def _rows(features: ArrayLike, targets: ArrayLike) -> tuple[jax.Array, jax.Array]:
    x, y = checks.real_array("features", features), checks.real_array("targets", targets)
    if x.ndim < 2 or x.shape[:-1] != y.shape:
        raise ValueError(
            f"features of shape {x.shape} and targets of shape {y.shape} must be "
            f"(..., N, F) and (..., N)"
        )
    return x, y
