"""What a case must give, in float64 from the formulas, and how far float32 may be from it."""

import numpy as np
import reference
from fuzz import predictors

SHARP = 20.0
"""Scores from which codebook features are only checked to be finite: the nearest centre of a token
may change by rounding, and centres whose tokens have weights below float32 drop out."""

LOST = 1e6
"""Errors of exponents from which float64 has no digits left either: outputs must then be finite."""


def output(program, arrays, weights):
    """(expected output, bound), both ``(B, N, H, dv)``; ``weights`` are the predictor's arrays."""
    query, key, value, bias, mask = (None if x is None else np.asarray(x) for x in arrays)
    heads = query.shape[2]
    repeat = lambda x: np.repeat(x, heads // x.shape[2], 2)
    per_head = lambda x: np.swapaxes(np.asarray(x, np.float64), 1, 2)
    q, k, v = per_head(query), per_head(repeat(key)), per_head(repeat(value))
    full = (*q.shape[:-1], k.shape[-2])
    every = lambda x, fill: np.broadcast_to(fill if x is None else x, full)
    bias, mask = every(bias, 0.0), every(mask, True) != 0
    mask = mask & (bias > -1e8)
    out, bound = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros((*q.shape[:-1], v.shape[-1]))
    for i in np.ndindex(*q.shape[:2]):
        a, error = _weights(program, weights, i[1], q[i], k[i], bias[i], mask[i])
        used = mask[i].any(0)
        largest = np.abs(v[i][used]).max(initial=0.0)
        out[i] = a @ np.where(used[:, None], v[i], 0.0)
        # Errors of exponents; no weight can be off by more than all of the mass.
        most = 2.0 * mask[i].any(1).sum() if error < LOST else np.inf
        off = np.minimum(a.sum(1) * np.expm1(min(error, 600.0)), most)
        bound[i] = (off * max(largest, 1e-30))[:, None]
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(program.dtype, 0.0)
    tiny = 1e-7 if program.dtype == "float16" else 1e-30
    bound = bound + rounding * np.abs(out) + tiny
    return np.swapaxes(out, 1, 2), np.swapaxes(bound, 1, 2)


def _weights(program, weights, head, q, k, bias, mask):
    """The weights of one problem, and a bound of the error of their logarithms."""
    spec = program.spec
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    q, k = np.where(mask.any(1)[:, None], q, 0.0), np.where(mask.any(0)[:, None], k, 0.0)
    bias = np.where(mask, bias, 0.0)
    s = reference.scores(q, k, scale=scale, bias=bias)
    settings = dict(epsilon=spec.epsilon, mask=mask, key_mass=spec.key_mass)
    if not mask.any():
        return np.zeros(mask.shape), 0.0
    if program.family is None:
        a = reference.sinkhorn(s, num_steps=spec.num_steps, **settings)
        return a, _error(program, spec.num_steps, scale, q, k, bias, mask, s)
    if program.family == "codebook" and np.abs(s[mask]).max() > SHARP:
        return np.ones(mask.shape), np.inf
    valid = reference.feature_validity(mask, spec.padding)
    arguments = program.family, program.side, weights, head, q, k, *valid, scale
    dual, size = predictors.dual(*arguments)
    own = q if program.side == "query" else k
    active = mask.any(1) if program.side == "query" else mask.any(0)
    dual = np.where(active, dual - reference.query_shift(own, scale=scale), 0.0)
    a = reference.close(s, dual, side=program.side, num_closures=program.closures, **settings)
    cost = reference.quadratic_cost(q[mask.any(1)], k[mask.any(0)], scale=scale).max()
    squares = max(reference.query_shift(x, scale=scale).max() for x in (q, k))
    error = _error(program, program.closures, scale, q, k, bias, mask, s)
    predicted = 100 * _unit(program) * (1 + size + cost + squares)
    return a, error + predicted / spec.epsilon


def _unit(program):
    return 2.2e-16 if program.x64 else 6e-8


def _error(program, num_closures, scale, q, k, bias, mask, s):
    """A closure does not enlarge errors of scores, so they add up over the closures.

    Scores of a teacher are computed without an offset that the keys share, to which the unit of the
    program's precision applies; the reference has that of float64 on the scores as they are.
    """
    longest = lambda x: np.linalg.norm(x, axis=-1).max(initial=0.0)
    used = k[mask.any(0)]
    center = used.mean(0) if program.family is None else 0.0
    # Up to five times the distance from the mean, an offset is left alone.
    size = scale * longest(q) * 5 * longest(used - center) + np.abs(bias).max()
    delta = _unit(program) * 8 * size + 2.2e-16 * 8 * np.abs(s[mask]).max()
    return (3e-6 if not program.x64 else 1e-13) + 4 * (
        num_closures + 2
    ) * delta / program.spec.epsilon
