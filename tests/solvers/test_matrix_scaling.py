"""Closures by matrix-vector products: the log domain's answer, the guard, the derivatives."""

import dataclasses
import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference
from scipy.special import logsumexp

import asap_jax as aj
from asap_jax.scores import largest_score
from asap_jax.solvers import matrix_scaling
from asap_jax.solvers.closures import OTHER, Closures

SHAPE = (2, 3, 7, 5)  # batch, heads, queries, keys


def problem_of(log):
    """The Problem whose log kernel holds exactly these entries; -inf is masked."""
    mask = log != -jnp.inf
    scores = jnp.where(mask, log, 0.0)
    unit = jnp.broadcast_to(
        jnp.eye(log.shape[-1], dtype=log.dtype), (*log.shape[:-2], *(log.shape[-1],) * 2)
    )
    return problems.problem(scores, unit, mask=mask)


def closing(rng, side, num_steps, size, dtype=jnp.float32):
    """Scores of that spread, a start and a log target; and the closures to take."""
    kernel = problems.array(rng.normal(size=SHAPE) * size, dtype)
    count = SHAPE[-2] if side == "query" else SHAPE[-1]
    start = problems.array(rng.normal(size=(*SHAPE[:2], count)) * size / 3, dtype)
    target = jnp.log(jnp.asarray(SHAPE[-2] / SHAPE[-1], dtype))
    return (kernel, start, target), Closures(side, num_steps)


def alternating(kernel, start, log_target, closures):
    """Weights after half-steps that start on `side`, in float64 log domain."""
    side = closures.side
    u, v = (start, 0.0) if side == "query" else (0.0, start)
    for _ in range(closures.num_steps):
        if side == "query":
            v = float(log_target) - logsumexp(kernel + u[..., None], axis=-2)
        else:
            u = -logsumexp(kernel + v[..., None, :], axis=-1)
        side = OTHER[side]
    return np.exp(kernel + u[..., None] + v[..., None, :])


@pytest.mark.parametrize("size", [1, 10, 100, 300])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 20])
@pytest.mark.parametrize("side", ["query", "key"])
def test_scaling_gives_the_log_domain_weights(rng, side, num_steps, size):
    args, closures = closing(rng, side, num_steps, size)
    expected = alternating(*(np.asarray(a, np.float64) for a in args), closures)
    p, start, target = problem_of(args[0]), *args[1:]
    fits = bool(matrix_scaling.can_exponentiate(p, start, closures))
    assert fits == (size == 1)
    scaled = jax.jit(functools.partial(matrix_scaling.run, closures=closures))(p, start, target)
    assert bool(scaled.ok)
    # Scores of size s carry a rounding of s eps, which is relative in the weights.
    np.testing.assert_allclose(scaled.weights(), expected, rtol=0, atol=1e-6 + 1e-7 * size)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 10])
def test_teacher_weights_follow_the_paper_at_any_sharpness(rng, num_steps):
    for size, tolerance in ((10, 5e-6), (50, 2e-5)):
        s = problems.uniform_scores(rng, 12, 12, bound=size)
        # Scores enter as a bias on zero queries, so that their float32 values are exact.
        q = jnp.zeros((12, 1, 4))
        bias = problems.array(s, jnp.float32)[None]
        v = jnp.eye(12)[:, None]
        out = aj.sinkhorn_attention(q, q, v, bias, spec=aj.SinkhornSpec(num_steps))
        expected = reference.sinkhorn(np.asarray(bias[0], np.float64), num_steps=num_steps)
        np.testing.assert_allclose(out[:, 0], expected, rtol=0, atol=tolerance)


def starved(dtype=jnp.float32):
    """Two queries that may only attend one key of unit mass: the scalings grow without bound."""
    mask = np.array([[1, 0, 0], [1, 0, 0], [1, 1, 1]], bool)
    q, k, v = jax.random.normal(jax.random.key(3), (3, 1, 3, 2, 4), dtype)
    return q, k, v, problems.array(mask)[None, None], aj.SinkhornSpec(num_steps=150)


