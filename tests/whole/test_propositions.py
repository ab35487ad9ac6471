"""The propositions of the paper's appendix, one by one, as properties of random problems.

Ours is on one side, float64 NumPy on the other. Plans are in coupling units, P = A / N, unless a
test says attention scale; costs are given to the library as scores -C.
"""

import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import scipy.optimize

import asap_jax as aj

N, DIM, SLICES, HEADS = 6, 3, 4, 2
BANK = np.random.default_rng(0).normal(size=(SLICES, DIM))
LINE = np.ones((1, 1))  # the one direction of one-dimensional tokens

key_transform = jax.jit(aj.key_ctransform, static_argnames="epsilon")
query_transform = jax.jit(aj.query_ctransform, static_argnames="epsilon")
weights_of = jax.jit(aj.attention_weights, static_argnames="epsilon")
potentials = jax.jit(aj.sliced_potentials, static_argnames="scale")
compiled = jax.jit(aj.asap_attention, static_argnames=("closures", "return_weights"))
plan_kl = jax.jit(aj.metrics.plan_kl)


@pytest.fixture(autouse=True, scope="module")
def double():
    """Identities and bounds are checked to rounding, so everything runs in float64."""
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------------------- random problems


seeds = st.integers(0, 2**32 - 1)


def arrays(*shape, bound=3.0):
    """Uniform numbers, or what hypothesis finds interesting (zeros, ties, ends of the range)."""
    generic = seeds.map(lambda seed: np.random.default_rng(seed).uniform(-bound, bound, shape))
    elements = st.floats(-bound, bound, allow_subnormal=False)
    return generic | hypothesis.extra.numpy.arrays(
        np.float64, shape, elements=elements, fill=st.nothing()
    )


def marginals(size=N):
    """Positive masses that sum to one."""
    return arrays(size, bound=1.0).map(lambda x: np.exp(x) / np.exp(x).sum())


epsilons = st.sampled_from([0.5, 1.0])


def tokens(seed, *, heads=HEADS, size=1.0):
    """Query, key and value of one example in the layout of attention functions."""
    rng = np.random.default_rng(seed)
    q, k = size * rng.normal(size=(2, 1, N, heads, DIM))
    return q, k, rng.normal(size=(1, N, heads, 2))


# ------------------------------------------------------- NumPy's side: plans, divergences, tilts


def gibbs(cost, f, nu, epsilon):
    """The key-normalised plan, from its definition as a normalised exponential per column."""
    x = (f[:, None] - cost) / epsilon
    e = np.exp(x - x.max(0))
    return nu * e / e.sum(0)


def closed(cost, f, nu, epsilon, times, mu=None):
    """Plans after one to three closures of the source dual f: key, query, key."""
    plan = gibbs(cost, f, nu, epsilon)
    if times >= 2:
        plan = plan * (mu / plan.sum(1))[:, None]
    if times == 3:
        plan = plan * (nu / plan.sum(0))
    return plan


def divergence(p, q):
    """The generalised KL divergence, with 0 log 0 = 0; q is positive."""
    safe = np.where(p > 0, p, 1.0)
    return (p * np.log(safe / q) - p + q).sum()


NODES = np.polynomial.legendre.leggauss(48)
TIMES = np.concatenate([[0.0], (NODES[0] + 1) / 2, [1.0]])  # of the interpolation, ends included
WEIGHTS = NODES[1] / 2


