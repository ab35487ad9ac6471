"""Candidates: ways to predict the dual that n closures start from, and how they are fitted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import checks
from asap_jax.compiler.fit import Fit, LayerFit, check_finite, num_bytes, number_of_closures
from asap_jax.features import Moments, check_families
from asap_jax.fitting import fidelity, finetune, stages, targets
from asap_jax.fitting.least_squares import NormalEquations, Regression
from asap_jax.predictor.predictor import Predictor
from asap_jax.records import Record, unstack
from asap_jax.spec import PADDINGS, SinkhornSpec


@dataclasses.dataclass(frozen=True)
class Candidate(Fit[LayerFit]):
    """One way to predict the dual that n closures start from.

    With ``rounds``, ``chain`` or ``tuned`` the fit stores the records of all its batches (queries,
    keys, values, biases and masks of every layer), up to ``memory_limit``; otherwise only sums.

    Attributes:
      name: its name in reports.
      rounds: codebook rounds after the fit to the features alone; 0 for none.
      num_centres: R, centres of a codebook per head and side.
      chain: correct the dual after every closure except the last.
      rows, padding: see ``PaperFit``.
      damping: None for plain least squares. For a single closure, a number weights the rows of the
        last round by the curvature of the closure's KL objective; it is the share of plain least
        squares in the weights, in [0, 1].
      coefficients: ``"per_head"`` or ``"pooled"``.
      ridge, ridge_scale: see ``NormalEquations.solve``.
      tuned: most steps of tuning by the divergence of the plans after all closures; 0 for none.
      hidden: units of a hidden layer beside the linear head, also tuned; 0 for none.
      features: feature families of every stage; a codebook is added to them.
      row_mass: also fit the row sums, from ``features`` at the queries, without a codebook. For
        ``ending="row"`` of a teacher that ends on columns; the rows then no longer sum to one.
      scales: fit to the calibration queries times each of these numbers, so that the layer also
        holds where scores are larger than those of the calibration.
      memory_limit: most GiB of activations that the fit may store over all layers.
      guard: shrink tokens far larger than those of the calibration before the layer predicts.

    Raises:
      ValueError, TypeError: a setting out of range or of the wrong type.
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
    row_mass: bool = False
    scales: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        super().__post_init__()
        scales = checks.items("scales", self.scales)
        scales = tuple(checks.positive_float("scales", scale) for scale in scales)
        if not scales or len(set(scales)) < len(scales):
            raise ValueError(f"scales must be one or more different numbers > 0, got {scales}")
        object.__setattr__(self, "scales", scales)
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
        checks.static_bool("row_mass", self.row_mass)
        if self.padding is not None:
            checks.one_of("padding", self.padding, PADDINGS)
        checks.one_of("coefficients", self.coefficients, ("per_head", "pooled"))
        _ = self.regression  # checks its settings
        if self.damping is not None and checks.non_negative_float("damping", self.damping) > 1:
            raise ValueError(f"damping must be in [0, 1] or None, got {self.damping!r}")

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """What it costs to run, as centres over all rounds, chain, hidden units and row mass."""
        return self.rounds * self.num_centres, int(self.chain), self.hidden, int(self.row_mass)

    @property
    def regression(self) -> Regression:
        """Settings of its least-squares fits."""
        return Regression(self.rows, self.coefficients == "per_head", self.ridge, self.ridge_scale)

    def suits(self, num_closures: int, *, masked: bool, continued: bool = False) -> bool:
        """Whether its settings take effect at this number of closures, with or without masks.

        ``continued``: the closures end on rows of a teacher that ends on columns.
        """
        if self.row_mass and not continued:
            return False
        if self.chain and num_closures < 2:
            return False
        if self.damping is not None and num_closures != 1:
            return False
        return masked or (self.rows == "active" and self.padding != "self")

    def check_closures(self, closures: str | int) -> None:
        """Raises ValueError for a name, or a number that does not fit a setting."""
        number = number_of_closures(closures)
        if self.damping is not None and number != 1:
            raise ValueError(
                f"damping={self.damping} of fit {self.name!r} is for one closure: give closures=1, "
                f"got closures={number}"
            )
        if self.chain and number < 2:
            raise ValueError(
                f"chain=True of fit {self.name!r} needs two closures or more, got closures={number}"
            )

    def check_teacher(
        self, path: str, spec: SinkhornSpec, closures: str | int | None, ending: str
    ) -> None:
        """Raises ValueError also for a row mass that the ending has no use for."""
        super().check_teacher(path, spec, closures, ending)
        if self.row_mass and spec.ended(ending) == spec:
            raise ValueError(
                f"row_mass=True of fit {self.name!r} is for ending='row' of a teacher that ends on "
                f"columns: layer {path!r} has num_steps={spec.num_steps}, got ending={ending!r}"
            )

    def layer_kind(self) -> type[LayerFit]:
        """A single least-squares fit needs only sums over the batches, otherwise the records."""
        return RecordsFit if self.rounds or self.chain or self.tuned else SumsFit

    def fit(
        self, records: Sequence[Record], num_closures: int, *, seed: int = 0
    ) -> tuple[Predictor, dict[str, Any]]:
        """Fits one layer to all its records.

        Args:
          records: the layer's calibration records, not stacked. The closures end as the teacher of
            their spec does; for ``ending="row"`` that is ``spec.ended("row")``.
          num_closures: n, ``1 <= n <= num_steps - 1``.
          seed: of the codebooks.

        Returns:
          The predictor for ``closures=n``, and figures of the fit: ``r_squared_fit``,
          ``num_rows``, and after tuning also ``tuned_steps`` and ``validation_kl``.

        Raises:
          ValueError: no active token, or values that are not finite.
        """
        records = [record.with_padding(self.padding) for record in records]
        records = [record.with_queries(scale) for scale in self.scales for record in records]
        fitted = stages.fit_rounds(
            records,
            self.features,
            num_closures,
            self.regression,
            padding=self.padding,
            rounds=self.rounds,
            num_centres=self.num_centres,
            damping=self.damping if num_closures == 1 else None,
            seed=seed,
        )
        if self.chain:
            fitted = stages.add_corrections(
                fitted, records, self.features, num_closures, self.regression
            )
        if self.row_mass:
            sums = [targets.row_mass_sums(r, self.features, rows=self.rows) for r in records]
            row_mass = stages.solve_row_mass(self.regression, sums, self.features)
            predictor = dataclasses.replace(fitted.predictor, row_mass=row_mass)
            fitted = fitted._replace(predictor=predictor)
        if not self.tuned:
            return fitted.predictor, fitted.figures
        predictor, figures = finetune.tune(
            fitted.predictor,
            records,
            fitted.whitenings,
            closures=num_closures,
            num_steps=self.tuned,
            hidden=self.hidden,
            seed=seed,
        )
        return predictor, fitted.figures | figures