def test_scalings_beyond_the_range_fall_back_to_the_log_domain():
    q, k, v, mask, spec = starved()
    p = problems.problem(*(jnp.swapaxes(x, 1, 2) for x in (q, k)), mask=mask, scale=0.5)
    closures = Closures("key", 150)
    for product, fits in ((p, True), (dataclasses.replace(p, q=100 * p.q), False)):
        args = (product, jnp.zeros((1, 2, 3)), jnp.zeros(()), closures)
        assert bool(matrix_scaling.can_exponentiate(product, args[1], closures)) == fits
        assert not bool(matrix_scaling.run(*args).ok)

    def outputs(implementation):
        function = functools.partial(
            aj.sinkhorn_attention, mask=mask, spec=spec, implementation=implementation
        )
        return problems.graded(function)(q, k, v)

    chex.assert_trees_all_equal(outputs("scaling"), outputs("log"))
    chex.assert_tree_all_finite(outputs("scaling"))


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_norms_bound_every_entry_of_the_kernel(rng, side, masked):
    for size, fitting in ((0.5, True), (40.0, False)):
        q, k = (problems.normal(rng, 2, 3, n, 4) * size for n in (6, 5))
        bias = problems.normal(rng, 1, 3, 6, 5)
        mask = problems.array(problems.random_mask(rng, 2, 1, 6, 5)) if masked else None
        p = problems.problem(q, k, bias=bias, mask=mask, scale=0.5)
        log = np.asarray(p.log_kernel(0.7))
        bound = float(largest_score(q, k, 0.5, bias)) / 0.7
        assert np.abs(log[np.isfinite(log)]).max() <= bound * (1 + 1e-6)
        start = problems.normal(rng, 2, 3, 6 if side == "query" else 5) * size
        closures = Closures(side, 3, 0.7)
        fits = [matrix_scaling.can_exponentiate(p, start + by, closures) for by in (0, 500)]
        assert list(map(bool, fits)) == 2 * [fitting]


def test_a_start_with_a_wide_range_cannot_be_exponentiated(rng):
    """The exponents of the kernel and of the start add up; tokens without an entry do not count."""
    q, k = (problems.normal(rng, 1, 1, 5, 4) for _ in range(2))
    mask = jnp.ones((1, 1, 5, 5), bool).at[..., 0].set(False)
    p = problems.problem(q, k, mask=mask, scale=0.5)
    start_of = lambda start: problems.array(start)[None, None]
    fits = lambda start: bool(
        matrix_scaling.can_exponentiate(p, start_of(start), Closures("key", 3))
    )
    assert fits([1e9, 0.0, 0.0, 0.0, 40.0])
    assert not fits([0.0, 0.0, 0.0, 0.0, 64.0])


def test_the_fallback_condition_stays_one_scalar_under_vmap():
    q, k, v, mask, spec = starved()
    function = functools.partial(aj.sinkhorn_attention, mask=mask[0], spec=spec)
    text = str(jax.make_jaxpr(jax.vmap(function))(q, k, v))
    assert "cond[" in text  # a batched predicate would have turned it into a select of both
    mapped = jax.vmap(function)(jnp.concatenate([q, q]), *(jnp.concatenate([x, x]) for x in (k, v)))
    chex.assert_trees_all_close(mapped[1], function(q[0], k[0], v[0]), atol=1e-6)


@pytest.mark.parametrize(
    ("num_steps", "masked", "size"), [(1, True, 2), (3, False, 2), (6, True, 2), (4, True, 8)]
)
def test_derivatives_of_the_scaling_form_are_right(rng, x64, num_steps, masked, size):
    """Sizes 2 and 8: a kernel exponentiated as it is, and with its peaks divided out."""
    q, k, v = (problems.array(size * rng.normal(size=(2, n, 2, 3))) for n in (5, 6, 6))
    mask = problems.array(rng.random((2, 2, 5, 6)) > 0.3) if masked else None
    heads = [jnp.swapaxes(x, 1, 2) for x in (q, k)]
    p = problems.problem(*heads, mask=mask, scale=3**-0.5)
    fits = matrix_scaling.can_exponentiate(p, jnp.zeros((2, 2, 6)), Closures("key", num_steps))
    assert bool(fits) == (size == 2)

    def of(implementation):
        function = functools.partial(
            aj.sinkhorn_attention,
            mask=mask,
            spec=aj.SinkhornSpec(num_steps),
            implementation=implementation,
        )
        loss = lambda *qkv: jnp.sum(jnp.sin(function(*qkv)))
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        forward = jax.jvp(function, (q, k, v), (k[:, :5], v, k))[1]
        second = jax.jvp(gradient, (q, k, v), (k[:, :5], v, k))[1]
        return gradient(q, k, v), forward, second

    of = jax.jit(of, static_argnums=0)
    # The largest second derivatives grow with the scores.
    chex.assert_trees_all_close(of("scaling"), of("log"), atol=5e-12 * size)
