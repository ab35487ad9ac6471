"""Command-line options of evaluation while a model trains."""

import argparse
import dataclasses

from train.recipes.evaluation import KEPT, Evaluation
from train.runtime.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each setting of ``Evaluation``."""
    group = parser.add_argument_group("evaluation while training")
    group.add_argument(
        "--held-out",
        type=float,
        metavar="SHARE",
        help="do not train on this share of the training split, the last examples of every class, "
        "but evaluate the model on it; 0 for no evaluation (default: the recipe's)",
    )
    group.add_argument(
        "--evaluate-every",
        type=int,
        metavar="EPOCHS",
        help="epochs from one evaluation to the next (default: the recipe's, else 1)",
    )
    group.add_argument(
        "--keep",
        choices=KEPT,
        help="the result of the run: the last parameters, or those with the best accuracy on the "
        "held-out part (default: the recipe's, else last)",
    )


def read(options: argparse.Namespace, default: Evaluation | None) -> Evaluation | None:
    """The recipe's settings with the changes of the command line.

    Raises:
      UserError: a setting where there is no held-out part.
    """
    values = {"held_out": options.held_out, "every": options.evaluate_every, "keep": options.keep}
    values = {name: value for name, value in values.items() if value is not None}
    off = values.get("held_out", 1) == 0
    if off or (default is None and "held_out" not in values):
        for flag, name in (("--evaluate-every", "every"), ("--keep", "keep")):
            if name in values:
                raise UserError(f"{flag} needs --held-out SHARE, a share above 0")
        return None
    return dataclasses.replace(default or Evaluation(), **values)
