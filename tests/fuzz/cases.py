"""A case is a number: it draws its kind, its program and its values."""

import functools

import numpy as np
from fuzz import artefacts, attention, programs, transformations

KINDS = {
    "attention": (0.8, attention.check),
    "transformation": (0.08, transformations.check),
    "artefact": (0.12, artefacts.check),
}
menu = functools.cache(programs.menu)


def kind_of(seed, number):
    """The kind of a case, a key of ``KINDS``."""
    shares = [share for share, _ in KINDS.values()]
    draw = np.random.default_rng((seed, number)).random() * sum(shares)
    return list(KINDS)[int(np.searchsorted(np.cumsum(shares), draw))]


def run(seed, number, num_programs, kind=None):
    """Runs a case; raises AssertionError, or what the library raised, if it fails.

    ``kind`` replaces the kind that the case has.
    """
    _, check = KINDS[kind or kind_of(seed, number)]
    check(np.random.default_rng((seed, number, 1)), menu(num_programs))
