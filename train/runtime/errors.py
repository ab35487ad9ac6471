"""Modules of the ``train`` extra, imported only when they are needed."""

import importlib
import types

CURE = "pip install 'asap_jax[train]'"


class UserError(Exception):
    """A fault that the person at the command line can mend; its text says how, in one line."""


def need(module: str) -> types.ModuleType:
    """Imports a module of the ``train`` extra.

    Args:
      module: the name to import, for example ``"orbax.checkpoint"``.

    Returns:
      The module.

    Raises:
      UserError: it is not installed; the message gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as fault:
        missing = fault.name or module
        raise UserError(f"the module {missing} is not installed: run {CURE}") from fault
