"""Closures on a kernel, and their gradient, against the log domain in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

from asap_jax.solvers import log_domain
from asap_jax.solvers.closures import Closures
from asap_jax.solvers.flash import cudnn, loop, mosaic, reference, splash
from asap_jax.solvers.flash.kernel import Kernel

BATCH, HEADS, QUERIES, KEYS, DIM, VALUES = 2, 2, 11, 7, 4, 5
PADDING = {
    "none": lambda: None,
    "keys": lambda: problems.key_padding([KEYS, 4], KEYS),
    "queries": lambda: np.swapaxes(problems.key_padding([QUERIES, 6], QUERIES), -1, -2),
    "all keys": lambda: problems.key_padding([KEYS, 0], KEYS),
}


def without_gradients(kernel):
    """A kernel as fused ones are: the cotangent of its log-sum-exp is dropped."""

    def flash(q, k, v, key_bias):
        out, lse = kernel.flash(q, k, v, jax.lax.stop_gradient(key_bias))
        return out, jax.lax.stop_gradient(lse)

    return Kernel(kernel.attend, flash)


def inputs(rng, side, dtype, *, queries=QUERIES, keys=KEYS):
    """q, k, v, a bias on the side of the start, the start, and weights of a loss."""
    shape = dict(dim=DIM, batch=BATCH, heads=HEADS, queries=queries, keys=keys, dtype=dtype)
    q, k = problems.per_head(rng, **shape)
    v = problems.normal(rng, BATCH, HEADS, keys, VALUES, dtype=dtype)
    length = queries if side == "query" else keys
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    bias = problems.normal(rng, BATCH, 1, 1, length, dtype=wide)
    bias = jnp.swapaxes(bias, -1, -2) if side == "query" else bias
    start = problems.normal(rng, BATCH, HEADS, length, dtype=wide) - 20
    return (q, k, v, bias, start), rng.normal(size=(BATCH, HEADS, queries, VALUES))


def results(apply, arguments, mixing, mask, closures, *, dtype=None):
    """Output and gradients; in float64 if ``dtype`` is, otherwise in the dtype of the inputs."""
    q = arguments[0]
    wide = jnp.dtype("float64" if "float64" in (dtype, q.dtype.name) else "float32")

    def loss(*arguments):
        q, k, v, bias, start = (x.astype(wide) for x in arguments)
        p = problems.problem(q, k, v=v, bias=bias, mask=mask, scale=0.5)
        p = p.replace(dtype=jnp.dtype(dtype or arguments[0].dtype))
        out = apply(p, start, p.log_key_target("balanced"), closures)
        return jnp.sum(jnp.asarray(mixing, wide) * out), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))(*arguments)
    return out, grads


def relative(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize(
    ("side", "num_steps", "padding"),
    [
        ("key", 1, "keys"), ("key", 2, "queries"), ("key", 3, "all keys"), ("key", 20, "none"),
        ("query", 1, "queries"), ("query", 2, "none"), ("query", 3, "keys"), ("query", 20, "keys"),
    ],
)  # fmt: skip
def test_forward_calls_give_the_gradient_that_the_kernel_lacks(rng, x64, side, num_steps, padding):
    arguments, mixing = inputs(rng, side, "float64")
    mask = PADDING[padding]()
    mask = None if mask is None else jnp.asarray(mask)
    closures = Closures(side, num_steps, 0.7)
    kernel = without_gradients(reference.kernel(block=4))
    found = results(functools.partial(loop.apply, kernel), arguments, mixing, mask, closures)
    expected = results(log_domain.apply, arguments, mixing, mask, closures)
    chex.assert_trees_all_close(found, expected, atol=1e-11, rtol=1e-11)
    if num_steps <= 3:
        assert float(jnp.abs(expected[1][4]).max()) > 1e-2  # the gradient of the dual


def test_the_gradient_would_be_wrong_without_the_rule(rng, x64):
    arguments, mixing = inputs(rng, "key", "float64")
    kernel = reference.kernel()
    stopped = lambda *args: jax.tree.map(jax.lax.stop_gradient, kernel.flash(*args))

    def by_autodiff(p, start, target, closures):
        row = -stopped(p.q * p.scale, p.k, None, start)[1]
        column = target - stopped(p.k, p.q * p.scale, None, row)[1]
        return kernel.attend(p.q * p.scale, p.k, p.v, column)

    # The start has the bias in it already.
    arguments = (*arguments[:3], jnp.zeros_like(arguments[3]), arguments[4])
    settings = arguments, mixing, None, Closures("key", 3)
    _, dropped = results(by_autodiff, *settings)
    _, expected = results(log_domain.apply, *settings)
    assert relative(dropped[0], expected[0]) > 0.1
    assert float(jnp.abs(dropped[4]).max()) == 0


CASES = [("reference", "key", 3), ("folded", "key", 1), ("splash", "key", 1), ("splash", "key", 2)]
KERNELS = {
    "reference": lambda: without_gradients(reference.kernel()),
    "folded": lambda: cudnn.kernel("xla"),
    "splash": lambda: splash.kernel(interpret=True),
}


@pytest.mark.parametrize(("name", "side", "num_steps"), CASES)
@pytest.mark.parametrize(
    ("dtype", "out_error", "error"), [("float32", 2e-6, 2e-6), ("bfloat16", 8e-3, 1.5e-2)]
)
def test_kernels_are_as_accurate_as_their_dtype(
    rng, x64, name, side, num_steps, dtype, out_error, error
):
    arguments, mixing = inputs(rng, side, dtype, queries=140, keys=130)
    mask = jnp.asarray(problems.key_padding([130, 121], 130))
    closures = Closures(side, num_steps, 0.7)
    apply = functools.partial(loop.apply, KERNELS[name]())
    # jax.nn's attention on XLA does not run under strict promotion. Compiled for CPUs by JAX 0.12,
    # it rounds more than bfloat16 needs, with a true bias too.
    folded = name == "folded"
    with jax.numpy_dtype_promotion("standard" if folded else "strict"), jax.disable_jit(folded):
        out, grads = results(apply, arguments, mixing, mask, closures)
    exact_out, exact = results(log_domain.apply, arguments, mixing, mask, closures, dtype="float64")
    assert relative(out, exact_out) < out_error
    for found, expected in zip(grads, exact, strict=True):
        assert relative(found, expected) < error


@pytest.mark.parametrize(("side", "num_steps"), [("key", 1), ("key", 2), ("query", 2)])
def test_tokamax_means_by_residuals_what_the_kernel_takes_them_for(
    rng, x64, monkeypatch, side, num_steps
):
    """With Tokamax's operator for CPUs, of the same signature, in place of that for CUDA."""
    base = pytest.importorskip("tokamax._src.ops.attention.base")
    monkeypatch.setattr(mosaic, "operator", base.DotProductAttention)
    arguments, mixing = inputs(rng, side, "float32", queries=140, keys=130)
    mask = jnp.asarray(problems.key_padding([130, 121], 130))
    closures = Closures(side, num_steps, 0.7)
    kernel = mosaic.kernel()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out, grads = results(
            functools.partial(loop.apply, kernel), arguments, mixing, mask, closures
        )
    exact_out, exact = results(log_domain.apply, arguments, mixing, mask, closures, dtype="float64")
    assert relative(out, exact_out) < 2e-6
    assert all(relative(*pair) < 2e-6 for pair in zip(grads, exact, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_log_sum_exp_keeps_float32_so_that_marginals_hold(rng, x64, dtype):
    """Rows and columns of the plan of the duals, whatever the dtype of queries and keys."""
    q, k = problems.per_head(rng, dim=DIM, batch=1, heads=1, queries=140, keys=130, dtype=dtype)
    start = problems.normal(rng, 1, 1, 130, size=2) - 20
    scores = np.asarray(q, np.float64)[0, 0] @ np.asarray(k, np.float64)[0, 0].T
    for kernel in (reference.kernel(), splash.kernel(interpret=True)):
        flash = jax.jit(lambda *args, flash=kernel.flash: flash(args[0], args[1], None, args[2])[1])
        row = -flash(q, k, start)
        column = -flash(k, q, row)
        assert row.dtype == jnp.float32
        row, column, first = (np.asarray(x, np.float64)[0, 0] for x in (row, column, start))
        rows = np.exp(row[:, None] + scores + first).sum(1)
        columns = np.exp(row[:, None] + scores + column).sum(0)
        np.testing.assert_allclose(rows, 1, rtol=0, atol=5e-6)
        np.testing.assert_allclose(columns, 1, rtol=0, atol=5e-6)


def test_vmap_and_batch_axes_change_nothing(rng):
    arguments, _ = inputs(rng, "key", "float32")
    kernel = without_gradients(reference.kernel(block=4))

    def attend(q, k, v, bias, start):
        p = problems.problem(q, k, v=v, bias=bias, scale=0.5)
        return loop.apply(kernel, p, start, jnp.zeros(()), Closures("key", 4))

    grads = lambda function: jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2, 3, 4))
    expected = jax.jit(grads(attend))(*arguments)
    mapped = jax.jit(jax.vmap(grads(attend)))(*arguments)
    chex.assert_trees_all_close(mapped, expected, atol=1e-5)