def tilts(columns, change, epsilon):
    """The tilted column distributions (times, N, M) from pi to its exponential tilt."""
    exponent = np.log(columns) + TIMES[:, None, None] * change[:, None] / epsilon
    e = np.exp(exponent - exponent.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def variances(tilted, change):
    """Variances of the change under each tilted column, (times, M)."""
    mean = np.einsum("tij,i->tj", tilted, change)
    return (tilted * (change[:, None] - mean[:, None, :]) ** 2).sum(1)


def sharpness(tilted):
    """The least beta with pi_jt(i) <= beta / N."""
    return tilted.max() * tilted.shape[1]


def uniform(size=N):
    return np.full(size, 1 / size)


# ---------------------------------------------------------------------- ours: plans from duals


def key_dual(cost, f, nu, epsilon):
    """T_K^nu(f)."""
    return key_transform(-cost, f, epsilon=epsilon, log_target=np.log(nu))


def plan_of(cost, f, g, epsilon):
    return np.asarray(weights_of(-cost, f, g, epsilon=epsilon))


def key_plan(cost, f, nu, epsilon):
    """C_nu(f; C)."""
    return plan_of(cost, f, key_dual(cost, f, nu, epsilon), epsilon)


def two_sided_duals(cost, f, mu, nu, epsilon):
    """g0, f+ and g+."""
    g0 = key_dual(cost, f, nu, epsilon)
    f_plus = query_transform(-cost, g0, epsilon=epsilon, log_target=np.log(mu))
    return g0, f_plus, key_dual(cost, np.asarray(f_plus), nu, epsilon)


def two_sided(cost, f, mu, nu, epsilon):
    """R^f and the column-ending plan."""
    g0, f_plus, g_plus = two_sided_duals(cost, f, mu, nu, epsilon)
    return plan_of(cost, f_plus, g0, epsilon), plan_of(cost, f_plus, g_plus, epsilon)


def kl(p, q):
    """KL(p || q) of plans, by the library's metric."""
    return float(plan_kl(len(p) * q, len(p) * p))


# --------------------------------------------------------------------- row/column-shift invariance


@jax.jit
def converged_duals(scores, mu, nu):
    """Five hundred rounds of the two transforms at epsilon 1."""

    def sweep(_, f):
        g = aj.key_ctransform(scores, f, log_target=jnp.log(nu))
        return aj.query_ctransform(scores, g, log_target=jnp.log(mu))

    f = jax.lax.fori_loop(0, 500, sweep, jnp.zeros(scores.shape[0]))
    return f, aj.key_ctransform(scores, f, log_target=jnp.log(nu))


def converged(cost, mu, nu):
    return plan_of(cost, *converged_duals(-cost, mu, nu), 1.0)


@hypothesis.given(
    cost=arrays(N, N, bound=1.5), a=arrays(N), b=arrays(N), mu=marginals(), nu=marginals()
)
def test_shift_invariance(cost, a, b, mu, nu):
    import ot

    plan = converged(cost, mu, nu)
    moved = converged(cost + a[:, None] + b, mu, nu)
    np.testing.assert_allclose(moved, plan, atol=1e-11)
    settings = dict(reg=1.0, method="sinkhorn_log", stopThr=1e-13, numItermax=10_000)
    np.testing.assert_allclose(plan, ot.sinkhorn(mu, nu, cost, **settings), atol=1e-10)


@hypothesis.given(seed=seeds)
def test_shift_invariance_makes_scores_and_squared_distances_one_problem(seed):
    import ot

    q, k, _ = tokens(seed, heads=1, size=0.8)
    spec = aj.SinkhornSpec(num_steps=1000)
    _, a = aj.sinkhorn_attention(q, k, k, spec=spec, return_weights=True)
    cost = reference.quadratic_cost(q[0, :, 0], k[0, :, 0])
    settings = dict(reg=1.0, method="sinkhorn_log", stopThr=1e-13, numItermax=10_000)
    plan = ot.sinkhorn(uniform(), uniform(), cost, **settings)
    np.testing.assert_allclose(a[0, 0] / N, plan, atol=1e-10)


@hypothesis.given(cost=arrays(N, N), a=arrays(N), b=arrays(N))
def test_shift_invariance_of_a_finite_budget_is_in_the_rows_only(cost, a, b):
    """The first step normalises rows; what the columns were shifted by stays."""
    hypothesis.assume(np.ptp(b) > 0.1)
    spec = aj.SinkhornSpec(num_steps=1)
    duals = lambda cost: aj.sinkhorn_duals(-cost, spec=spec)
    plan = lambda cost: plan_of(cost, duals(cost).query, duals(cost).key, 1.0)
    np.testing.assert_allclose(plan(cost + a[:, None]), plan(cost), atol=1e-12)
    assert np.abs(plan(cost + b) - plan(cost)).max() > 1e-6


# --------------------------------------------------------------------- one-dimensional potential


@hypothesis.given(a=arrays(8), b=arrays(8), offset=st.floats(-100, 100))
def test_oned_potential(a, b, offset):
    """Feasible, tight on the sorted matching, and of no duality gap."""
    source, target = (x + offset for x in (a, b))
    f = np.asarray(potentials(source[:, None], target[:, None], LINE, scale=1.0))[:, 0]
    # The conjugate of the convex phi = a^2 / 2 - f, whose slopes are keys, is attained at a knot.
    phi = a**2 / 2 - f
    h = b**2 / 2 - (a[:, None] * b - phi[:, None]).max(0)
    cost = (a[:, None] - b) ** 2 / 2
    assert (f[:, None] + h - cost).max() <= 1e-10
    order = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    np.testing.assert_allclose(f[order[0]] + h[order[1]], cost[order], atol=1e-10)
    rows, columns = scipy.optimize.linear_sum_assignment(cost)
    np.testing.assert_allclose(f.mean() + h.mean(), cost[rows, columns].mean(), atol=1e-10)


@hypothesis.given(a=arrays(8), b=arrays(8))
def test_oned_potential_is_the_formula_of_the_paper(a, b):
    f = np.asarray(potentials(a[:, None], b[:, None], LINE, scale=1.0))[:, 0]
    np.testing.assert_allclose(f, reference.square_potential(a, b), atol=1e-11)
    for value in np.unique(a):
        assert np.ptp(f[a == value]) <= 1e-12  # ties get one value


# ------------------------------------------------------------------------ one-sided c-transform


@hypothesis.given(
    cost=arrays(N, 4), f=arrays(N), nu=marginals(4), shift=st.floats(-50, 50), epsilon=epsilons
)
def test_one_marginal(cost, f, nu, shift, epsilon):
    g = key_dual(cost, f, nu, epsilon)
    formula = epsilon * np.log(nu) - epsilon * np.log(np.exp((f[:, None] - cost) / epsilon).sum(0))
    np.testing.assert_allclose(g, formula, atol=1e-11)
    plan = plan_of(cost, f, g, epsilon)
    np.testing.assert_allclose(plan.sum(0), nu, rtol=1e-12)
    moved = key_dual(cost, f + shift, nu, epsilon)
    np.testing.assert_allclose(moved, g - shift, atol=1e-11)
    np.testing.assert_allclose(plan_of(cost, f + shift, moved, epsilon), plan, rtol=1e-10)


@hypothesis.given(cost=arrays(N, N), f=arrays(N), epsilon=epsilons)
def test_one_marginal_times_n_is_a_columnwise_softmax(cost, f, epsilon):
    exponent = np.exp((f[:, None] - cost) / epsilon)
    softmax = exponent / exponent.sum(0)
    plan = key_plan(cost, f, uniform(), epsilon)
    np.testing.assert_allclose(N * plan, softmax, rtol=1e-11)


@hypothesis.given(seed=seeds, omega=arrays(SLICES))
def test_one_marginal_of_the_compiled_layer_is_a_columnwise_softmax(seed, omega):
    q, k, v = tokens(seed)
    out, a = attend(q, k, v, omega, closures="one_sided")
    for head in range(HEADS):
        e = np.exp(predicted(q, k, omega, head)[:, None] - head_cost(q, k, head))
        np.testing.assert_allclose(a[head], e / e.sum(0), atol=1e-11)
        np.testing.assert_allclose(out[:, head], e / e.sum(0) @ v[0, :, head], atol=1e-10)


# ------------------------------------------------------------------------------- the layer itself


def attend(q, k, v, omega, *, num_steps=4, closures="two_sided"):
    """Output (N, heads, width) and weights (heads, N, N) of the compiled layer."""
    out, a = compiled(
        q,
        k,
        v,
        predictor=aj.Predictor(directions=BANK, coefficients=omega),
        spec=aj.SinkhornSpec(num_steps=num_steps),
        closures=closures,
        return_weights=True,
    )
    return np.asarray(out[0]), np.asarray(a[0])


def head_cost(q, k, head):
    return reference.quadratic_cost(q[0, :, head], k[0, :, head])


def predicted(q, k, omega, head):
    """The dual of one head in cost coordinates, by the loops of the reference."""
    return reference.predicted_dual(q[0, :, head], k[0, :, head], BANK, omega)


ENDINGS = {"one_sided": (4, 1), "row": (3, 2), "column": (4, 3)}  # steps of the teacher, closures


def layer(q, k, v, omega, ending):
    """The compiled layer with one of its endings."""
    closures = "one_sided" if ending == "one_sided" else "two_sided"
    return attend(q, k, v, omega, num_steps=ENDINGS[ending][0], closures=closures)


# ------------------------------------------------------------------------------- identifiability


@hypothesis.given(
    cost=arrays(N, N), f=arrays(N), change=arrays(N), nu=marginals(), epsilon=epsilons
)
def test_source_dual_identifiability(cost, f, change, nu, epsilon):
    """Plans are as different as the duals are up to a constant: equal if and only if those are."""
    plan, other = (key_plan(cost, x, nu, epsilon) for x in (f, f + change))
    ratio = np.log(other) - np.log(plan)
    # Within a column the log-ratio is the change over epsilon, up to a constant.
    np.testing.assert_allclose(np.ptp(ratio, axis=0), np.ptp(change) / epsilon, atol=1e-10)
    assert np.abs(ratio).max() >= np.ptp(change) / (2 * epsilon) - 1e-10
    constant = key_plan(cost, f + change[0], nu, epsilon)
    np.testing.assert_allclose(constant, plan, rtol=1e-10)


@hypothesis.given(cost=arrays(N, N), f=arrays(N), nu=marginals(), epsilon=epsilons)
def test_source_dual_identifiability_of_the_centred_dual(cost, f, nu, epsilon):
    """The plan determines it: every column gives it back."""
    plan = key_plan(cost, f, nu, epsilon)
    for j in range(N):
        back = epsilon * np.log(plan[:, j]) + cost[:, j]
        np.testing.assert_allclose(back - back.mean(), f - f.mean(), atol=1e-10)


# -------------------------------------------------------------------------------- key projection


@hypothesis.given(
    cost=arrays(N, N), f=arrays(N), nu=marginals(), other=arrays(N, N), epsilon=epsilons
)
def test_key_projection(cost, f, nu, other, epsilon):
    """No other member of K_nu is closer to R^f: by exactly its divergence from the plan."""
    plan = key_plan(cost, f, nu, epsilon)
    kernel = np.exp((f[:, None] - cost) / epsilon)
    least, rounding = divergence(plan, kernel), 1e-14 * (1 + kernel.sum())
    members = [
        np.maximum(other, 0.0) + (other.max(0) <= 0),  # zeros included
        plan * (1 + 1e-3 * other),  # close to the plan
        np.eye(N)[np.argmax(other, 0)].T,  # a vertex
        np.ones((N, N)),
    ]
    for columns in members:
        member = nu * columns / columns.sum(0)
        apart = divergence(member, plan)
        gain = divergence(member, kernel) - least
        np.testing.assert_allclose(gain, apart, rtol=1e-9, atol=rounding)
        # Which is positive for any other member, so the minimiser is unique.
        assert gain >= np.abs(member - plan).sum() ** 2 / 2 - rounding


# ------------------------------------------------------------------------ two-sided c-transform


@hypothesis.given(
    cost=arrays(N, N),
    f=arrays(N),
    mu=marginals(),
    nu=marginals(),
    shift=st.floats(-50, 50),
    epsilon=epsilons,
)
def test_two_sided_transform(cost, f, mu, nu, shift, epsilon):
    middle, final = two_sided(cost, f, mu, nu, epsilon)
    np.testing.assert_allclose(middle.sum(1), mu, rtol=1e-12)
    np.testing.assert_allclose(final.sum(0), nu, rtol=1e-12)
    np.testing.assert_allclose(middle, closed(cost, f, nu, epsilon, 2, mu), rtol=1e-9)
    np.testing.assert_allclose(final, closed(cost, f, nu, epsilon, 3, mu), rtol=1e-9)
    for moved, plan in zip(
        two_sided(cost, f + shift, mu, nu, epsilon), (middle, final), strict=True
    ):
        np.testing.assert_allclose(moved, plan, rtol=1e-9)


@pytest.mark.parametrize("ending", ENDINGS)
@hypothesis.given(seed=seeds, omega=arrays(SLICES))
def test_two_sided_transform_is_what_the_layer_returns(ending, seed, omega):
    """R^f for a teacher that ends on rows, the column-ending plan for one that ends on columns."""
    q, k, v = tokens(seed)
    _, a = layer(q, k, v, omega, ending)
    for head in range(HEADS):
        f, cost = predicted(q, k, omega, head), head_cost(q, k, head)
        plan = closed(cost, f, uniform(), 1.0, ENDINGS[ending][1], uniform())
        np.testing.assert_allclose(a[head] / N, plan, atol=1e-11)


@hypothesis.given(cost=arrays(N, N), f=arrays(N), mu=marginals(), nu=marginals(), epsilon=epsilons)
def test_two_sided_row_error(cost, f, mu, nu, epsilon):
    middle, final = two_sided(cost, f, mu, nu, epsilon)
    exact = [closed(cost, f, nu, epsilon, times, mu) for times in (2, 3)]
    g0 = epsilon * np.log(nu / np.exp((f[:, None] - cost) / epsilon).sum(0))
    g_plus = g0 + epsilon * np.log(nu / exact[0].sum(0))
    bound = np.expm1(np.abs(g_plus - g0).max() / epsilon)
    gap = np.abs(final - middle).sum()
    np.testing.assert_allclose(gap, np.abs(exact[1] - exact[0]).sum(), atol=1e-11)
    rows = np.abs(final.sum(1) - mu).sum()
    assert rows <= gap + 1e-12
    assert gap <= bound + 1e-12


@hypothesis.given(cost=arrays(N, N), f=arrays(N), epsilon=epsilons)
def test_two_sided_row_error_as_it_is_reported(cost, f, epsilon):
    """The metric on attention scale is the same number for uniform marginals."""
    g0, _, g_plus = two_sided_duals(cost, f, uniform(), uniform(), epsilon)
    _, final = two_sided(cost, f, uniform(), uniform(), epsilon)
    exact = closed(cost, f, uniform(), epsilon, 3, uniform())
    rows = float(aj.metrics.row_error(N * final))
    np.testing.assert_allclose(rows, np.abs(exact.sum(1) - 1 / N).sum(), atol=1e-11)
    assert rows <= np.expm1(np.abs(np.asarray(g_plus - g0)).max() / epsilon) + 1e-12


# ----------------------------------------------------------------------------------- stability


def within(ratio, alpha, epsilon):
    """Whether every plan ratio is within exp of plus and minus twice alpha over epsilon."""
    return np.abs(np.log(ratio)).max() <= 2 * alpha / epsilon + 1e-10


@hypothesis.given(
    cost=arrays(N, N), f=arrays(N), change=arrays(N), nu=marginals(), epsilon=epsilons
)
def test_dual_stability(cost, f, change, nu, epsilon):
    alpha = np.abs(change).max()
    g, moved = (np.asarray(key_dual(cost, x, nu, epsilon)) for x in (f, f + change))
    assert np.abs(moved - g).max() <= alpha + 1e-11
    ratio = plan_of(cost, f + change, moved, epsilon) / plan_of(cost, f, g, epsilon)
    assert within(ratio, alpha, epsilon)
    exact = gibbs(cost, f + change, nu, epsilon) / gibbs(cost, f, nu, epsilon)
    np.testing.assert_allclose(ratio, exact, rtol=1e-10)
    assert within(ratio, np.ptp(change) / 2, epsilon)  # the infimum over shifts


def test_dual_stability_is_sharp():
    """Two queries moved apart, one key that sees one of them: the ratio comes up to the bound."""
    alpha, cost = 0.3, np.array([[0.0], [40.0]])
    f, change = np.zeros(2), np.array([-alpha, alpha])
    ratio = key_plan(cost, f + change, np.ones(1), 1.0) / key_plan(cost, f, np.ones(1), 1.0)
    np.testing.assert_allclose(ratio[1], np.exp(2 * alpha), rtol=1e-10)
    g = key_dual(cost, f + change, np.ones(1), 1.0) - key_dual(cost, f, np.ones(1), 1.0)
    np.testing.assert_allclose(np.abs(g), alpha, rtol=1e-10)


@hypothesis.given(
    cost=arrays(N, N),
    f=arrays(N),
    change=arrays(N),
    mu=marginals(),
    nu=marginals(),
    epsilon=epsilons,
)
def test_two_sided_stability(cost, f, change, mu, nu, epsilon):
    alpha = np.abs(change).max()
    before = two_sided_duals(cost, f, mu, nu, epsilon)
    after = two_sided_duals(cost, f + change, mu, nu, epsilon)
    for old, new in zip(before, after, strict=True):
        assert np.abs(np.asarray(new - old)).max() <= alpha + 1e-11
    plans, moved = (two_sided(cost, x, mu, nu, epsilon) for x in (f, f + change))
    for times, plan, new in zip((2, 3), plans, moved, strict=True):
        exact = [closed(cost, x, nu, epsilon, times, mu) for x in (f, f + change)]
        np.testing.assert_allclose(new / plan, exact[1] / exact[0], rtol=1e-8)
        assert within(new / plan, alpha, epsilon)
        assert within(new / plan, np.ptp(change) / 2, epsilon)  # the infimum over shifts


@pytest.mark.parametrize("ending", ENDINGS)
@hypothesis.given(seed=seeds, omega=arrays(SLICES), change=arrays(SLICES, bound=0.5))
def test_two_sided_stability_of_the_layer(ending, seed, omega, change):
    q, k, v = tokens(seed)
    _, a = layer(q, k, v, omega, ending)
    _, moved = layer(q, k, v, omega + change, ending)
    for head in range(HEADS):
        alpha = np.ptp(predicted(q, k, change, head)) / 2
        assert within(moved[head] / a[head], alpha, 1.0)


# ------------------------------------------------------------------------------------ plan KL

problem = dict(cost=arrays(N, N), f=arrays(N), change=arrays(N), nu=marginals(), epsilon=epsilons)


@hypothesis.given(**problem)
def test_kl_stability_identities(cost, f, change, nu, epsilon):
    """Both divergences as integrals of tilted variances."""
    plan, other = (key_plan(cost, x, nu, epsilon) for x in (f, f + change))
    tilted = tilts(gibbs(cost, f, nu, epsilon) / nu, change, epsilon)
    spread = variances(tilted, change)[1:-1] / epsilon**2
    times = TIMES[1:-1, None]
    reverse = (nu * (WEIGHTS[:, None] * times * spread).sum(0)).sum()
    forward = (nu * (WEIGHTS[:, None] * (1 - times) * spread).sum(0)).sum()
    np.testing.assert_allclose(kl(other, plan), reverse, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(kl(plan, other), forward, rtol=1e-7, atol=1e-12)


@hypothesis.given(**problem)
def test_kl_stability_bounds(cost, f, change, nu, epsilon):
    plan, other = (key_plan(cost, x, nu, epsilon) for x in (f, f + change))
    tilted = tilts(gibbs(cost, f, nu, epsilon) / nu, change, epsilon)
    ceiling = variances(tilted, change).max(0)
    by_variance = (nu * ceiling).sum() / (2 * epsilon**2)
    by_norm = sharpness(tilted) / (2 * epsilon**2 * N) * (change**2).sum()
    by_spread = np.ptp(change) ** 2 / (8 * epsilon**2)  # no variance exceeds a quarter of that
    for found in (kl(plan, other), kl(other, plan)):
        assert found <= by_variance * (1 + 1e-7) + 1e-12
        assert found <= by_norm * (1 + 1e-7) + 1e-12
        assert found <= by_spread + 1e-12


# --------------------------------------------------------------------------- KL stationarity

EXAMPLES = 3


def fit_problem(seed, epsilon):
    """Features, centred targets and costs of a few examples, and their plans by NumPy."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, EXAMPLES, N, DIM))
    cost = reference.quadratic_cost(q, k)
    x = np.stack([reference.sliced_features(a, b, BANK) for a, b in zip(q, k, strict=True)])
    y = x @ rng.normal(size=SLICES) + 0.5 * rng.normal(size=(EXAMPLES, N))
    y = y - y.mean(-1, keepdims=True)
    plans = np.stack([gibbs(c, f, uniform(), epsilon) for c, f in zip(cost, y, strict=True)])
    return x, y, cost, plans


STATIC = ("epsilon", "ridge")
kl_value = jax.jit(aj.kl_objective, static_argnames=STATIC)
kl_gradient = jax.jit(jax.grad(aj.kl_objective), static_argnames=STATIC)
kl_hessian = jax.jit(jax.hessian(aj.kl_objective), static_argnames=STATIC)
RIDGE = 0.1


def objective_arguments(x, y, cost):
    """The library's arguments: scores and a shift of the queries that make up -C."""
    shift = 1.0 + np.abs(y)
    return x, y, shift[..., None] - cost, shift


@hypothesis.given(seed=seeds, omega=arrays(SLICES), epsilon=epsilons)
def test_asap_kl_stationarity_derivatives(seed, omega, epsilon):
    x, y, cost, plans = fit_problem(seed, epsilon)
    arguments = objective_arguments(x, y, cost)
    gradient, hessian = RIDGE * omega, RIDGE * np.eye(SLICES)
    for m in range(EXAMPLES):
        plan = gibbs(cost[m], x[m] @ omega, uniform(), epsilon)
        gradient = gradient + x[m].T @ (plan.sum(1) - plans[m].sum(1))
        curvature = np.zeros((N, N))
        for column in (plan * N).T:
            curvature += (np.diag(column) - np.outer(column, column)) / N / epsilon
        hessian = hessian + x[m].T @ curvature @ x[m]
    ours = kl_gradient(omega, *arguments, epsilon=epsilon, ridge=RIDGE)
    np.testing.assert_allclose(ours, gradient, atol=1e-11)
    ours = np.asarray(kl_hessian(omega, *arguments, epsilon=epsilon, ridge=RIDGE))
    np.testing.assert_allclose(ours, hessian, atol=1e-10)
    assert np.linalg.eigvalsh(ours).min() >= RIDGE - 1e-10


@hypothesis.given(seed=seeds, others=arrays(5, SLICES), epsilon=epsilons)
@hypothesis.settings(max_examples=15)
def test_asap_kl_stationarity_at_the_minimiser(seed, others, epsilon):
    x, y, cost, plans = fit_problem(seed, epsilon)
    arguments = objective_arguments(x, y, cost)
    fit = aj.fit_kl(*arguments, epsilon=epsilon, ridge=RIDGE)
    best = np.asarray(fit.coefficients)

    def mismatch(omega):
        """sum_m X_m' (P_hat 1 - r)."""
        plan = [gibbs(c, f, uniform(), epsilon) for c, f in zip(cost, x @ omega, strict=True)]
        return np.einsum("mnf,mn->f", x, (np.stack(plan) - plans).sum(-1))

    distance = np.linalg.norm(mismatch(best) + RIDGE * best)
    assert distance <= 1e-8 * np.linalg.norm(mismatch(0 * best))
    least = kl_value(best, *arguments, epsilon=epsilon, ridge=RIDGE)
    for other in others:  # strong convexity
        value = kl_value(other, *arguments, epsilon=epsilon, ridge=RIDGE)
        assert value >= least + RIDGE / 2 * ((other - best) ** 2).sum() - 1e-7


# -------------------------------------------------------------------------- LS and KL surrogates


def risk(x, y, omega):
    """The mean of the squared errors, |.|_N^2 averaged over examples."""
    return ((x @ omega - y) ** 2).mean()


def mean_reverse_kl(x, cost, omega, plans, epsilon):
    """Of the library's plans from the predicted duals to the teachers', over examples."""
    found = [key_plan(c, f, uniform(), epsilon) for c, f in zip(cost, x @ omega, strict=True)]
    return np.mean([kl(p_hat, p) for p_hat, p in zip(found, plans, strict=True)])


def common_sharpness(x, y, omega, plans, epsilon):
    """One beta for all pairs of plans."""
    return max(
        sharpness(tilts(N * p, f - target, epsilon))
        for p, f, target in zip(plans, x @ omega, y, strict=True)
    )


@hypothesis.given(seed=seeds, omega=arrays(SLICES), epsilon=epsilons)
def test_ls_kl_surrogate(seed, omega, epsilon):
    x, y, cost, plans = fit_problem(seed, epsilon)
    fitted = np.asarray(aj.fit_ls(x, y, ridge=1e-3).coefficients)
    for w in (omega, fitted):
        bound = common_sharpness(x, y, w, plans, epsilon) / (2 * epsilon**2) * risk(x, y, w)
        assert mean_reverse_kl(x, cost, w, plans, epsilon) <= bound * (1 + 1e-7) + 1e-12
    assert risk(x, y, fitted) <= risk(x, y, omega) + 1e-3 * (omega**2).sum() / y.size + 1e-12


# ----------------------------------------------------------------------------- random features

POOL = 64  # directions that sigma draws from, uniformly


def oracle_problem(seed):
    """Examples whose duals are an average of slices of the pool plus a remainder.

    Returns the library's features of the whole pool (EXAMPLES, N, POOL), costs, amplitudes a,
    targets y, and the constants A^2, B^2 and eta^2 of the assumption.
    """
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, EXAMPLES, N, DIM))
    pool = rng.normal(size=(POOL, DIM))
    x = np.asarray(potentials(q, k, pool))
    a = 2 * rng.normal(size=POOL) + rng.normal()
    remainder = 0.1 * rng.normal(size=(EXAMPLES, N))
    remainder = remainder - remainder.mean(-1, keepdims=True)
    y = x @ a / POOL + remainder
    constants = (a**2).mean(), (x**2).mean(1).max(), (remainder**2).mean()
    return rng, x, reference.quadratic_cost(q, k), a, y, constants


