"""Fitting one layer: sums while calibrating, then coefficients (paper, algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax.compiler.options import Options
from asap_jax.features import FAMILIES
from asap_jax.fitting import kl_search, targets
from asap_jax.fitting.least_squares import NormalEquations
from asap_jax.predictor import DualPair, LinearHead, Predictor
from asap_jax.records import CompiledState, Record, stack_mark

Stream = Callable[[], Iterator[Record]]


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
        self.families = families(record, options)
        self.head_dim = record.query.shape[-1]
        self.sums: list[NormalEquations] = []
        self.offset: Any = None
        self.items: list[list[targets.KLItem]] = [[] for _ in range(self.depth)]
        self.num_problems = 0

    @property
    def num_features(self) -> int:
        """Features of all families together, without a token bias."""
        return sum(family.num_features(self.head_dim) for family in self.families)

    @property
    def depth(self) -> int:
        """Layers in the stack, 1 without a scan."""
        return math.prod(self.stack)

    def add(self, record: Record, where: str) -> None:
        """Adds one batch; ``where`` names it in errors.

        Raises:
          ValueError: the batch gives a value that is not finite, or another length than the
            first where a token bias is fitted.
        """
        options = self.options
        check(record, self.path, where)
        record = targets.settle(record, options.padding)
        new = [
            targets.layer_sums(
                record,
                self.families,
                target=target,
                baseline=options.baseline,
                token_bias=options.token_bias,
                rows=options.rows,
                damping=options.damping if options.weighting == "gauss_newton" else None,
            )
            for target in options.targets
        ]
        if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(new)):
            raise ValueError(
                f"{where} gives a value that is not finite at layer {self.path!r} "
                f"(query of shape {record.query.shape})"
            )
        if self.sums and self.sums[0].moment.shape != new[0].moment.shape:
            raise ValueError(
                f"{where} has queries of shape {record.query.shape} at layer {self.path!r}: "
                f"token_bias=True needs batches of one length"
            )
        self.sums = _plus(self.sums, new) if self.sums else new
        if options.closures == "none":
            offset = targets.key_offset(record)
            self.offset = offset if self.offset is None else _plus(self.offset, offset)
        if options.objective == "kl":
            shape = record.query.shape[len(self.stack) :]
            self.num_problems += math.prod(shape[:-3]) * shape[-2]
            if options.in_memory:
                for i, one in enumerate(unstack(record)):
                    self.items[i].append(targets.kl_item(one, self.families))

    def reduce(self, total: Callable[[Any], Any]) -> None:
        """Replaces the sums by their totals over processes, see ``compile.Calibration.reduce``."""
        self.sums, self.offset = total((self.sums, self.offset))

    def total(self) -> list[NormalEquations]:
        """Normal equations over all layers of the stack and all heads, one per target."""
        depth = len(self.stack)
        return [jax.tree.map(lambda x: x.sum(tuple(range(depth + 1))), s) for s in self.sums]

    def solve(
        self, stream: Stream, shared: list[NormalEquations] | None = None
    ) -> tuple[CompiledState, list[dict]]:
        """The layer's state, arrays stacked under a scan, and figures of each layer's fit.

        Args:
          stream: gives the layer's records again, one pass a call (KL out of memory).
          shared: sums over all layers, where coefficients are shared.

        Raises:
          ValueError: no active token was seen.
        """
        solved = [self._solve_one(i, stream, shared) for i in range(self.depth)]
        heads = [
            jax.tree.map(lambda *x: jnp.stack(x).reshape(*self.stack, *x[0].shape), *heads)
            for heads in zip(*(heads for heads, _ in solved), strict=True)
        ]
        mark = stack_mark(self.stack)
        state = CompiledState(self._predictor(heads), self.spec, self.options.closures, mark)
        return state, [figures for _, figures in solved]

    def _predictor(self, heads):
        stacked = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (*self.stack, *x.shape)), self.families
        )
        if self.options.closures == "none":
            total, count = (x.sum(-1) for x in self.offset)
            query, key = (
                Predictor(stacked, LinearHead(head), side=side, padding=self.options.padding)
                for (head, _), side in zip(heads, ("query", "key"), strict=True)
            )
            return DualPair(query, key, total / jnp.maximum(count, jnp.ones_like(count)))
        head, bias = heads[0]
        target = self.options.targets[0]
        side = "query" if target == "source" else self.spec.side_before_end(target)
        return Predictor(
            stacked,
            LinearHead(head),
            token_bias=bias if self.options.token_bias else None,
            side=side,
            baseline=self.options.baseline,
            padding=self.options.padding,
        )

    def _solve_one(self, index, stream, shared):
        """``[(coefficients, token bias or empty), ...]`` per target, and figures."""
        heads, figures = [], {}
        for sums in self.sums if shared is None else shared:
            if shared is None:
                sums = jax.tree.map(
                    lambda x: x.reshape(self.depth, *x.shape[len(self.stack) :])[index], sums
                )
                if self.options.coefficients == "pooled":
                    sums = sums.pooled()
            solution = sums.solve(self.options.ridge, self.options.ridge_scale)
            if not bool(np.asarray(solution.ok).all()):
                raise ValueError(
                    f"layer {self.path!r} saw no active token in the calibration batches"
                )
            figures.setdefault("r_squared_fit", float(np.asarray(solution.r_squared).mean()))
            figures.setdefault("num_rows", float(np.asarray(solution.num_rows).sum()))
            w = solution.coefficients
            if self.options.objective == "kl":
                w = self._kl(index, sums, stream, figures)
            count = self.num_features if self.options.token_bias else w.shape[-1]
            heads.append((w[..., :count], w[..., count:]))
        return heads, figures

    def _kl(self, index, sums, stream, figures):
        items = groups(self.items[index]) if self.items[index] else _Stream(self, index, stream)
        result = kl_search.minimise(
            sums,
            items,
            targets.KLBlocks(self.spec),
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
        return result.coefficients


def check(record: Record, path: str, where: str) -> None:
    """Raises ValueError for a mask of other values than 0 and 1, or no active token at all."""
    if record.mask is None:
        return
    mask = np.asarray(record.mask)
    if mask.dtype != bool and not np.isin(mask, (0, 1)).all():
        raise ValueError(
            f"{where} has a mask of shape {mask.shape} at layer {path!r} that must hold only 0 and "
            f"1; give additive masks as bias"
        )


class _Stream(Iterable):
    """A layer's KL items, made again from the model's records on every pass."""

    def __init__(self, layer: LayerFit, index: int, stream: Stream):
        self.layer, self.index, self.stream = layer, index, stream

    def __iter__(self):
        for record in self.stream():
            record = targets.settle(record, self.layer.options.padding)
            yield targets.kl_item(unstack(record)[self.index], self.layer.families)


def families(record: Record, options: Options) -> tuple:
    """The feature families of a layer; the paper's slice bank is the same for every layer."""
    create = lambda name: FAMILIES[name].create(
        jax.random.key(options.seed),
        record.query.shape[-1],
        num_slices=options.num_slices,
        slice_kind=options.slice_kind,
    )
    return tuple(create(f) if isinstance(f, str) else f for f in options.families)


def is_held_out(index: int, share: float) -> bool:
    """Whether batch ``index`` is held out: never the first, then one in every ``1 / share``."""
    before = lambda i: math.ceil(i * share - 1e-9)
    return index > 0 and before(index) > before(index - 1)


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


def _plus(a, b):
    return jax.tree.map(jnp.add, a, b)