def test_only_the_duals_of_the_steps_are_kept_for_the_gradient():
    def temporary(num_steps):
        like = jax.ShapeDtypeStruct((1, 1, 1024, 64), jnp.float32)

        def loss(q, k, v):
            p = problems.problem(q, k, v=v)
            closures = Closures("key", num_steps)
            return jnp.sum(loop.apply(reference.kernel(), p, k[..., 0], jnp.zeros(()), closures))

        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(like, like, like)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(41) - temporary(21) < 20 * 3 * 1024 * 4  # bytes of 20 rounds of duals


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_offset_of_the_keys_in_one_channel_is_exact_in_the_dtype_of_a_kernel(rng, x64, dtype):
    """Kernels take queries and keys in their own dtype: keys minus the offset must fit in there."""
    arguments, mixing = inputs(rng, "key", dtype)
    q, k, *rest = arguments
    q, k = 4 * q, (4 * k).at[..., 0].add(1000)
    kernel = reference.kernel(precision="highest", block=4)

    def apply(p, *call):
        return loop.apply(kernel, p.without_key_offset(), *call)

    settings = (q, k, *rest), mixing, None, Closures("key", 3)
    moved, _ = results(apply, *settings)
    expected, _ = results(log_domain.apply, *settings, dtype="float64")
    assert relative(moved, expected) < {"bfloat16": 2e-3, "float32": 5e-6}[dtype]
