"""Ridge least squares by streaming normal equations (paper, eq. asap_ls_closed_form)."""

from __future__ import annotations

import dataclasses
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
_EXACT = jax.lax.Precision.HIGHEST


@flax.struct.dataclass
class LeastSquaresFit:
    """Result of a ridge fit.

    Attributes:
      coefficients: omega ``(F,)``, or ``(H, F)`` when fitted per head; always finite when the
        data are.
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
    """Running sums of one pooled regression: Gram ``X'X``, ``X'y``, ``y'y`` and row count.

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
        return cls(
            jnp.zeros((*lead, f, f), dtype),
            jnp.zeros((*lead, f), dtype),
            jnp.zeros(lead, dtype),
            jnp.zeros(lead, dtype),
        )

    def add(
        self, features: ArrayLike, targets: ArrayLike, valid: ArrayLike | None = None
    ) -> NormalEquations:
        """Adds rows ``features (..., N, F)``, ``targets (..., N)``.

        ``valid`` (bool, broadcasting to the targets) drops rows, whatever they hold. With a
        leading head axis in the sums the rows' third axis from the end is the head.

        Raises:
          ValueError: shapes that do not fit; TypeError: dtypes that are not real floating.
        """
        x, y = _rows(features, targets)
        dtype = self.gram.dtype
        x, y = x.astype(dtype), y.astype(dtype)
        if x.shape[-1] != self.gram.shape[-1]:
            raise ValueError(
                f"features of shape {x.shape} do not fit normal equations of "
                f"{self.gram.shape[-1]} features"
            )
        keep = checks.validity("valid", valid, y)
        x = jnp.where(keep[..., None], x, jnp.zeros_like(x))
        y = jnp.where(keep, y, jnp.zeros_like(y))
        heads = self.gram.ndim == 3
        if heads and (x.ndim < 3 or x.shape[-3] != self.gram.shape[0]):
            raise ValueError(
                f"features of shape {x.shape} must have {self.gram.shape[0]} heads on axis -3"
            )
        if heads:
            by_head = lambda z, rest: jnp.moveaxis(z, -2 - rest, 0).reshape(
                z.shape[-2 - rest], -1, *z.shape[z.ndim - rest :]
            )
            x, y, keep = by_head(x, 1), by_head(y, 0), by_head(keep, 0)
        else:
            x, y, keep = x.reshape(-1, x.shape[-1]), y.reshape(-1), keep.reshape(-1)
        return NormalEquations(
            self.gram + jnp.einsum("...rf,...rg->...fg", x, x, precision=_EXACT),
            self.moment + jnp.einsum("...rf,...r->...f", x, y, precision=_EXACT),
            self.target_square + jnp.sum(y * y, -1),
            self.num_rows + jnp.sum(keep, -1, dtype=dtype),
        )

    def __add__(self, other: NormalEquations) -> NormalEquations:
        if not isinstance(other, NormalEquations):
            return NotImplemented
        return jax.tree.map(jnp.add, self, other)

    def pooled(self) -> NormalEquations:
        """The sums over heads, for one coefficient vector a layer."""
        return self if self.gram.ndim == 2 else jax.tree.map(lambda x: x.sum(0), self)

    def add_weighted(
        self,
        features: ArrayLike,
        targets: ArrayLike,
        weigh: Callable[[jax.Array], jax.Array],
        valid: ArrayLike | None = None,
    ) -> NormalEquations:
        """Adds ``X'HX``, ``X'Hy`` and ``y'Hy`` for a symmetric H >= 0 over the tokens.

        Args:
          features: ``(..., N, F)``; targets: ``(..., N)``; valid: as in ``add``.
          weigh: linear map ``(..., N, F + 1) -> (..., N, F + 1)``, the product with H.
        """
        x, y = _rows(features, targets)
        keep = checks.validity("valid", valid, y)
        both = jnp.concatenate([x, y[..., None].astype(x.dtype)], -1)
        both = jnp.where(keep[..., None], both, jnp.zeros_like(both)).astype(self.gram.dtype)
        weighed = weigh(both)
        product = jnp.einsum("...nf,...ng->...fg", both, weighed, precision=_EXACT)
        over = tuple(range(product.ndim - (2 if self.gram.ndim == 2 else 3)))
        product = product.sum(over)
        count = keep.sum(-1, dtype=self.gram.dtype).sum(over)
        return NormalEquations(
            self.gram + product[..., :-1, :-1],
            self.moment + product[..., :-1, -1],
            self.target_square + product[..., -1, -1],
            self.num_rows + count,
        )

    def whitening(self, floor: float = 1e-6) -> jax.Array:
        """``T (..., F, F)`` such that features times it have second moments I.

        Directions whose share is below ``floor``, at features of unit size, count as that large.
        """
        count = jnp.maximum(self.num_rows, jnp.ones_like(self.num_rows))[..., None]
        size = jnp.sqrt(jnp.diagonal(self.gram, axis1=-2, axis2=-1) / count)
        size = jnp.where(size > 0, size, jnp.ones_like(size))
        system = self.gram / count[..., None] / (size[..., :, None] * size[..., None, :])
        values, vectors = jnp.linalg.eigh(system)
        return vectors / size[..., None] / jnp.sqrt(jnp.maximum(values, floor))[..., None, :]

    def solve(self, ridge: float = 1e-3, ridge_scale: str = "absolute") -> LeastSquaresFit:
        """The minimiser of ``|X w - y|^2 + ridge w'Dw`` (no intercept).

        Args:
          ridge: lambda >= 0.
          ridge_scale: ``"absolute"``: D = I, the paper's unnormalised ridge; ``"trace"``:
            D = I tr(X'X) / F, a ridge that grows with the data; ``"diagonal"``: D = diag(X'X), one
            that does not depend on the size of any feature either.

        Solved by symmetric eigendecomposition; directions below the rounding floor are dropped,
        so the answer is never NaN and a singular Gram gives the minimum-norm one at ridge 0.

        Raises:
          ValueError: ``ridge < 0`` or not finite, an unknown scale.
        """
        ridge = checks.non_negative_float("ridge", ridge)
        checks.one_of("ridge_scale", ridge_scale, RIDGE_SCALES)
        finite = (
            jnp.isfinite(self.gram).all((-1, -2))
            & jnp.isfinite(self.moment).all(-1)
            & jnp.isfinite(self.target_square)
        )
        ok = finite & (self.num_rows > 0)
        gram = jnp.where(ok[..., None, None], self.gram, jnp.zeros_like(self.gram))
        moment = jnp.where(ok[..., None], self.moment, jnp.zeros_like(self.moment))
        if ridge == 0:
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
            self.target_square
            - 2 * jnp.sum(w * moment, -1)
            + jnp.einsum("...f,...fg,...g->...", w, gram, w, precision=_EXACT)
        )
        tiny = jnp.finfo(gram.dtype).tiny
        r_squared = 1 - residual / jnp.maximum(self.target_square, tiny)
        return LeastSquaresFit(
            w, jnp.where(ok, r_squared, jnp.zeros_like(r_squared)), self.num_rows, ok
        )


