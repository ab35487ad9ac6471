"""Cases of single calls: finite, and equal to the reference within the bound."""

import numpy as np
from fuzz import expected, predictors, values


def check(rng, programs):
    """One case: values for one of the programs. Raises AssertionError."""
    program = programs[rng.integers(len(programs))]
    arrays = values.draw(rng, program)
    weights = predictors.arrays(rng, program.family, program)
    out = program(*arrays, weights).astype(np.float64)
    assert np.isfinite(out).all(), f"not finite: {program}"
    reference, bound = expected.output(program, arrays, weights)
    excess = np.abs(out - reference) / bound
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess[worst] <= 1, (
        f"{program}: at {worst} {out[worst]} instead of {reference[worst]}, "
        f"{excess[worst]:.3g} times the bound {bound[worst]:.3g}"
    )
