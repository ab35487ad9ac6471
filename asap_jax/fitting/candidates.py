"""Candidates of the automatic recipe: ways to predict an aligned dual, fitted in stages.

A stage is one least-squares fit whose features depend on the fits before it: the rounds of a
codebook on alternating sides, then the corrections after the closures.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks, masks, metrics
from asap_jax.attention import functions
from asap_jax.features import Codebook, Moments, check_families, kmeans
from asap_jax.fitting import finetune, targets
from asap_jax.fitting.least_squares import RIDGE_SCALES, NormalEquations
from asap_jax.predictor import Correction, LinearHead, Predictor
from asap_jax.predictor import corrections as between
from asap_jax.predictor.starting_dual import starting_scaling
from asap_jax.records import Record
from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import OTHER
from asap_jax.spec import PADDINGS, SinkhornSpec

NUM_TOKENS = 8192  # tokens per head and side that a codebook is made from


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to predict the dual that n closures start from.

    Attributes:
      name: what reports call it.
      rounds: codebook rounds on top of the features; 0 is the features alone.
      num_centres: R, centres per head and side.
      chain: correct the dual after every closure but the last.
      rows: ``"active"`` or ``"all"``, see ``Options``.
      padding: which tokens carry features, see ``Predictor``; None leaves it to the spec.
      damping: None for plain least squares; else the last stage before a single closure is
        weighted by the curvature of its KL objective, so damped.
      coefficients: ``"per_head"`` or ``"pooled"``.
      ridge, ridge_scale: see ``NormalEquations.solve``.
      tuned: steps of tuning by the divergence of the plans after all closures; 0 for none.
      hidden: units of a hidden layer beside the linear head, tuned too; 0 for none.
      features: feature families of every stage, a codebook's apart.
    """

    name: str
    rounds: int = 0
    num_centres: int = 16
    chain: bool = False
    rows: str = "active"
    padding: str | None = None
    damping: float | None = None
    coefficients: str = "per_head"
    ridge: float = 1e-5
    ridge_scale: str = "diagonal"
    tuned: int = 0
    hidden: int = 0
    features: tuple = (Moments(),)

    def __post_init__(self):
        checks.instance("name", self.name, str, "a string")
        for name in ("rounds", "tuned", "hidden"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an int >= 0, got {value!r}")
        if self.hidden and not self.tuned:
            raise ValueError(f"hidden={self.hidden} units are fitted by tuning only: set tuned")
        check_families("features", self.features)
        if not self.features:
            raise ValueError("features must hold a feature family, got ()")
        checks.positive_int("num_centres", self.num_centres)
        checks.static_bool("chain", self.chain)
        checks.one_of("rows", self.rows, ("active", "all"))
        if self.padding is not None:
            checks.one_of("padding", self.padding, PADDINGS)
        checks.one_of("coefficients", self.coefficients, ("per_head", "pooled"))
        checks.non_negative_float("ridge", self.ridge)
        checks.one_of("ridge_scale", self.ridge_scale, RIDGE_SCALES)
        if self.damping is not None and checks.non_negative_float("damping", self.damping) > 1:
            raise ValueError(f"damping must be in [0, 1] or None, got {self.damping!r}")

    @property
    def cost(self) -> tuple[int, int, int]:
        """What it takes to run, to be compared: rounds of centres, corrections, hidden units."""
        return self.rounds * self.num_centres, int(self.chain), self.hidden

    def suits(self, num_closures: int, *, masked: bool) -> bool:
        """Whether it differs from a simpler candidate at this number of closures."""
        if self.chain and num_closures < 2:
            return False
        if self.damping is not None and num_closures != 1:
            return False
        return masked or (self.rows == "active" and self.padding != "self")


# Features of all tokens in the closures: padded queries carry column mass, and so say much of the
# key dual (`python -m train study fidelity`).
_every = functools.partial(Candidate, padding="none")

# In the order of what they cost to run; all of them are least squares and quick to fit.
CANDIDATES = (
    _every("moments"),
    Candidate("moments, active tokens", padding="self"),
    _every("moments, weighted", damping=0.1),
    _every("moments, chain", chain=True),
    _every("codebook", rounds=2),
    _every("codebook, weighted", rounds=2, damping=0.1),
    _every("codebook, chain", rounds=2, chain=True),
    _every("large codebook", rounds=3, num_centres=32),
    _every("large codebook, weighted", rounds=3, num_centres=32, damping=0.1),
)

# Beside those, one for long attention, whose cost a longer layer hides, and some that take many
# passes over the calibration data to fit.
THOROUGH = (
    *CANDIDATES,
    _every("wide codebook", rounds=3, num_centres=64),
    _every("moments, tuned", tuned=40),
    _every("moments, chain, tuned", chain=True, tuned=40),
    _every("codebook, tuned", rounds=2, tuned=40),
    _every("codebook, chain, tuned", rounds=2, chain=True, tuned=40),
    _every("codebook, chain, hidden", rounds=2, chain=True, tuned=60, hidden=16),
)


def fit(
    candidate: Candidate, records: Sequence[Record], num_closures: int, *, seed: int = 0
) -> tuple[Predictor, dict[str, float]]:
    """Fits a candidate to one layer.

    Args:
      candidate: the way.
      records: the layer's calibration records, not stacked.
      num_closures: n, ``1 <= n <= num_steps - 1``.
      seed: of the codebooks.

    Returns:
      The predictor for ``closures=n``, and ``r_squared_fit`` and ``num_rows`` of the dual it
      predicts.

    Raises:
      ValueError: no active token.
    """
    records = [targets.settle(record, candidate.padding) for record in records]
    spec, padding = records[0].spec, candidate.padding
    books = _codebooks(candidate, records, seed) if candidate.rounds else {}
    predictor, figures = None, {}
    for level in range(candidate.rounds + 1):
        before_end = _half_step(spec, num_closures + candidate.rounds - level)
        side = spec.side_before_end(before_end)
        families = candidate.features
        if predictor is not None:
            book = Codebook(books[side], books[OTHER[side]], predictor, epsilon=spec.epsilon)
            families = (*families, book)
        last = level == candidate.rounds
        damping = candidate.damping if last and num_closures == 1 else None
        target = before_end or ("final_query" if side == "query" else "final_key")
        sums = [
            targets.layer_sums(
                record, families, target=target, rows=candidate.rows, damping=damping
            )
            for record in records
        ]
        head, figures, whitening = _solve(candidate, sums)
        predictor = Predictor(families, head, side=side, padding=padding)
    whitenings = [whitening]
    for taken in range(1, num_closures if candidate.chain else 1):
        sums = [
            correction_sums(
                record,
                predictor,
                candidate.features,
                before_end=num_closures - taken,
                rows=candidate.rows,
            )
            for record in records
        ]
        head, _, whitening = _solve(candidate, sums)
        whitenings.append(whitening)
        corrections = (*predictor.corrections, Correction(candidate.features, head))
        predictor = predictor.replace(corrections=corrections)
    if candidate.tuned:
        predictor, tuned = finetune.tune(
            predictor,
            records,
            whitenings,
            closures=num_closures,
            num_steps=candidate.tuned,
            hidden=candidate.hidden,
            seed=seed,
        )
        figures |= tuned
    return predictor, figures


def _half_step(spec: SinkhornSpec, before_end: int) -> int:
    """``before_end``, moved by whole iterations to a half-step that the teacher takes."""
    while before_end > spec.num_steps - 1:
        before_end -= 2
    return before_end


def _solve(candidate: Candidate, sums: list[NormalEquations]):
    """Head, figures, and the whitening of the features."""
    total = functools.reduce(operator.add, sums)
    if candidate.coefficients == "pooled":
        total = total.pooled()
    solution = total.solve(candidate.ridge, candidate.ridge_scale)
    if not bool(np.asarray(solution.ok).all()):
        raise ValueError("no active token, or values that are not finite")
    figures = dict(
        r_squared_fit=float(np.asarray(solution.r_squared).mean()),
        num_rows=float(np.asarray(solution.num_rows).sum()),
    )
    return LinearHead(solution.coefficients), figures, total.whitening(candidate.ridge)


@functools.partial(jax.jit, static_argnames=("before_end", "rows"))
def correction_sums(
    record: Record, predictor: Predictor, families: tuple, *, before_end: int, rows: str
) -> NormalEquations:
    """Normal equations of the next correction of a chain, per head.

    The closure after those that ``predictor`` corrects is taken; the correction, on the features
    of ``families``, is to bring its dual to the teacher's own, ``before_end`` half-steps before
    the end.
    """
    p, spec = targets.problem(record), record.spec
    scaling, side = starting_scaling(predictor, p, spec)
    log_target = p.log_key_target(spec.key_mass)
    scaling = log_domain.half_step(p.log_kernel(spec.epsilon), scaling, side, log_target)
    y, side, _ = targets.target_dual(p, spec, before_end)
    x, dual, valid = between.design(families, p, spec, scaling, side)
    zero = NormalEquations.zero(x.shape[-1], num_heads=x.shape[-3], dtype=x.dtype)
    return zero.add(x, y - dual, targets.regression_rows(p, side, valid, rows))


@functools.partial(jax.jit, static_argnames="closures")
def rel_l2(record: Record, predictor: Predictor, *, closures: int) -> jax.Array:
    """Attention rel-l2 of a predictor on one record, not stacked."""
    _, reference = targets.call(record, functions.sinkhorn_attention, spec=record.spec)
    _, weights = targets.call(
        record,
        functions.asap_attention,
        spec=record.spec,
        predictor=predictor,
        closures=closures,
    )
    return metrics.attention_rel_l2(weights, reference)


def _codebooks(candidate: Candidate, records, seed: int) -> dict[str, jax.Array]:
    """Centres ``(H, R, d)`` of either side, from up to ``NUM_TOKENS`` tokens a head."""
    gathered = [tokens(record) for record in records]
    books = {}
    for i, side in enumerate(("query", "key")):
        x, valid = (np.concatenate([np.asarray(g[side][j]) for g in gathered], 1) for j in (0, 1))
        some = np.flatnonzero(valid.any(0))
        if len(some) > NUM_TOKENS:
            some = np.random.default_rng(seed).choice(some, NUM_TOKENS, replace=False)
        rng = jax.random.fold_in(jax.random.key(seed), i)
        books[side] = kmeans.kmeans(
            rng, jnp.asarray(x[:, some]), jnp.asarray(valid[:, some]),
            num_centres=candidate.num_centres,
        )  # fmt: skip
    return books


@jax.jit
def tokens(record: Record) -> dict:
    """Per side, the tokens ``(H, T, d)`` of a record and which of them carry features."""
    p = targets.problem(record)
    validity = masks.feature_validity(p.validity, record.spec.padding)
    heads = lambda x, rest: jnp.moveaxis(x, -1 - rest, 0).reshape(
        x.shape[-1 - rest], -1, *x.shape[x.ndim - rest + 1 :]
    )
    result = {}
    for side, x in (("query", p.q), ("key", p.k)):
        valid = jnp.ones(x.shape[:-1], bool) if validity is None else getattr(validity, side)
        result[side] = heads(x, 2), heads(valid, 1)
    return result