@hypothesis.given(seed=seeds)
@hypothesis.settings(max_examples=10)
def test_rf_oracle(seed):
    """The mean risk is within the bound, and what exceeds the remainder falls like 1 / L."""
    rng, x, _, a, y, (a2, b2, eta2) = oracle_problem(seed)
    one_slice = ((x * a - (x @ a / POOL)[..., None]) ** 2).mean((0, 1)).mean()  # E |a phi - h|^2
    for num_slices in (4, 16, 64):
        draws = rng.integers(0, POOL, size=(4000, num_slices))
        predicted = np.einsum("mnsl,sl->smn", x[..., draws], a[draws] / num_slices)
        found = ((predicted - y) ** 2).mean((1, 2)).mean()
        assert found <= eta2 + a2 * b2 / num_slices
        np.testing.assert_allclose(num_slices * (found - eta2), one_slice, rtol=0.2)


def test_rf_oracle_features_are_those_of_the_slices_drawn():
    """A column depends on its own direction only, so drawing slices is drawing columns."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, EXAMPLES, N, DIM))
    pool = rng.normal(size=(POOL, DIM))
    draw = rng.integers(0, POOL, size=16)
    whole = potentials(q, k, pool)
    np.testing.assert_allclose(potentials(q, k, pool[draw]), whole[..., draw], atol=1e-12)
    formula = [reference.sliced_features(a, b, pool) for a, b in zip(q, k, strict=True)]
    np.testing.assert_allclose(whole, np.stack(formula), atol=1e-11)


@hypothesis.given(seed=seeds, epsilon=epsilons)
@hypothesis.settings(max_examples=5)
def test_rf_oracle_plan_kl(seed, epsilon):
    rng, x, cost, a, y, (a2, b2, eta2) = oracle_problem(seed)
    plans = np.stack([gibbs(c, f, uniform(), epsilon) for c, f in zip(cost, y, strict=True)])
    for num_slices in (4, 16):
        found, beta = [], 0.0
        for draw in rng.integers(0, POOL, size=(20, num_slices)):
            columns, omega = x[..., draw], a[draw] / num_slices
            beta = max(beta, common_sharpness(columns, y, omega, plans, epsilon))
            found.append(mean_reverse_kl(columns, cost, omega, plans, epsilon))
        bound = beta / (2 * epsilon**2) * (eta2 + a2 * b2 / num_slices)
        assert np.mean(found) <= bound


@hypothesis.given(seed=seeds, comparators=arrays(4, SLICES), risk_ridge=st.floats(0, 1))
def test_ls_empirical_oracle(seed, comparators, risk_ridge):
    """Unnormalised, the ridge is M N times that of the risk."""
    x, y, _, _ = fit_problem(seed, 1.0)
    fitted = np.asarray(aj.fit_ls(x, y, ridge=EXAMPLES * N * risk_ridge).coefficients)
    exact = np.linalg.lstsq(
        np.concatenate([x.reshape(-1, SLICES), np.sqrt(y.size * risk_ridge) * np.eye(SLICES)]),
        np.concatenate([y.ravel(), np.zeros(SLICES)]),
        rcond=None,
    )[0]
    penalised = lambda w: risk(x, y, w) + risk_ridge * (w**2).sum()
    assert penalised(fitted) <= penalised(exact) + 1e-12
    for other in (*comparators, exact + 1e-3 * comparators[0], np.zeros(SLICES)):
        assert penalised(fitted) <= penalised(other) + 1e-12
        assert risk(x, y, fitted) <= penalised(other) + 1e-12


@functools.partial(jax.jit, static_argnames="ridge")
def fits(columns, y, ridge):
    """The least-squares fit of every draw of slices."""
    return jax.vmap(lambda x: aj.fit_ls(x, y, ridge=ridge).coefficients)(columns)


@hypothesis.given(seed=seeds)
@hypothesis.settings(max_examples=10)
def test_ls_empirical_oracle_over_slice_draws(seed):
    rng, x, cost, a, y, (a2, b2, eta2) = oracle_problem(seed)
    risk_ridge, epsilon = 0.01, 1.0
    plans = np.stack([gibbs(c, f, uniform(), epsilon) for c, f in zip(cost, y, strict=True)])
    for num_slices in (4, 16):
        draws = rng.integers(0, POOL, size=(200, num_slices))
        columns = np.moveaxis(x[..., draws], 2, 0)
        fitted = np.asarray(fits(columns, y, y.size * risk_ridge))
        risks = [risk(c, y, w) for c, w in zip(columns, fitted, strict=True)]
        for c, draw, found in zip(columns, draws, risks, strict=True):
            oracle = a[draw] / num_slices
            assert found <= risk(c, y, oracle) + risk_ridge * (oracle**2).sum() + 1e-12
        bound = eta2 + a2 * b2 / num_slices + risk_ridge * a2 / num_slices
        assert np.mean(risks) <= bound
        some = list(zip(columns, fitted, strict=True))[:10]
        beta = max(common_sharpness(c, y, w, plans, epsilon) for c, w in some)
        found = [mean_reverse_kl(c, cost, w, plans, epsilon) for c, w in some]
        assert np.mean(found) <= beta / (2 * epsilon**2) * bound


# ---------------------------------------------------------------------- row error and the output


@hypothesis.given(**problem)
def test_row_error(cost, f, change, nu, epsilon):
    plan, other = (key_plan(cost, x, nu, epsilon) for x in (f, f + change))
    exact = [gibbs(cost, x, nu, epsilon) for x in (f, f + change)]
    rho = [np.abs(p.sum(1) - 1 / N).sum() for p in exact]
    for p, expected in zip((plan, other), rho, strict=True):
        np.testing.assert_allclose(aj.metrics.row_error(N * p), expected, atol=1e-11)
    gap = np.abs(other - plan).sum()
    assert float(aj.metrics.row_error(N * other)) <= rho[0] + gap + 1e-11
    assert gap <= np.sqrt(2 * max(kl(other, plan), 0.0)) + 1e-7


@pytest.mark.parametrize("ending", ENDINGS)
@hypothesis.given(seed=seeds, omega=arrays(SLICES), change=arrays(SLICES, bound=0.5))
def test_attention_output_stability(ending, seed, omega, change):
    q, k, v = tokens(seed)
    out, _ = layer(q, k, v, omega, ending)
    moved, _ = layer(q, k, v, omega + change, ending)
    for head in range(HEADS):
        cost, values = head_cost(q, k, head), v[0, :, head]
        duals = (predicted(q, k, w, head) for w in (omega, omega + change))
        times = ENDINGS[ending][1]
        before, after = (closed(cost, f, uniform(), 1.0, times, uniform()) for f in duals)
        alpha = np.abs(predicted(q, k, change, head)).max()
        size = np.linalg.norm(values, axis=-1).max()
        distance = np.linalg.norm(moved[:, head] - out[:, head], axis=-1)
        first = N * size * np.abs(after - before).sum(1)
        second = N * size * np.expm1(2 * alpha) * before.sum(1)
        assert (distance <= first + 1e-10).all()
        assert (first <= second + 1e-10).all()
        if ending == "row":  # the reference plan has row mass 1 / N
            assert (distance <= size * np.expm1(2 * alpha) + 1e-10).all()


# ---------------------------------------------------------------------- permutation equivariance

token_grids = arrays(2, 1, N, HEADS, DIM).map(lambda x: np.round(2 * x) / 2)  # with ties
orders = st.permutations(range(N)).map(np.array)


@hypothesis.given(seed=seeds, omega=arrays(SLICES), order=orders)
def test_permutation_equivariance(seed, omega, order):
    """Of features, dual, plan and output."""
    q, k, v = tokens(seed)
    moved_q, moved_k, moved_v = (x[:, order] for x in (q, k, v))
    heads = lambda x: np.swapaxes(x, 1, 2)
    features = np.asarray(potentials(heads(q), heads(k), BANK))
    moved = np.asarray(potentials(heads(moved_q), heads(moved_k), BANK))
    np.testing.assert_allclose(moved, features[:, :, order], atol=1e-11)
    predictor = aj.Predictor(directions=BANK, coefficients=omega)
    dual = np.asarray(aj.predict(predictor, heads(q), heads(k)))
    moved = np.asarray(aj.predict(predictor, heads(moved_q), heads(moved_k)))
    np.testing.assert_allclose(moved, dual[..., order], atol=1e-11)
    for ending in ENDINGS:
        out, a = layer(q, k, v, omega, ending)
        moved_out, moved_a = layer(moved_q, moved_k, moved_v, omega, ending)
        np.testing.assert_allclose(moved_a, a[:, order][:, :, order], atol=1e-11)
        np.testing.assert_allclose(moved_out, out[order], atol=1e-10)


@hypothesis.given(grid=token_grids, order=orders)
def test_permutation_equivariance_with_ties(grid, order):
    """Equal projections get equal potentials, so no tie rule is needed."""
    q, k = np.swapaxes(grid, 2, 3)
    axes = np.eye(DIM)  # along which the grid collides
    features = np.asarray(potentials(q, k, axes))
    moved = np.asarray(potentials(q[:, :, order], k[:, :, order], axes))
    np.testing.assert_allclose(moved, features[:, :, order], atol=1e-11)
    formula = reference.sliced_features(q[0, 0], k[0, 0], axes)
    np.testing.assert_allclose(features[0, 0], formula, atol=1e-11)


# -------------------------------------------------------------------------- masked key transform

key_sets = hypothesis.extra.numpy.arrays(np.bool_, (N,))


@hypothesis.given(cost=arrays(N, N), f=arrays(N), active=key_sets, epsilon=epsilons)
def test_masked_key_transform(cost, f, active, epsilon):
    mask = active[None, :]
    g = key_transform(-cost, f, epsilon=epsilon, log_target=np.log(1 / N), mask=mask)
    formula = -epsilon * np.log(N) - epsilon * np.log(np.exp((f[:, None] - cost) / epsilon).sum(0))
    np.testing.assert_allclose(np.asarray(g)[active], formula[active], atol=1e-11)
    plan = np.asarray(weights_of(-cost, f, g, epsilon=epsilon, mask=mask))
    np.testing.assert_allclose(plan.sum(0)[active], 1 / N, rtol=1e-11)
    assert (plan[:, ~active] == 0).all()
    np.testing.assert_allclose(plan.sum(), active.sum() / N, rtol=1e-11)


@hypothesis.given(seed=seeds, omega=arrays(SLICES), active=key_sets)
def test_masked_key_transform_of_the_layer(seed, omega, active):
    """Padded keys out, all queries in: columns of one on attention scale, and the total |J|."""
    hypothesis.assume(active.any())
    q, k, v = tokens(seed)
    _, a = compiled(
        q,
        k,
        v,
        mask=active[None, None, None, :],
        predictor=aj.Predictor(directions=BANK, coefficients=omega),
        spec=aj.SinkhornSpec(num_steps=4, key_mass="unit"),
        closures="one_sided",
        return_weights=True,
    )
    for head in range(HEADS):
        found = np.asarray(a[0, head])
        own, keys = q[0, :, head], k[0, :, head]
        f = reference.predicted_dual(own, keys, BANK, omega, query_valid=active, key_valid=active)
        plan = gibbs(head_cost(q, k, head), f, active / N, 1.0)
        np.testing.assert_allclose(found / N, plan, atol=1e-11)
        np.testing.assert_allclose(found.sum(0), active, atol=1e-11)
        assert (found[:, ~active] == 0).all()
        np.testing.assert_allclose(found.sum(), active.sum(), rtol=1e-11)