@dataclasses.dataclass(frozen=True)
class Regression:
    """What all least-squares fits of one layer share: which rows, and how they are solved.

    Attributes:
      rows: ``"active"`` tokens, or ``"all"`` that take part in the closures.
      per_head: one coefficient vector a head, or one for all heads.
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

    def solve(self, sums: NormalEquations) -> tuple[NormalEquations, jax.Array, dict[str, float]]:
        """The sums as they were solved, the coefficients, and figures of the fit.

        Raises:
          ValueError: no active token, or values that are not finite.
        """
        sums = sums if self.per_head else sums.pooled()
        solution = sums.solve(self.ridge, self.ridge_scale)
        if not bool(np.asarray(solution.ok).all()):
            raise ValueError("no active token in the calibration batches, or a value not finite")
        figures = dict(
            r_squared_fit=float(np.asarray(solution.r_squared).mean()),
            num_rows=float(np.asarray(solution.num_rows).sum()),
        )
        return sums, solution.coefficients, figures


def _ridge_size(square, ridge_scale):
    """The diagonal of D, from that of the Gram."""
    if ridge_scale == "absolute":
        return jnp.ones_like(square)
    if ridge_scale == "trace":
        return jnp.broadcast_to(square.mean(-1, keepdims=True), square.shape)
    return square


def _pseudo_solve(matrix, rhs):
    """Minimum-norm solution; eigenvalues below the rounding floor of the sums are dropped."""
    values, vectors = jnp.linalg.eigh(matrix)
    floor = jnp.finfo(matrix.dtype).eps * matrix.shape[-1] * jnp.abs(values).max(-1, keepdims=True)
    keep = values > floor
    inverse = jnp.where(
        keep, 1 / jnp.where(keep, values, jnp.ones_like(values)), jnp.zeros_like(values)
    )
    rotated = inverse * jnp.einsum("...fe,...f->...e", vectors, rhs, precision=_EXACT)
    return jnp.einsum("...fe,...e->...f", vectors, rotated, precision=_EXACT)


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
      valid: bool, broadcasting to the targets: rows that count.

    Returns:
      LeastSquaresFit with ``.coefficients (F,)``.

    Raises:
      ValueError: shapes that do not fit, ``ridge < 0``, concrete data that are empty or not
        finite in a valid row (under a trace ``.ok`` tells). TypeError: other dtypes.
    """
    x, y = _rows(features, targets)
    dtype = jnp.float64 if jnp.float64 in (x.dtype, y.dtype) else jnp.float32
    fit = NormalEquations.zero(x.shape[-1], dtype=dtype).add(x, y, valid).solve(ridge)
    if not isinstance(fit.ok, jax.core.Tracer) and not bool(np.asarray(fit.ok)):
        raise ValueError(
            f"features of shape {x.shape} and targets of shape {y.shape} hold no "
            f"valid row or a value that is not finite"
        )
    return fit


def _rows(features, targets):
    x, y = checks.real_array("features", features), checks.real_array("targets", targets)
    if x.ndim < 2 or x.shape[:-1] != y.shape:
        raise ValueError(
            f"features of shape {x.shape} and targets of shape {y.shape} must be "
            f"(..., N, F) and (..., N)"
        )
    return x, y
