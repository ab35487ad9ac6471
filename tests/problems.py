"""Random attention problems of a few fixed shapes, so that compiled functions are reused."""

import jax
import jax.numpy as jnp
import numpy as np

from asap_jax import masks
from asap_jax.problem import Problem

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 7, 5, 4


def array(x, dtype=None):
    """A JAX array of NumPy values; `jnp.asarray` compiles a program for every new shape."""
    return jax.device_put(np.asarray(x, None if dtype is None else jnp.dtype(dtype)))


def numpy_results(function):
    """The function with its results in NumPy: further arithmetic on them compiles nothing."""
    return lambda *args, **settings: jax.tree.map(np.asarray, function(*args, **settings))


def normal(rng, *shape, dtype="float32", size=1.0):
    """Gaussian array, rounded to the dtype before any reference sees it."""
    return array(size * rng.normal(size=shape), dtype)


def uniform_scores(rng, *shape, dtype="float32", bound=10.0):
    """Scores spread over the whole range of plus and minus `bound`."""
    return array(rng.uniform(-bound, bound, size=shape), dtype)


def per_head(
    rng, *, dtype="float32", size=1.0, queries=QUERIES, keys=KEYS, dim=DIM, batch=BATCH, heads=HEADS
):
    """Queries and keys in per-head layout, (batch, heads, length, dim)."""
    q = normal(rng, batch, heads, queries, dim, dtype=dtype, size=size)
    k = normal(rng, batch, heads, keys, dim, dtype=dtype, size=size)
    return q, k


def attention_inputs(
    rng, *, dtype="float32", size=1.0, queries=QUERIES, keys=KEYS, dim=DIM, batch=BATCH, heads=HEADS
):
    """q, k and v in the layout of attention functions, (batch, length, heads, dim)."""
    q = normal(rng, batch, queries, heads, dim, dtype=dtype, size=size)
    k = normal(rng, batch, keys, heads, dim, dtype=dtype, size=size)
    v = normal(rng, batch, keys, heads, dim, dtype=dtype)
    return q, k, v


def heads_first(x):
    """From the layout of attention functions to per-head layout, float64 NumPy."""
    return np.swapaxes(np.asarray(x, np.float64), -2, -3)


def random_mask(rng, *shape, share=0.7):
    """A mask that differs per entry but leaves every query a key and every key a query."""
    mask = rng.random(shape) < share
    *_, n, m = shape
    longest = max(n, m)
    mask[..., np.arange(longest) % n, np.arange(longest) % m] = True
    return mask


def key_padding(lengths, keys):
    """The (batch, 1, 1, keys) mask of sequences of the given lengths."""
    return (np.arange(keys) < np.asarray(lengths)[:, None])[:, None, None, :]


def token_padding(lengths, size):
    """The (batch, 1, size, size) mask that drops padded tokens as queries and as keys."""
    valid = np.arange(size) < np.asarray(lengths)[:, None]
    return (valid[:, :, None] & valid[:, None, :])[:, None]


def graded(function, argnums=(0, 1, 2)):
    """The jitted ``(output, gradients)`` of ``function``, under the loss sum(sin(output)).

    One program traces the function once.
    """

    def loss(*arguments, **keywords):
        out = function(*arguments, **keywords)
        wide = out.astype(jnp.float32) if out.dtype.itemsize < 4 else out
        return jnp.sum(jnp.sin(wide)), out

    def run(*arguments, **keywords):
        (_, out), gradients = differentiated(*arguments, **keywords)
        return out, gradients

    differentiated = jax.value_and_grad(loss, argnums, has_aux=True)
    return jax.jit(run)


def slope(function, arguments, rng, *, step=1e-6):
    """A directional derivative of a scalar function: (by jax.grad, by central differences).

    Call it with 64-bit types enabled and float64 arguments.
    """
    arguments = [np.asarray(x) for x in arguments]
    directions = [rng.normal(size=x.shape) for x in arguments]
    # One compiled program for all three: most of a test's time is compilation.
    run = jax.jit(jax.value_and_grad(function, argnums=tuple(range(len(arguments)))))
    moved = [
        run(*(x + sign * step * d for x, d in zip(arguments, directions, strict=True)))[0]
        for sign in (1, -1)
    ]
    _, grads = run(*arguments)
    exact = sum(float(np.vdot(g, d)) for g, d in zip(grads, directions, strict=True))
    return exact, float(moved[0] - moved[1]) / (2 * step)


def problem(q, k, *, v=None, bias=None, mask=None, scale=1.0):
    """A Problem of per-head arrays as they are."""
    validity = masks.closure_validity(mask, (*q.shape[:-1], k.shape[-2]))
    return Problem(q, k, v, bias, mask, validity, scale, q.dtype)
