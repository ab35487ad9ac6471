"""Fitting one layer: sums while calibrating, then coefficients (paper, algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import calibrate, kl
from asap_jax.capture import CompiledState, Record
from asap_jax.features import SlicedPotentials
from asap_jax.options import Options
from asap_jax.predictor import LinearHead, Predictor
from asap_jax.slices import slice_directions


class LayerFit:
    """Accumulates one layer's calibration data and solves for its coefficients.

    Least squares keeps normal equations only. The KL objective keeps q, k, mask, features and
    targets of every batch unless they are to be streamed. A layer stack of a scan is one
    LayerFit; its layers are solved apart.
    """

    def __init__(self, path: str, record: Record, options: Options):
        options.refuse(path, record.spec)
        self.path, self.options = path, options
        self.spec, self.stack = record.spec, record.stack
        self.families = paper_features(record, options)
        self.sums: Any = None
        self.items: list[list[calibrate.KLItem]] = [[] for _ in range(math.prod(self.stack))]
        self.num_problems = 0

    def add(self, record: Record, where: str) -> None:
        """Adds one batch; ``where`` names it in errors.

        Raises:
          ValueError: the batch gives a value that is not finite.
        """
        new = calibrate.layer_sums(record, self.families, before_end=self.options.before_end)
        if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(new)):
            raise ValueError(
                f"{where} gives a value that is not finite at layer {self.path!r} "
                f"(query of shape {record.query.shape})"
            )
        self.sums = new if self.sums is None else self.sums + new
        if self.options.objective == "kl":
            shape = record.query.shape[len(self.stack) :]
            self.num_problems += math.prod(shape[:-3]) * shape[-2]
            if self.options.in_memory:
                for i, one in enumerate(unstack(record)):
                    self.items[i].append(calibrate.kl_item(one, self.families))

    def solve(self, stream: Callable[[], Iterator[Record]]) -> tuple[CompiledState, list[dict]]:
        """The layer's state, arrays stacked under a scan, and figures of each layer's fit.

        ``stream`` gives the layer's records again, one pass a call (KL out of memory).

        Raises:
          ValueError: no active token was seen.
        """
        flat = jax.tree.map(
            lambda x: x.reshape(math.prod(self.stack), *x.shape[len(self.stack) :]), self.sums
        )
        fits = [
            self._solve_one(i, jax.tree.map(lambda x, i=i: x[i], flat), stream)
            for i in range(math.prod(self.stack))
        ]
        coefficients = jnp.stack([w for w, _ in fits]).reshape(*self.stack, *fits[0][0].shape)
        families = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (*self.stack, *x.shape)), self.families
        )
        predictor = Predictor(families, LinearHead(coefficients), side=self.options.side(self.spec))
        state = CompiledState(predictor, spec=self.spec, closures=self.options.closures)
        return state, [figures for _, figures in fits]

    def _solve_one(self, index, sums, stream):
        if self.options.coefficients == "pooled":
            sums = sums.pooled()
        solution = sums.solve(self.options.ridge)
        if not bool(np.asarray(solution.ok).all()):
            raise ValueError(f"layer {self.path!r} saw no active token in the calibration batches")
        figures = dict(
            r_squared_fit=float(np.asarray(solution.r_squared).mean()),
            num_rows=float(np.asarray(solution.num_rows).sum()),
        )
        if self.options.objective == "ls":
            return solution.coefficients, figures
        items = groups(self.items[index]) if self.items[index] else _Stream(self, index, stream)
        result = kl.minimise(
            sums,
            items,
            calibrate.KLBlocks(self.spec),
            epsilon=self.spec.epsilon,
            ridge=self.options.ridge,
            num_problems=self.num_problems,
        )
        figures.update(
            kl_reason=result.reason,
            kl_converged=result.converged,
            kl_steps=result.num_steps,
            plan_kl=result.plan_kl,
        )
        return result.coefficients, figures


class _Stream(Iterable):
    """A layer's KL items, made again from the model's records on every pass."""

    def __init__(self, layer: LayerFit, index: int, stream):
        self.layer, self.index, self.stream = layer, index, stream

    def __iter__(self):
        for record in self.stream():
            yield calibrate.kl_item(unstack(record)[self.index], self.layer.families)


def paper_features(record: Record, options: Options) -> tuple:
    """The paper's feature family: one bank of Gaussian slices, the same for every layer."""
    head_dim = record.query.shape[-1]
    key = jax.random.key(options.seed)
    return (SlicedPotentials(slice_directions(key, options.num_slices, head_dim)),)


def unstack(record: Record) -> list[Record]:
    """The records of the single layers of a stack, in order."""
    if not record.stack:
        return [record]
    depth, count = len(record.stack), math.prod(record.stack)
    flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[depth:]), record)
    return [jax.tree.map(lambda x, i=i: x[i], flat) for i in range(count)]


def groups(items: list[Any]) -> list[Any]:
    """Items of equal shapes stacked along a new leading axis, one pytree a shape."""
    by_shape: dict[Any, list] = {}
    for item in items:
        leaves, tree = jax.tree.flatten(item)
        by_shape.setdefault((tree, *((x.shape, x.dtype) for x in leaves)), []).append(item)
    return [jax.tree.map(lambda *x: jnp.stack(x), *group) for group in by_shape.values()]
