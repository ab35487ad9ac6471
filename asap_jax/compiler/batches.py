"""Calibration batches: checks, copies, and descriptions for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks
from asap_jax.compiler.fit import Fit


def checked(batches: Iterable[Any], fit: Fit) -> Iterable[Any]:
    """``batches`` unchanged.

    Raises:
      TypeError: a single batch, not an iterable, or a generator where the fit reads batches again.
        Arrays that differ in rank or kind of dtype are taken for a single batch.
    """
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"batches must be an iterable of batches, got {checks.describe(batches)}")
    if isinstance(batches, (jax.Array, np.ndarray, Mapping, str)):
        raise TypeError(
            f"batches must be an iterable of batches, got one {type(batches).__name__}; for a "
            f"single batch give [batch]"
        )
    if isinstance(batches, (tuple, list)) and _looks_like_one(batches):
        raise TypeError(
            f"batches looks like a single batch, {describe_batch(batches)}: batches of a model "
            f"have equal ranks and kinds of dtype; for a single batch give [batch]"
        )
    if fit.reads_batches_again and iter(batches) is batches:
        raise TypeError(
            "batches must be re-iterable (a list, not a generator) for objective='kl' with "
            "in_memory=False, which reads them once per evaluation"
        )
    return batches


def _looks_like_one(batches: tuple | list) -> bool:
    if not all(isinstance(x, (jax.Array, np.ndarray)) for x in batches):
        return False
    return len({(x.ndim, jnp.issubdtype(x.dtype, jnp.floating)) for x in batches}) > 1


def check_batch(batch: Any, where: str) -> None:
    """Raises TypeError unless all leaves of ``batch`` are arrays or numbers."""
    if batch is None:
        raise TypeError(f"{where} must be an array, or a tuple or dict of arrays, got None")
    for leaf in jax.tree.leaves(batch):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise TypeError(f"{where} must hold arrays only, got {checks.describe(leaf)}") from None


def check_concrete(batch: Any, where: str) -> None:
    """Raises TypeError if a leaf of ``batch`` is traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(batch)):
        raise TypeError(f"{where} is traced: compile reads values, so call it outside jax.jit")


def own(batch: Any) -> Any:
    """``batch`` with copies of its NumPy arrays, which the caller may overwrite."""
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch)


def describe_batch(batch: Any) -> str:
    """The kind of a batch, for an error message: arrays by shape, containers by their parts."""
    if isinstance(batch, Mapping):
        parts = ", ".join(f"{name!r}: {describe_batch(x)}" for name, x in batch.items())
        return f"a dict of {{{parts:.200}}}"
    if isinstance(batch, (tuple, list)):
        parts = ", ".join(map(describe_batch, batch))
        return f"a {type(batch).__name__} of {len(batch)}: [{parts:.200}]"
    return f"{getattr(batch, 'dtype', type(batch).__name__)}{list(np.shape(batch))}"
