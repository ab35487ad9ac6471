"""Command-line options of training through compiled layers."""

import argparse
import dataclasses

import asap_jax as aj
from asap_jax.compiler.single_fit import SumsFit
from asap_jax.spec import ENDINGS
from train.recipes.amortization import Amortization
from train.runtime.errors import UserError

SETTINGS = ("closures", "ending", "decay", "fit")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds ``--amortize`` and an option for each setting of ``Amortization``."""
    group = parser.add_argument_group("training through compiled layers")
    group.add_argument(
        "--amortize",
        type=int,
        metavar="K",
        help="run the Sinkhorn loop only before every K-th step, on its batch, to fit compiled "
        "layers; train through these",
    )
    default = {field.name: field.default for field in dataclasses.fields(Amortization)}
    fits = [fit.name for fit in aj.CANDIDATES if fit.layer_kind() is SumsFit]
    group.add_argument(
        "--amortize-closures",
        type=int,
        metavar="N",
        help="closures of a compiled layer (default: 2, or 1 if it ends on rows)",
    )
    group.add_argument(
        "--amortize-ending",
        choices=ENDINGS,
        help=f"row: end on rows even if the recipe does not (default: {default['ending']})",
    )
    group.add_argument(
        "--amortize-decay",
        type=float,
        metavar="D",
        help=f"factor of the earlier sums at every fit, 0 to 1 (default: {default['decay']:g})",
    )
    group.add_argument(
        "--amortize-fit",
        choices=fits,
        metavar="FIT",
        help=f"one of: {'; '.join(fits)} (default: {default['fit']})",
    )


def read(options: argparse.Namespace) -> Amortization | None:
    """The settings of the parsed command line, or None without ``--amortize``.

    Raises:
      UserError: a setting without ``--amortize``.
    """
    values = {name: getattr(options, f"amortize_{name}") for name in SETTINGS}
    values = {name: value for name, value in values.items() if value is not None}
    if options.amortize is None:
        for name in values:
            raise UserError(f"--amortize-{name} needs --amortize K")
        return None
    return Amortization(options.amortize, **values)
