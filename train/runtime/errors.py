"""``UserError``, and the import of optional packages when they are needed."""

import importlib
import types

INSTALL = "pip install 'asap_jax[train]'"


class UserError(Exception):
    """An error that the user can fix; its one-line message says how."""


class Stopped(UserError):
    """The user stopped the program, with Ctrl-C or SIGTERM; the message says what is saved.

    The command line adds how to continue.
    """


def need(module: str) -> types.ModuleType:
    """Imports a module of the ``train`` extra.

    Args:
      module: the name to import, for example ``"orbax.checkpoint"``.

    Returns:
      The module.

    Raises:
      UserError: the module is not installed; the message gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as fault:
        missing = fault.name or module
        raise UserError(f"the module {missing} is not installed: run {INSTALL}") from fault
