"""The values of a case: queries, keys, values, biases and masks for one program."""

import numpy as np

SIZES = (0.0, 1e-3, 0.3, 1.0, 1.0, 3.0, 10.0, 100.0)
OFFSETS = (0.0, 0.0, 0.0, 1.0, 30.0, 1e3, 1e4)
PREDICTED = 30.0
"""Largest offset for a compiled layer, whose features are of squared lengths (docs/limits.md)."""


def draw(rng, program):
    """(query, key, value, bias, mask) in the program's dtype."""
    batch, n, m, heads, key_heads, dim, value_dim = program.shape
    pick = lambda options: options[rng.integers(len(options))]
    size, offset = pick(SIZES), pick(OFFSETS)
    if program.dtype == "float16":
        size, offset = min(size, 30.0), min(offset, 1e3)
    q = size * rng.normal(size=(batch, n, heads, dim))
    k = size * rng.normal(size=(batch, m, key_heads, dim))
    v = pick((1.0, 1.0, 1e-4, 100.0)) * rng.normal(size=(batch, m, key_heads, value_dim))
    for x in (q, k):
        if rng.random() < 0.2:  # tokens that are the same
            x[:, :] = x[:, rng.integers(x.shape[1], size=x.shape[1])]
        if rng.random() < 0.1:  # one token far from the others
            x[:, rng.integers(x.shape[1])] *= 30
    sign = rng.choice((-1.0, 1.0), size=dim)
    where = pick(("both", "both", "queries", "keys"))
    if program.family is not None:
        offset = min(offset, PREDICTED)
    q = q + (offset * sign if where != "keys" else 0)
    k = k + (offset * sign if where != "queries" else 0)
    q, k, v = (x.astype(np_dtype(program.dtype)) for x in (q, k, v))
    return q, k, v, _bias(rng, program), _mask(rng, program)


def np_dtype(name):
    """The NumPy dtype of this name, bfloat16 too."""
    import jax.numpy as jnp

    return jnp.dtype(name)


def _bias(rng, program):
    batch, n, m, heads, *_ = program.shape
    shape = {
        "full": (batch, heads, n, m),
        "heads": (1, heads, n, m),
        "keys": (batch, 1, 1, m),
        "queries": (1, heads, n, 1),
        "masked": (batch, 1, 1, m),
        "minus infinity": (batch, 1, n, m),
    }.get(program.bias)
    if shape is None:
        return None
    bias = rng.choice((0.0, 1.0, 10.0)) * rng.normal(size=shape)
    if program.bias in ("masked", "minus infinity"):
        hidden = rng.random(shape) < rng.choice((0.0, 0.3, 1.0), p=(0.3, 0.6, 0.1))
        bias = np.where(hidden, -1e9 if program.bias == "masked" else -np.inf, bias)
    return bias.astype("float64" if program.x64 else "float32")


def _mask(rng, program):
    batch, n, m, heads, *_ = program.shape
    lengths = rng.integers(0 if rng.random() < 0.2 else 1, m + 1, size=batch)
    keys = np.arange(m) < lengths[:, None]
    if rng.random() < 0.3:
        keys = keys[:, ::-1]  # padded on the left
    share = rng.choice((0.3, 0.8, 1.0))
    match program.mask:
        case "none":
            return None
        case "bool" | "int" | "float":
            mask = rng.random((batch, heads if program.mask == "int" else 1, n, m)) < share
            return mask.astype({"bool": bool, "int": np.int32, "float": np.float32}[program.mask])
        case "keys":
            return keys[:, None, None, :]
        case "queries":
            return rng.random((batch, 1, n, 1)) < share
        case "tokens":
            return (keys[:, :, None] & keys[:, None, :])[:, None]
