"""The rows of the replacement tables: what takes the place of a frozen teacher's attention."""

import dataclasses

import asap_jax as aj
from asap_jax.fitting.fidelity import compiled_calls, sinkhorn_calls
from train.study.paper.presets import Preset

TEACHER = "Sinkhorn teacher"
SLICES = (8, 16, 32, 64, 128)
DEFAULT_SLICES = 32
KINDS = (("-0", "one_sided"), ("", "two_sided"))


@dataclasses.dataclass(frozen=True)
class Swap:
    """Softmax, or Sinkhorn attention with another number of steps.

    Attributes:
      name: the row's label.
      steps: S, or None for softmax.
      published: name of the row in the paper's table; by default the label.
    """

    name: str
    steps: int | None
    published: str = ""

    def final_update(self, spec: aj.SinkhornSpec) -> str:
        """The side that the last step makes exact."""
        if self.steps is None:
            return "row-ending"
        return f"{dataclasses.replace(spec, num_steps=self.steps).last_step}-ending"

    def passes(self, spec: aj.SinkhornSpec) -> int:
        """Half-steps over the scores in a forward pass."""
        return 1 if self.steps is None else self.steps

    def calls(self, spec: aj.SinkhornSpec) -> int:
        """Softmax attention calls of a layer that stores no N x M array."""
        return 1 if self.steps is None else sinkhorn_calls(self.steps)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled layer.

    Attributes:
      name: the row's label.
      fit: how the layers are fitted.
      closures, ending: see ``aj.Options``.
      num_fit: M, the first M training examples.
      zero: set the coefficients and the token bias to zero after the fit. With
        ``baseline="first_step"`` the layer is then plain Sinkhorn attention.
      published: name of the row in the paper's table; by default the label.
    """

    name: str
    fit: aj.PaperFit | aj.Candidate
    closures: str | int
    num_fit: int
    ending: str = "teacher"
    zero: bool = False
    published: str = ""

    @property
    def fitted_closures(self) -> str | int:
        """The closures to compile for: a fit for ``"two_sided"`` also runs ``"one_sided"``."""
        return "two_sided" if self.closures == "one_sided" else self.closures

    def final_update(self, spec: aj.SinkhornSpec) -> str:
        """The last closure, in the paper's words."""
        if self.closures == "none":
            return "none"
        if self.closures == "one_sided":
            return "one-sided key"
        number = "two-sided" if self.closures == "two_sided" else f"{self.closures} closures,"
        return f"{number} {spec.ended(self.ending).last_step}-ending"

    def passes(self, spec: aj.SinkhornSpec) -> int:
        """Closures, and one more for the first step of a residual fit (paper: R)."""
        if self.closures == "none":
            return 0
        closures = aj.attention.num_closures(self.closures, self.side(spec), spec, self.ending)
        return closures + int(getattr(self.fit, "baseline", "none") == "first_step")

    def calls(self, spec: aj.SinkhornSpec) -> int:
        """Softmax attention calls of a layer that stores no N x M array."""
        baseline = getattr(self.fit, "baseline", "none")
        predictor = aj.Predictor((aj.Moments(),), None, side=self.side(spec), baseline=baseline)
        return compiled_calls(predictor, spec, self.closures, self.ending)

    def side(self, spec: aj.SinkhornSpec) -> str:
        """The side of the predicted dual."""
        if isinstance(self.closures, str):
            return "query"
        return spec.ended(self.ending).side_before_end(self.closures)


Row = Swap | Compiled


def key(row: Row) -> str:
    """What a row's figures depend on, as text: everything but its labels."""
    return repr(dataclasses.replace(row, name="", published=""))


def published(row: Row) -> str:
    """The name of a row in the paper's table."""
    return row.published or row.name


def teacher(spec: aj.SinkhornSpec) -> Swap:
    """The row of the teacher itself."""
    return Swap(f"{TEACHER} (S={spec.num_steps})", spec.num_steps, TEACHER)


def budgets(spec: aj.SinkhornSpec, steps: tuple[int, ...] = (2, 3, 4, 5, 6)) -> list[Swap]:
    """Smaller Sinkhorn budgets: the paper's 3 and 5, and those that end as a column teacher."""
    return [
        Swap(f"Sinkhorn normalizer (S={count})", count) for count in steps if count < spec.num_steps
    ]


def least_squares(num_fit: int, slices: int = DEFAULT_SLICES, **changes) -> list[Compiled]:
    """ASAP-LS-0 and ASAP-LS."""
    return _pair("LS", aj.PaperFit(num_slices=slices, **changes), num_fit)


def divergence(num_fit: int, slices: int = DEFAULT_SLICES) -> list[Compiled]:
    """ASAP-KL-0 and ASAP-KL."""
    return _pair("KL", aj.PaperFit(objective="kl", num_slices=slices), num_fit)


def _pair(objective: str, fit: aj.PaperFit, num_fit: int) -> list[Compiled]:
    return [
        Compiled(f"ASAP-{objective}{suffix} (L={fit.num_slices})", fit, closures, num_fit)
        for suffix, closures in KINDS
    ]


def recommended(
    spec: aj.SinkhornSpec, preset: Preset, num_fit: int | None = None
) -> list[Compiled]:
    """This library's rows: two closures from moments, and one attention call that ends on rows.

    A codebook keeps the activations in memory, so it is fitted to fewer examples.

    Args:
      spec: of the teacher. If it ends on columns, the layers of one call also predict row masses.
      preset: sizes of the fits.
      num_fit: M of the moments; by default the preset's.
    """
    named = {candidate.name: candidate for candidate in aj.CANDIDATES}
    mass = "" if spec.last_step == "row" else ", row mass"
    count = preset.num_fit if num_fit is None else num_fit
    return [
        Compiled("Moments, 2 closures", named["moments"], 2, count),
        Compiled(f"Moments{mass}, one call", named[f"moments{mass}"], 1, count, "row"),
        Compiled(
            f"Codebook{mass}, one call", named[f"codebook{mass}"], 1, preset.stored_fit, "row"
        ),
    ]


def residual(
    spec: aj.SinkhornSpec, num_fit: int, slices: int, *, token_bias: bool
) -> list[Compiled]:
    """The residual log-sum-exp fit, and its control with zero coefficients.

    The residual is that to the first row step, which is one more pass over the scores. With
    coefficients 0 the layer is Sinkhorn attention, with one step for each pass.
    """
    fit = aj.PaperFit(num_slices=slices, baseline="first_step", token_bias=token_bias)
    rows = []
    for suffix, closures in KINDS:
        row = Compiled(f"ASAP{suffix}, residual fit (L={slices})", fit, closures, num_fit)
        steps = row.passes(spec)
        control = dataclasses.replace(
            row, name=f"ASAP{suffix}, residual 0: Sinkhorn S={steps}", zero=True
        )
        rows += [row, control]
    return rows
