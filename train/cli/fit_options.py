"""Command-line options for a fit. Their names, choices and defaults come from the library."""

import argparse
import dataclasses

import asap_jax as aj
from asap_jax.compiler.options import NAMED
from asap_jax.compiler.paper_fit import COEFFICIENTS, OBJECTIVES
from asap_jax.features.directions import KINDS
from asap_jax.fitting.least_squares import RIDGE_SCALES
from asap_jax.predictor.predictor import BASELINES
from asap_jax.spec import ENDINGS, PADDINGS
from train.runtime.errors import UserError

_FAMILIES = sorted(n for n, family in aj.features.FAMILIES.items() if hasattr(family, "create"))
SETTINGS = {
    "objective": (OBJECTIVES, "ls: ASAP-LS; kl: ASAP-KL"),
    "features": (None, f"feature families joined by +; the families: {', '.join(_FAMILIES)}"),
    "num_slices": (None, "number of slices"),
    "slice_kind": (KINDS, "kind of slice directions"),
    "coefficients": (COEFFICIENTS, "pooled over heads, per head, or shared by all layers"),
    "baseline": (BASELINES, "first_step: fit the residual to the first row step"),
    "token_bias": (None, "fit one bias per token position"),
    "ridge": (None, "ridge penalty on the coefficients"),
    "ridge_scale": (RIDGE_SCALES, "unit of the ridge"),
    "padding": (PADDINGS, "self: only active tokens have features; none: padded queries too"),
}
"""From a setting to its choices (None for any value) and its help text."""
PAPER_ONLY = ("features",)  # a candidate takes feature objects, which have no name here


def add(parser: argparse.ArgumentParser) -> None:
    """Adds ``--fit``, ``--closures`` and one option for each setting.

    A setting that the command line leaves out has the default of the chosen fit.
    """
    default = aj.Options()
    parser.add_argument(
        "--fit",
        choices=tuple(NAMED),
        default=default.fit.name,
        metavar="FIT",
        help=f"one of: {'; '.join(NAMED)}. paper is the fit of the paper. auto tries several "
        "candidates and chooses the best on held-out batches. Every other name is one candidate "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--closures",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="CLOSURES",
        help="number of closures (default: 2, or 1 for --ending row). With --fit paper also "
        "two_sided (ASAP, the default there), one_sided (ASAP-0) or none (predict both duals, no "
        "c-transform)",
    )
    parser.add_argument(
        "--ending",
        choices=ENDINGS,
        default=default.ending,
        help="row: end on rows even if the teacher ends on columns; one closure is then one "
        "softmax attention (default: %(default)s)",
    )
    group = parser.add_argument_group("settings of the fit (defaults are those of --fit paper)")
    for field in dataclasses.fields(aj.PaperFit):
        if field.name not in SETTINGS:
            continue
        choices, text = SETTINGS[field.name]
        flag = _flag(field.name)
        if isinstance(field.default, bool):
            group.add_argument(flag, action="store_const", const=True, help=text)
        else:
            kind = str if field.default is None else type(field.default)
            default_text = "that of the layer" if field.default is None else field.default
            help_text = f"{text} (default: {default_text})"
            group.add_argument(flag, type=kind, choices=choices, help=help_text)


def read(arguments: argparse.Namespace, seed: int = 0) -> aj.Options:
    """The options of a compile.

    Args:
      arguments: the parsed command line.
      seed: seed of slices and codebooks.

    Raises:
      UserError: the fit does not have a setting, or a value is out of range.
    """
    fit = NAMED[arguments.fit]
    values = {name: getattr(arguments, name) for name in SETTINGS}
    values = {name: value for name, value in values.items() if value is not None}
    known = {field.name for field in dataclasses.fields(fit)}
    if not isinstance(fit, aj.PaperFit):
        known -= set(PAPER_ONLY)
    for name in values:
        if name not in known:
            raise UserError(f"{_flag(name)} is not a setting of --fit {arguments.fit}")
    try:
        fit = dataclasses.replace(fit, **values)
        closures, ending = arguments.closures, arguments.ending
        return aj.Options(fit=fit, closures=closures, ending=ending, seed=seed)
    except (TypeError, ValueError) as fault:
        raise UserError(str(fault)) from fault


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
