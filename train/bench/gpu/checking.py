"""Outputs, marginals and gradients of every implementation against float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.bench.gpu.attempts import Task
from train.bench.gpu.operators import OPERATORS, dense
from train.bench.gpu.page import RESULT, Section

BATCH, HEADS = 2, 2
SPREAD = 1.5  # of the entries of queries and keys; scores then have standard deviation 2.25
SHORT = 0.7  # share of the keys that the second example of a masked batch has
SECTION = Section(
    "Outputs against float64",
    ("setting", "operator", "implementation"),
    ("output", "row sums", "column sums"),
    "output: relative error (Frobenius). Row sums: the largest difference from those of float64; "
    "column sums: the root mean square of the difference, estimated from values of random signs. "
    "Rounding of bfloat16 outputs hides errors of row sums below 4e-3, of column sums below 4e-4. "
    "A result other than ok gives the reason, or the error that was allowed.",
)
GRADIENTS = Section(
    "Gradients against float64",
    ("setting", "operator", "implementation"),
    ("query", "key", "value"),
    "relative errors (Frobenius) of the gradients, for a cotangent of random signs.",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Inputs of a check: Gaussian queries and keys, values of random signs with a column of ones.

    Attributes:
      width, length: of every head.
      dtype: of the inputs.
      precision: of matrix products.
      masked: whether the second example has a key mask.
      operators: names of the operators to check.
    """

    width: int
    length: int
    dtype: str
    precision: str
    masked: bool
    operators: Sequence[str]

    @property
    def name(self) -> str:
        """The name in tables."""
        mask = ", key mask" if self.masked else ""
        return f"d={self.width}, N={self.length}, {self.dtype}, {self.precision}{mask}"

    @property
    def keys(self) -> tuple[int, ...]:
        """Number of keys of every example."""
        return self.length, int(SHORT * self.length) if self.masked else self.length

    @property
    def allowed(self) -> float:
        """Relative error of an output up to which it is right."""
        if self.dtype == "bfloat16":
            return 1e-2
        return 5e-3 if self.precision == "default" else 1e-4

    def inputs(self) -> list[np.ndarray]:
        """Query, key and value, ``(batch, length, heads, width)``, and the cotangent."""
        rng, shape = np.random.default_rng(0), (BATCH, self.length, HEADS, self.width)
        q, k = (SPREAD * rng.normal(size=shape) for _ in range(2))
        v, cotangent = (rng.choice([-1.0, 1.0], size=shape) for _ in range(2))
        v[..., 0] = 1
        return [x.astype(jnp.dtype(self.dtype)) for x in (q, k, v, cotangent)]

    def mask(self) -> np.ndarray | None:
        """The key mask ``(batch, 1, 1, length)``."""
        if not self.masked:
            return None
        return (np.arange(self.length) < np.array(self.keys)[:, None])[:, None, None]


def output_tasks(settings: Sequence[Setting], implementations: Sequence[str]) -> list[Task]:
    """The checks of outputs; each gives a line of ``SECTION``."""
    return _tasks(settings, implementations, check_output)


def gradient_tasks(settings: Sequence[Setting], implementations: Sequence[str]) -> list[Task]:
    """The checks of gradients; each gives a line of ``GRADIENTS``."""
    return _tasks(settings, implementations, check_gradient)


def _tasks(settings, implementations, check: Callable) -> list[Task]:
    return [
        Task(
            {
                "setting": setting.name,
                "operator": operator,
                "implementation": implementation,
            },
            functools.partial(check, setting, operator, implementation),
        )
        for setting in settings
        for implementation in implementations
        for operator in setting.operators
    ]


def check_output(setting: Setting, operator: str, implementation: str) -> dict[str, Any]:
    """Errors of an output and of its marginals."""
    attend = OPERATORS[operator].bind(implementation, setting.width)
    q, k, v, _ = setting.inputs()
    with jax.default_matmul_precision(setting.precision):
        out = np.asarray(jax.jit(attend)(q, k, v, mask=setting.mask()), np.float64)
    expected = expected_output(setting, operator)
    difference = out - expected
    error = norm(difference) / norm(expected)
    # Values of random signs: the sum over queries has the variance of the column sums' errors.
    columns = np.sqrt((difference[..., 1:].sum(1) ** 2).mean() / setting.length)
    return {
        "output": error,
        "row sums": float(np.abs(difference[..., 0]).max()),
        "column sums": float(columns),
        RESULT: verdict(error, setting.allowed),
    }


def check_gradient(setting: Setting, operator: str, implementation: str) -> dict[str, Any]:
    """Errors of the gradients of queries, keys and values."""
    attend = OPERATORS[operator].bind(implementation, setting.width)
    attend = functools.partial(attend, mask=setting.mask())
    pulled = lambda q, k, v, cotangent: jax.vjp(attend, q, k, v)[1](cotangent)
    with jax.default_matmul_precision(setting.precision):
        gradients = jax.jit(pulled)(*setting.inputs())
    errors = [
        norm(np.asarray(ours, np.float64) - theirs) / norm(theirs)
        for ours, theirs in zip(gradients, expected_gradients(setting, operator), strict=True)
    ]
    named = dict(zip(("query", "key", "value"), errors, strict=True))
    worst = max(errors) if np.isfinite(errors).all() else np.inf
    return {**named, RESULT: verdict(worst, 5 * setting.allowed)}


def verdict(error: float, allowed: float) -> str:
    """``"ok"``, or the error that was allowed."""
    return "ok" if error <= allowed else f"WRONG: above {allowed:g}"


def norm(x: np.ndarray) -> float:
    """The Frobenius norm."""
    return float(np.sqrt((x**2).sum()))


@functools.cache
def expected_output(setting: Setting, operator: str) -> np.ndarray:
    """The output in float64 NumPy."""
    q, k, v, _ = (np.asarray(x, np.float64).swapaxes(1, 2) for x in setting.inputs())
    parts = [
        dense(np, OPERATORS[operator], q[i], k[i, :, :keys], v[i, :, :keys])
        for i, keys in enumerate(setting.keys)
    ]
    return np.stack(parts).swapaxes(1, 2)


@functools.cache
def expected_gradients(setting: Setting, operator: str) -> list[np.ndarray]:
    """The gradients of query, key and value by float64 autodiff of the formulas."""
    q, k, v, cotangent = (np.asarray(x, np.float64).swapaxes(1, 2) for x in setting.inputs())
    results = []
    with jax.enable_x64(True), jax.default_device(reference_device()):
        for i, keys in enumerate(setting.keys):
            gradients = _pull(operator)(q[i], k[i, :, :keys], v[i, :, :keys], cotangent[i])
            missing = [(0, 0), (0, setting.length - keys), (0, 0)]
            dq, dk, dv = map(np.asarray, gradients)
            results.append((dq, np.pad(dk, missing), np.pad(dv, missing)))
    return [np.stack(parts).swapaxes(1, 2) for parts in zip(*results, strict=True)]


def reference_device() -> jax.Device:
    """A CPU, if JAX has one beside the accelerator."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


@functools.cache
def _pull(operator: str) -> Callable:
    attend = functools.partial(dense, jnp, OPERATORS[operator])
    return jax.jit(lambda q, k, v, cotangent: jax.vjp(attend, q, k, v)[1](cotangent))
