"""The settings of a fit on the command line; names, choices and defaults are the library's."""

import argparse
import dataclasses

import asap_jax as aj
from asap_jax.compiler.options import NAMED
from asap_jax.compiler.paper_fit import COEFFICIENTS, OBJECTIVES
from asap_jax.features.directions import KINDS
from asap_jax.fitting.least_squares import RIDGE_SCALES
from asap_jax.predictor.predictor import BASELINES
from asap_jax.spec import PADDINGS
from train.runtime.errors import UserError

_FAMILIES = sorted(n for n, family in aj.features.FAMILIES.items() if hasattr(family, "create"))
SETTINGS = {
    "objective": (OBJECTIVES, "ls is ASAP-LS, kl ASAP-KL"),
    "features": (None, f"families joined by +, of {', '.join(_FAMILIES)}"),
    "num_slices": (None, "slices"),
    "slice_kind": (KINDS, "slice directions"),
    "coefficients": (COEFFICIENTS, "pooled over heads, per head, or shared by all layers"),
    "baseline": (BASELINES, "first_step fits the residual to the first row step"),
    "token_bias": (None, "fit one bias per token position"),
    "ridge": (None, "ridge"),
    "ridge_scale": (RIDGE_SCALES, "unit of the ridge"),
    "padding": (PADDINGS, "self: active tokens carry features; none: padded queries do too"),
}
"""Setting: its choices, and what it is."""
PAPER_ALONE = ("features",)  # a candidate has objects for features, not names


def add(parser: argparse.ArgumentParser) -> None:
    """Adds ``--fit``, ``--closures`` and the settings; a setting left out is the fit's own."""
    default = aj.Options()
    parser.add_argument(
        "--fit",
        choices=tuple(NAMED),
        default=default.fit.name,
        metavar="FIT",
        help=f"{'; '.join(NAMED)}. paper is the paper to the letter, auto the best of several by "
        "held-out batches, the others one way of predicting (default: %(default)s)",
    )
    parser.add_argument(
        "--closures",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="ENDING",
        help="a number of closures, by default 2; with --fit paper also two_sided (ASAP, its "
        "default), one_sided (ASAP-0) or none (both duals predicted, no c-transform)",
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
            default_text = "the layer's own" if field.default is None else field.default
            help_text = f"{text} (default: {default_text})"
            group.add_argument(flag, type=kind, choices=choices, help=help_text)


def read(arguments: argparse.Namespace, seed: int = 0) -> aj.Options:
    """The options of a compile.

    Args:
      arguments: the parsed command line.
      seed: of slices and codebooks.

    Raises:
      UserError: a setting that this fit does not have, or a value out of range.
    """
    fit = NAMED[arguments.fit]
    values = {name: getattr(arguments, name) for name in SETTINGS}
    values = {name: value for name, value in values.items() if value is not None}
    known = {field.name for field in dataclasses.fields(fit)}
    if not isinstance(fit, aj.PaperFit):
        known -= set(PAPER_ALONE)
    for name in values:
        if name not in known:
            raise UserError(f"{_flag(name)} is not a setting of --fit {arguments.fit}")
    try:
        fit = dataclasses.replace(fit, **values)
        return aj.Options(fit=fit, closures=arguments.closures, seed=seed)
    except (TypeError, ValueError) as fault:
        raise UserError(str(fault)) from fault


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
