"""Predictors of the fuzz: their arrays, the library's predictor, and the reference in NumPy."""

import numpy as np
import reference

import asap_jax as aj

SLICES, CENTRES = 5, 3


def arrays(rng, family, program):
    """The arrays of a predictor, as NumPy arrays of the dtype that the program computes in."""
    heads, dim = program.shape[3], program.shape[5]
    draw = lambda *shape: rng.normal(size=shape).astype("float64" if program.x64 else "float32")
    if family is None:
        return ()
    if family == "slices":
        return draw(SLICES, dim), 0.3 * draw(SLICES)
    moments = 0.05 * draw(heads, dim + 8)
    if family == "moments":
        return (moments,)
    return draw(CENTRES, dim), draw(CENTRES, dim), moments, 0.1 * draw(11)


def build(family, side, arrays):
    """The library's predictor."""
    if family == "slices":
        directions, w = arrays
        return aj.Predictor(directions=directions, coefficients=w, side=side)
    if family == "moments":
        return aj.Predictor((aj.Moments(),), coefficients=arrays[0], side=side)
    own, other, moments, w = arrays
    inner = aj.Predictor((aj.Moments(),), coefficients=moments)
    return aj.Predictor((aj.Codebook(own, other, inner),), coefficients=w, side=side)


def dual(family, side, arrays, head, q, k, query_valid, key_valid, scale):
    """The centred dual of one head in cost coordinates, by the formulas, in float64.

    Also the size of the terms that add up to it, which says how far float32 may be off.
    """
    if side == "key":
        q, k, query_valid, key_valid = k, q, key_valid, query_valid
    settings = dict(scale=scale, query_valid=query_valid, key_valid=key_valid)
    if family == "slices":
        directions, w = arrays
        x = reference.sliced_features(q, k, directions, **settings)
    elif family == "moments":
        x, w = reference.moment_features(q, k, **settings), arrays[0][head]
    else:
        own, other, moments, w = arrays
        swapped = dict(scale=scale, query_valid=key_valid, key_valid=query_valid)
        h = reference.moment_features(k, q, **swapped) @ np.asarray(moments[head], np.float64)
        h = h - reference.query_shift(k, scale=scale)
        x = reference.codebook_features(q, k, h, own, other, **settings)
    w = np.asarray(w, np.float64)
    return reference.center(x @ w, query_valid), (np.abs(x) @ np.abs(w)).max()