# All tokens in the closures carry features: padded queries have column mass, so they help predict
# the key dual (`python -m train study fidelity`).
_every = functools.partial(Candidate, padding="none")

# Cheapest to run first; all are least squares and quick to fit.
CANDIDATES = (
    _every("moments"),
    Candidate("moments, active tokens", padding="self"),
    _every("moments, weighted", damping=0.1),
    _every("moments, row mass", row_mass=True),
    _every("moments, chain", chain=True),
    _every("codebook", rounds=2),
    _every("codebook, row mass", rounds=2, row_mass=True),
    _every("codebook, weighted", rounds=2, damping=0.1),
    _every("codebook, chain", rounds=2, chain=True),
    _every("large codebook", rounds=3, num_centres=32),
    _every("large codebook, row mass", rounds=3, num_centres=32, row_mass=True),
    _every("large codebook, weighted", rounds=3, num_centres=32, damping=0.1),
)

# More candidates: a wide codebook, whose cost matters less in long attention, and tuned ones, which
# need many passes over the calibration data.
THOROUGH = (
    *CANDIDATES,
    _every("wide codebook", rounds=3, num_centres=64),
    _every("moments, tuned", tuned=40),
    _every("moments, chain, tuned", chain=True, tuned=40),
    _every("codebook, tuned", rounds=2, tuned=40),
    _every("codebook, chain, tuned", rounds=2, chain=True, tuned=40),
    _every("codebook, chain, hidden", rounds=2, chain=True, tuned=60, hidden=16),
)


