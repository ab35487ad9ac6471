"""The ask-and-tell L-BFGS search: against SciPy, and its promises about single steps."""

import itertools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import scipy.optimize

from asap_jax.fitting import lbfgs

SIZE, ROWS = 5, 30

start = jax.jit(lbfgs.start)
trial = jax.jit(lbfgs.trial)
tell = jax.jit(lbfgs.tell, static_argnames="max_steps")


def quadratic(x, matrix, vector):
    return 0.5 * x @ (matrix @ x) - vector @ x


def logistic(x, rows, labels):
    """Ridge logistic regression; labels are plus and minus one."""
    return jnp.sum(jnp.logaddexp(0.0, -labels * (rows @ x))) + 0.05 * x @ x


def barrier(x, slope):
    """Convex, infinite or not a number outside the positive orthant."""
    return slope @ x - jnp.sum(jnp.log(x))


EVALUATE = {f: jax.jit(jax.value_and_grad(f)) for f in (quadratic, logistic, barrier)}


def search(function, x, *data, tolerance=0.0, max_steps=100, most=2000):
    """Every state of a search that Python drives.

    It ends at a gradient norm of `tolerance` times the first one, and fails after `most` trials.
    """
    value, gradient = EVALUATE[function](x, *data)
    small = tolerance * jnp.linalg.norm(gradient)
    states = [start(x, value, gradient)]
    while int(states[-1].reason) == lbfgs.RUNNING:
        assert len(states) <= most
        value, gradient = EVALUATE[function](trial(states[-1]), *data)
        met = jnp.linalg.norm(gradient) <= small
        states.append(tell(states[-1], value, gradient, small_gradient=met, max_steps=max_steps))
    return states


def reason(state):
    return lbfgs.REASONS[int(state.reason)]


def accepted(states):
    """The states right after an accepted step, with the states they came from."""
    pairs = itertools.pairwise(states)
    return [(old, new) for old, new in pairs if int(new.num_steps) > int(old.num_steps)]


def peer(function, x, *data, tolerance):
    """What SciPy's L-BFGS-B finds with as much memory and the same test of the gradient."""
    evaluate = lambda x: tuple(map(np.asarray, EVALUATE[function](problems.array(x), *data)))
    first = np.abs(evaluate(x)[1]).max()
    options = {"maxcor": lbfgs.MEMORY, "ftol": 0.0, "gtol": tolerance * first, "maxiter": 1000}
    return scipy.optimize.minimize(evaluate, x, jac=True, method="L-BFGS-B", options=options)


def random_quadratic(seed, decades, dtype="float64"):
    """A positive definite matrix whose eigenvalues spread over some decades, and a vector."""
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
    matrix = rotation @ np.diag(10 ** rng.uniform(0, decades, size=SIZE)) @ rotation.T
    return problems.array(matrix, dtype), problems.normal(rng, SIZE, dtype=dtype)


def random_logistic(seed, size, dtype="float64"):
    rng = np.random.default_rng(seed)
    rows = problems.normal(rng, ROWS, SIZE, dtype=dtype, size=size)
    return rows, problems.array(rng.choice([-1.0, 1.0], ROWS), dtype)


@pytest.fixture(scope="module")
def double():
    """64-bit types, for tests whose cases are drawn."""
    with jax.enable_x64(True):
        yield


@hypothesis.given(seed=st.integers(0, 2**32 - 1), decades=st.floats(0, 4))
def test_a_convex_quadratic_is_minimised_as_by_scipy(double, seed, decades):
    matrix, vector = random_quadratic(seed, decades)
    x = jnp.zeros(SIZE)
    states = search(quadratic, x, matrix, vector, tolerance=1e-8)
    found = states[-1]
    assert reason(found) == "gradient"
    other = peer(quadratic, np.zeros(SIZE), matrix, vector, tolerance=1e-8)
    np.testing.assert_allclose(found.point, np.linalg.solve(matrix, vector), atol=1e-7)
    np.testing.assert_allclose(found.point, other.x, atol=1e-7)
    np.testing.assert_allclose(found.value, other.fun, rtol=1e-12)
    assert len(states) <= 2 * other.nfev + 10  # as many evaluations, give or take a line search