class SumsFit(LayerFit):
    """Fits a candidate of one stage; normal equations are added up batch by batch."""

    fit: Candidate
    closures: int
    sums: list[NormalEquations] | None = None  # of the dual, and of row masses if they are fitted

    def _add(self, record: Record, where: str) -> None:
        fit, record = self.fit, record.with_padding(self.fit.padding)
        damping = fit.damping if self.closures == 1 else None
        settings = dict(target=self.closures, rows=fit.rows, damping=damping)
        for scale in fit.scales:
            scaled = record.with_queries(scale)
            new = [targets.layer_sums(scaled, fit.features, **settings)]
            if fit.row_mass:
                new.append(targets.row_mass_sums(scaled, fit.features, rows=fit.rows))
            check_finite(new, record, self.path, where)
            self.sums = jax.tree.map(jnp.add, self.sums, new) if self.sums else new

    def calibration_scales(self) -> Sequence[float]:
        """Those of the candidate."""
        return self.fit.scales

    def setting(self) -> str:
        """The candidate's name."""
        return self.fit.name

    def reduce(self, total: Callable[[Any], Any]) -> None:
        """Replaces the sums by their totals over processes."""
        self.sums, self.observed = total((self.sums, self.observed))

    def _solve_layers(self) -> list[tuple[Predictor, dict[str, Any]]]:
        fit, side = self.fit, self.target.side_before_end(self.closures)
        solved = []
        for index in range(self.depth):
            dual, *rows = self.layer(self.sums, index)
            fitted = stages.solve(fit.regression, [dual], fit.features, side, fit.padding)
            row_mass = stages.solve_row_mass(fit.regression, rows, fit.features) if rows else None
            predictor = dataclasses.replace(fitted.predictor, row_mass=row_mass)
            solved.append((predictor, fitted.figures))
        return solved


class StoringFit(LayerFit):
    """A fit that stores the layer's records, to read them more than once."""

    closures: int

    def __init__(self, path: str, record: Record, fit: Fit, **settings: Any):
        super().__init__(path, record, fit, **settings)
        self.records: list[list[Record]] = []  # per batch, the record of each layer of the stack

    def _add(self, record: Record, where: str) -> None:
        """Stores one batch, unless it has no active token."""
        mass = fidelity.layer_balance(record)
        check_finite(mass, record, self.path, where)
        if (np.asarray(mass) > 0).all():
            self.records.append(unstack(record))
            self.stored_bytes += num_bytes(self.records[-1])

    def fit_stack(
        self, candidate: Candidate, records: list[list[Record]], num_closures: int
    ) -> list[tuple[Predictor, dict[str, Any]]]:
        """Fits ``candidate`` to each layer of the stack on ``records``; see ``Candidate.fit``."""
        if not records:
            raise ValueError("no active token in the calibration batches")
        try:
            return [
                candidate.fit([batch[i] for batch in records], num_closures, seed=self.seed)
                for i in range(self.depth)
            ]
        except ValueError as error:
            raise ValueError(f"candidate {candidate.name!r}: {error}") from error


class RecordsFit(StoringFit):
    """Fits a candidate of several stages."""

    fit: Candidate

    def calibration_scales(self) -> Sequence[float]:
        """Those of the candidate."""
        return self.fit.scales

    def setting(self) -> str:
        """The candidate's name."""
        return self.fit.name

    def _solve_layers(self) -> list[tuple[Predictor, dict[str, Any]]]:
        return self.fit_stack(self.fit, self.records, self.closures)