@hypothesis.given(seed=st.integers(0, 2**32 - 1), size=st.floats(0.1, 5))
def test_a_logistic_loss_is_minimised_as_by_scipy(double, seed, size):
    data = random_logistic(seed, size)
    x = jnp.zeros(SIZE)
    states = search(logistic, x, *data, tolerance=1e-8)
    found = states[-1]
    assert reason(found) == "gradient"
    other = peer(logistic, np.zeros(SIZE), *data, tolerance=1e-8)
    np.testing.assert_allclose(found.point, other.x, atol=1e-5)
    np.testing.assert_allclose(found.value, other.fun, rtol=1e-12)
    assert len(states) <= 2 * other.nfev + 10


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("function", [quadratic, logistic])
def test_the_value_never_increases(dtype, function, seed):
    make = random_quadratic if function is quadratic else random_logistic
    data = make(seed, 3.0, dtype)
    states = search(function, jnp.full(SIZE, 2.0, dtype), *data)
    rounding = 64 * float(jnp.finfo(dtype).eps)  # of a value that is a sum of 30 terms
    for old, new in accepted(states):
        assert float(new.value) <= float(old.best) * (1 + np.sign(old.best) * rounding)
    best = np.array([float(state.best) for state in states])
    assert (np.diff(best) <= 0).all()
    assert best[-1] == min(float(state.value) for state in states)
    assert best[-1] < best[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("function", [quadratic, logistic])
def test_every_accepted_step_lowers_the_value_or_the_gradient(dtype, function, seed):
    make = random_quadratic if function is quadratic else random_logistic
    data = make(seed, 1.0, dtype)
    for old, new in accepted(search(function, jnp.zeros(SIZE, dtype), *data)):
        smaller = jnp.linalg.norm(new.gradient) < jnp.linalg.norm(old.gradient)
        assert float(new.value) < float(old.best) or bool(smaller)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("function", [quadratic, logistic])
def test_the_search_ends_when_rounding_hides_all_progress(dtype, function, seed):
    make = random_quadratic if function is quadratic else random_logistic
    data = make(seed, 1.0, dtype)
    found = search(function, jnp.zeros(SIZE, dtype), *data, max_steps=400)[-1]
    # A gradient of exactly 0 would meet the tolerance of 0.
    assert reason(found) == ("no_progress" if found.gradient.any() else "gradient")
    exact = [np.asarray(part, np.float64) for part in data]
    with jax.enable_x64(True):
        point = problems.array(np.asarray(found.point, np.float64))
        value, gradient = EVALUATE[function](point, *exact)
        _, first = EVALUATE[function](jnp.zeros(SIZE), *exact)
    scale = float(jnp.finfo(dtype).eps) * max(1.0, abs(float(value)))
    assert np.linalg.norm(gradient) <= 50 * scale * np.linalg.norm(first)


def test_python_and_jitted_loops_give_the_same_points(dtype):
    """States of a `while_loop` and of Python agree trial by trial, up to the order of sums."""
    most = 40

    def both(function, x, *data):
        value, gradient = EVALUATE[function](x, *data)

        @jax.jit
        def loop(first, *data):
            def body(carry):
                search, points, steps, count = carry
                value, gradient = jax.value_and_grad(function)(lbfgs.trial(search), *data)
                search = lbfgs.tell(
                    search,
                    value,
                    gradient,
                    small_gradient=jnp.linalg.norm(gradient) <= small,
                    max_steps=100,
                )
                points = points.at[count].set(search.point)
                return search, points, steps.at[count].set(search.num_steps), count + 1

            points = jnp.zeros((most, SIZE), dtype)
            carry = (first, points, jnp.zeros(most, jnp.int32), jnp.zeros((), jnp.int32))
            running = lambda carry: (carry[0].reason == lbfgs.RUNNING) & (carry[3] < most)
            return jax.lax.while_loop(running, body, carry)

        small = 1e-4 * jnp.linalg.norm(gradient)
        found, points, steps, count = loop(start(x, value, gradient), *data)
        states = search(function, x, *data, tolerance=1e-4)
        assert reason(found) == reason(states[-1]) == "gradient"
        assert int(count) == len(states) - 1
        expected = jnp.stack([state.point for state in states[1:]])
        tolerance = {"float32": 1e-4, "float64": 1e-12}[dtype.name]
        chex.assert_trees_all_close(points[: len(expected)], expected, atol=tolerance)
        chex.assert_trees_all_equal(
            steps[: len(expected)], jnp.stack([state.num_steps for state in states[1:]])
        )

    both(quadratic, jnp.ones(SIZE, dtype), *random_quadratic(1, 1.0, dtype))
    both(logistic, jnp.ones(SIZE, dtype), *random_logistic(1, 2.0, dtype))


def test_the_state_keeps_its_dtypes(dtype):
    """A loop carry may not change type, whatever the width of the other numbers."""
    states = search(quadratic, jnp.ones(SIZE, dtype), *random_quadratic(0, 1.0, dtype), max_steps=3)
    for state in states:
        for field in (state.point, state.value, state.best, state.gradient, state.direction):
            chex.assert_type(field, dtype)
    chex.assert_trees_all_equal_shapes_and_dtypes(*states)


def test_single_precision_stays_single_among_64_bit_types(x64):
    data = random_quadratic(0, 1.0, "float32")
    states = search(quadratic, jnp.ones(SIZE, jnp.float32), *data, max_steps=3)
    chex.assert_type([states[-1].point, states[-1].direction, states[-1].value], jnp.float32)
    chex.assert_trees_all_equal_shapes_and_dtypes(*states)


@pytest.mark.parametrize(
    ("value", "gradient"),
    [
        (np.nan, 0.0),
        (np.inf, 0.0),
        (-np.inf, 0.0),
        (-1e30, np.nan),
        (-1e30, np.inf),
    ],
)
def test_a_trial_that_is_not_finite_is_rejected(dtype, value, gradient):
    """Even where its value or its gradient alone would look like progress."""
    state = search(quadratic, jnp.ones(SIZE, dtype), *random_quadratic(0, 1.0, dtype), max_steps=2)
    before = state[-1].replace(reason=jnp.asarray(lbfgs.RUNNING, jnp.int32))
    bad = jnp.zeros(SIZE, dtype).at[2].set(gradient)
    after = tell(
        before, jnp.asarray(value, dtype), bad, small_gradient=jnp.asarray(True), max_steps=9
    )
    assert reason(after) == "running"
    assert float(after.step) == float(before.step) / 2
    chex.assert_trees_all_equal(
        after.replace(step=before.step), before.replace(step=before.step), strict=True
    )


def test_the_search_gives_up_when_every_trial_is_rejected(dtype):
    x = jnp.ones(SIZE, dtype)
    state = start(x, *EVALUATE[quadratic](x, *random_quadratic(0, 1.0, dtype)))
    first, trials = state, 0
    while int(state.reason) == lbfgs.RUNNING:
        nowhere = jnp.asarray(jnp.nan, dtype)
        state = tell(
            state, nowhere, jnp.ones_like(x), small_gradient=jnp.asarray(False), max_steps=9
        )
        trials += 1
        assert trials < 100
    assert reason(state) == "no_progress"
    chex.assert_trees_all_equal(state.point, first.point)
    assert int(state.num_steps) == 0


def test_the_search_stays_inside_a_bounded_domain(x64):
    """The first full step leaves the domain, where the logarithm is not a number."""
    slope = problems.array([3.0, 1.0, 0.5, 8.0, 2.0])
    x = problems.array([0.05, 0.4, 3.0, 0.01, 0.5])
    states = search(barrier, x, slope, tolerance=1e-9)
    assert any(not np.isfinite(float(barrier(trial(state), slope))) for state in states)
    assert all((np.asarray(state.point) > 0).all() for state in states)
    assert reason(states[-1]) == "gradient"
    np.testing.assert_allclose(states[-1].point, 1 / np.asarray(slope), rtol=1e-7)


@pytest.mark.parametrize("max_steps", [1, 2, 5])
def test_the_step_limit_counts_accepted_steps(x64, max_steps):
    data = random_quadratic(0, 3.0)
    states = search(quadratic, jnp.ones(SIZE), *data, max_steps=max_steps)
    assert reason(states[-1]) == "cap"
    assert int(states[-1].num_steps) == max_steps == len(accepted(states))


def test_a_start_at_the_minimum_stays_there(x64):
    matrix, _ = random_quadratic(0, 1.0)
    states = search(quadratic, jnp.zeros(SIZE), matrix, jnp.zeros(SIZE))
    assert reason(states[-1]) in ("gradient", "no_progress")
    chex.assert_trees_all_equal(states[-1].point, jnp.zeros(SIZE))
