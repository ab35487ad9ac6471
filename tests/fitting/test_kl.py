"""The convex plan-KL fit: the objective, the minimiser, its report, and both ways to drive it."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
import reference

import asap_jax as aj
from asap_jax.fitting import kl_objective, kl_search

RIDGE = 1e-3
BATCH, HEADS, LENGTH, DIM = 4, 2, 16, 8  # of a layer's activations
BANK = aj.slice_directions(0, 12, DIM)

STATIC = ("epsilon", "ridge", "key_mass")


@functools.partial(jax.jit, static_argnames=STATIC)
def value_and_grad(w, *data, **settings):
    return jax.value_and_grad(aj.kl_objective)(w, *data, **settings)


@functools.partial(jax.jit, static_argnames=STATIC)
def derivatives(w, *data, **settings):
    """J, its gradient and its Hessian, in one program."""
    of = lambda transform: transform(aj.kl_objective)(w, *data, **settings)
    return of(lambda objective: objective), of(jax.grad), of(jax.hessian)


@functools.partial(jax.jit, static_argnames="spec")
def data_of(q, k, bank, mask, valid, *, spec):
    """A layer's features, targets (centred over valid queries), scores and shift."""
    s, shift = aj.scores(q, k), aj.query_shift(q)
    target = aj.sinkhorn_duals(s, spec=spec, mask=mask).source + shift
    keep = jnp.ones_like(target)
    if valid is not None:
        keep = jnp.broadcast_to(valid, target.shape).astype(target.dtype)
    target = target - (target * keep).sum(-1, keepdims=True) / keep.sum(-1, keepdims=True)
    x = aj.sliced_potentials(q, k, bank, query_valid=valid, key_valid=valid)
    return x, target, s, shift


recorded = jax.jit(
    lambda net, *inputs: net.apply(*inputs, mutable=["asap_capture"])[1], static_argnums=0
)


class Objective:
    """J of the paper less its value at the targets, and its derivatives, in float64 NumPy.

    Features (..., N, F), targets and shift (..., N), scores (..., N, M); leading axes are pooled.
    """

    def __init__(
        self,
        features,
        targets,
        scores,
        shift,
        *,
        epsilon=1.0,
        ridge=RIDGE,
        key_mass="balanced",
        mask=None,
    ):
        self.epsilon, self.ridge = epsilon, ridge
        scores, shift = np.asarray(scores, np.float64), np.asarray(shift, np.float64)
        allowed = reference.full_mask(mask, scores.shape)
        flat = lambda x, rank: np.reshape(x, (-1, *np.shape(x)[np.ndim(x) - rank :]))
        self.kernel = flat(np.where(allowed, scores - shift[..., None], -np.inf), 2)
        active = flat(allowed.any(-1), 1)
        self.x = np.where(active[..., None], flat(np.asarray(features, np.float64), 2), 0.0)
        self.y = np.where(active, flat(np.asarray(targets, np.float64), 1), 0.0)
        keys = flat(allowed.any(-2), 1)
        size = keys.sum(-1, keepdims=True) if key_mass == "balanced" else self.kernel.shape[-2]
        self.nu = keys / np.maximum(size, 1)
        self.rows = self.plan(self.y).sum(-1)

    def log_sums(self, dual):
        """Log sum_i exp((dual_i - C_ij) / eps), 0 at keys without a query."""
        sums = reference.logsumexp((self.kernel + dual[..., None]) / self.epsilon, -2)
        return np.where(self.nu > 0, sums, 0.0)

    def columns(self, dual):
        """The column conditionals pi_j(i)."""
        exponent = (self.kernel + dual[..., None]) / self.epsilon
        return np.exp(exponent - self.log_sums(dual)[..., None, :])

    def plan(self, dual):
        """The key-closed plan."""
        return self.columns(dual) * self.nu[..., None, :]

    def value(self, w):
        dual = self.x @ w
        change = self.epsilon * (self.nu * (self.log_sums(dual) - self.log_sums(self.y))).sum()
        return change - (self.rows * (dual - self.y)).sum() + self.ridge * w @ w / 2

    def gradient(self, w):
        rows = self.plan(self.x @ w).sum(-1)
        return np.einsum("pnf,pn->f", self.x, rows - self.rows) + self.ridge * w

    def hessian(self, w):
        columns = self.columns(self.x @ w)
        rows = (columns * self.nu[:, None, :]).sum(-1)
        means = np.einsum("pnm,pnf->pmf", columns, self.x)
        result = np.einsum("pnf,pn,png->fg", self.x, rows, self.x)
        result -= np.einsum("pmf,pm,pmg->fg", means, self.nu, means)
        return result / self.epsilon + self.ridge * np.eye(len(w))

    def minimum(self, w):
        """The minimiser, by Newton's method with halved steps, to where rounding stops it."""
        before = np.inf
        for _ in range(200):
            slope = self.gradient(w)
            move = -np.linalg.solve(self.hessian(w), slope)
            promised = -slope @ move
            if promised < 1e-24 or before / 4 < promised < 1e-18:
                return w
            before = promised
            step = 1.0
            while self.value(w + step * move) > self.value(w) + 1e-4 * step * slope @ move:
                step /= 2
                if step < 1e-6:
                    return w
            w = w + step * move
        raise AssertionError("Newton's method did not come to an end")


def least_squares(case):
    """The least-squares solution in float64."""
    active = np.isfinite(case.kernel).any(-1)
    return reference.ridge_fit(case.x, case.y, ridge=case.ridge, valid=active)


def norm(x):
    return float(np.linalg.norm(np.asarray(x, np.float64)))


# ----------------------------------------------------------------------------- the objective

MASKS = ["none", "padded_keys", "padded_tokens", "entries"]


def mask_of(kind, rng, shape):
    """A mask for scores of the shape (2, heads, queries, keys), or None."""
    _, _, queries, keys = shape
    valid = lambda size: np.arange(size) < np.array([[size], [max(2, size - 3)]])
    return {
        "none": lambda: None,
        "padded_keys": lambda: problems.array(valid(keys)[:, None, None, :]),
        "padded_tokens": lambda: problems.array(
            (valid(queries)[:, :, None] & valid(keys)[:, None, :])[:, None]
        ),
        "entries": lambda: problems.array(problems.random_mask(rng, *shape)),
    }[kind]()


def random_problem(rng, dtype="float64", *, num_features=4, queries=7, keys=5):
    """Any features, targets, scores and shift; two examples of three heads."""
    lead = (2, 3)
    x = problems.normal(rng, *lead, queries, num_features, dtype=dtype)
    y = problems.normal(rng, *lead, queries, dtype=dtype)
    s = problems.uniform_scores(rng, *lead, queries, keys, dtype=dtype, bound=3.0)
    shift = problems.array(rng.uniform(0, 2, size=(*lead, queries)), dtype)
    return x, y, s, shift


def coefficients(rng, num_features=4, dtype="float64"):
    return problems.normal(rng, num_features, dtype=dtype, size=0.7)


@pytest.mark.parametrize(("key_mass", "epsilon"), [("balanced", 0.5), ("unit", 1.0)])
@pytest.mark.parametrize("kind", MASKS)
def test_objective_equals_the_papers_up_to_a_constant(rng, x64, kind, key_mass, epsilon):
    arrays = random_problem(rng)
    settings = dict(epsilon=epsilon, key_mass=key_mass, mask=mask_of(kind, rng, (2, 3, 7, 5)))
    constants = []
    for _ in range(4):
        w = coefficients(rng)
        formula = reference.batched(
            lambda x, y, s, shift, mask, w=w: reference.kl_objective(
                np.asarray(w), x, y, s, shift, epsilon=epsilon, key_mass=key_mass, mask=mask
            ),
            *zip(arrays, (2, 1, 2, 1), strict=True),
            (settings["mask"], 2),
        )
        penalty = 0.3 * np.square(w).sum() / 2
        ours, gradient, hessian = derivatives(w, *arrays, ridge=0.3, **settings)
        ours = float(ours)
        constants.append(ours - formula.sum() - penalty)
        exact = Objective(*arrays, ridge=0.3, **settings)
        np.testing.assert_allclose(ours, exact.value(np.asarray(w)), rtol=1e-11)
        np.testing.assert_allclose(gradient, exact.gradient(np.asarray(w)), atol=1e-12)
        np.testing.assert_allclose(hessian, exact.hessian(np.asarray(w)), atol=1e-11)
    np.testing.assert_allclose(constants, constants[0], atol=1e-11)


def test_objective_and_gradient_vanish_at_the_teacher(rng, x64):
    """Where the features hold the target itself, less the penalty."""
    x, y, s, shift = random_problem(rng)
    x = np.concatenate([x, np.asarray(y)[..., None]], -1)
    value, gradient = value_and_grad(np.eye(5)[4], x, y, s, shift, epsilon=0.5, ridge=0.0)
    np.testing.assert_allclose(value, 0, atol=1e-14)
    np.testing.assert_allclose(gradient, np.zeros(5), atol=1e-14)


def test_objective_is_epsilon_times_the_plan_kl(rng, x64):
    x, y, s, shift = random_problem(rng)
    w = coefficients(rng)
    exact = Objective(x, y, s, shift, epsilon=0.5, ridge=0.0)
    p, p_hat = exact.plan(exact.y), exact.plan(exact.x @ np.asarray(w))
    divergence = (p * np.log(p / p_hat)).sum()
    ours, _ = value_and_grad(w, x, y, s, shift, epsilon=0.5, ridge=0.0)
    np.testing.assert_allclose(ours, 0.5 * divergence, rtol=1e-11)


def test_objective_keeps_its_digits_close_to_the_teacher_in_single_precision(rng):
    """An excess of 2e-5 next to log-sums of thirty: subtracting those would leave nothing of it."""
    x, y, s, shift = map(np.asarray, random_problem(rng, "float32"))
    s, x = s + np.float32(30.0), np.concatenate([x, y[..., None]], -1)
    w = np.append(np.float32(2e-3) * coefficients(rng, dtype="float32"), np.float32(1))
    exact = Objective(x, y, s, shift, ridge=0.0)
    value = exact.value(np.asarray(w, np.float64))
    assert 1e-5 < value < 1e-4
    kernel = s - shift[..., None]

    @jax.jit
    def subtracted(dual, y, rows):
        log_sums = [jax.nn.logsumexp(kernel + f[..., None], -2).mean(-1) for f in (dual, y)]
        return jnp.sum(log_sums[0] - log_sums[1]) - jnp.sum(rows * (dual - y))

    naive = subtracted(x @ w, y, exact.rows.reshape(y.shape).astype(np.float32))
    assert abs(float(naive) - value) > 0.1 * value
    ours, _ = value_and_grad(w, x, y, s, shift, ridge=0.0)
    np.testing.assert_allclose(ours, value, rtol=0.05)


def test_objective_accepts_coefficients_per_head(rng, x64):
    arrays = [np.asarray(a) for a in random_problem(rng)]
    w = rng.normal(size=(3, 4))
    ours, _ = value_and_grad(w, *arrays, epsilon=0.5, ridge=0.3)
    apart = sum(
        Objective(*(a[:, h] for a in arrays), epsilon=0.5, ridge=0.3).value(w[h]) for h in range(3)
    )
    np.testing.assert_allclose(ours, apart, rtol=1e-11)


def with_rubbish(x, y, s, shift, mask, rubbish):
    """The data with rubbish in the masked slots."""
    mask = np.asarray(mask)
    inactive = ~np.broadcast_to(mask.any(-1), np.shape(y))
    fill = lambda where, a, value: np.where(where, np.asarray(value, np.asarray(a).dtype), a)
    return [
        (
            fill(inactive[..., None], x, value),
            fill(inactive, y, value),
            fill(~mask, s, value),
            fill(inactive, shift, value),
        )
        for value in rubbish
    ]


@pytest.mark.parametrize("kind", ["padded_keys", "padded_tokens"])
def test_objective_does_not_depend_on_masked_slots(rng, x64, kind):
    x, y, s, shift = random_problem(rng)
    mask = mask_of(kind, rng, (2, 3, 7, 5))
    w = coefficients(rng)
    clean = value_and_grad(w, x, y, s, shift, mask=mask)
    for dirty in with_rubbish(x, y, s, shift, mask, rubbish=(np.nan, np.inf, 1e30)):
        again = value_and_grad(w, *dirty, mask=mask)
        chex.assert_trees_all_close(again, clean, rtol=1e-12, atol=1e-12)


def test_an_example_without_an_active_token_adds_nothing(rng, x64):
    arrays = random_problem(rng)
    mask = problems.array(
        np.array([True, False])[:, None, None, None] & np.ones((2, 1, 7, 5), bool)
    )
    w = coefficients(rng)
    alone = value_and_grad(w, *(np.asarray(a)[:1] for a in arrays))
    both = value_and_grad(w, *arrays, mask=mask)
    chex.assert_trees_all_close(both, alone, rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------------------- the minimiser


def layer(seed, dtype="float32", *, size=1.0, epsilon=1.0, kind="none"):
    """A layer's features, targets, scores and shift, and the mask, always of one shape.

    Tokens come in clusters and the projections of queries and keys are related, as training
    leaves them; `size` sets how sharp the attention is.
    """
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(BATCH, 4, 3 * DIM))
    tokens = centres[np.arange(BATCH)[:, None], rng.integers(0, 4, size=(BATCH, LENGTH))]
    tokens = (tokens + 0.6 * rng.normal(size=tokens.shape))[:, None]
    shared, own = rng.normal(size=(2, HEADS, 3 * DIM, DIM)) / np.sqrt(3 * DIM)
    q = problems.array(size * tokens @ shared, dtype)
    k = problems.array(size * tokens @ (0.5 * shared + 0.9 * own), dtype)
    lengths = [LENGTH, LENGTH - 3, LENGTH - 7, 5]
    mask, valid = np.ones((BATCH, 1, LENGTH, LENGTH), bool), None
    if kind != "none":
        valid = (np.arange(LENGTH) < np.array(lengths)[:, None])[:, None]
        pad = problems.key_padding if kind == "padded_keys" else problems.token_padding
        mask = np.broadcast_to(pad(lengths, LENGTH), mask.shape)
    arrays = data_of(q, k, BANK, mask, valid, spec=aj.SinkhornSpec(10, epsilon))
    return tuple(map(np.asarray, arrays)), mask


LAYERS = {
    "plain": dict(size=1.0),
    "soft": dict(size=0.5),
    "sharp": dict(size=3.0),
    "small epsilon": dict(size=1.0, epsilon=0.5),
    "padded keys": dict(size=1.5, kind="padded_keys"),
    "padded tokens": dict(size=1.5, kind="padded_tokens"),
}


@dataclasses.dataclass
class Fitted:
    """A fit, its problem, and the points to compare it with, in float64."""

    fit: aj.KLFit
    exact: Objective
    w: np.ndarray
    start: np.ndarray
    best: np.ndarray
    arrays: tuple
    settings: dict


@functools.cache
def fitted(name, seed, dtype):
    """Fits one of the layers; once, for all tests that look at the fit."""
    arrays, mask = layer(seed, dtype, **LAYERS[name])
    settings = dict(
        epsilon=LAYERS[name].get("epsilon", 1.0),
        key_mass="unit" if name == "padded keys" else "balanced",
        mask=mask,
    )
    fit = aj.fit_kl(*arrays, **settings)
    chex.assert_type(fit.coefficients, dtype)
    exact = Objective(*arrays, **settings)
    start = least_squares(exact)
    w = np.asarray(fit.coefficients, np.float64)
    return Fitted(fit, exact, w, start, exact.minimum(start), arrays, settings)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_fit_reaches_the_minimum(dtype, name, seed):
    case = fitted(name, seed, dtype.name)
    value, start, best = (case.exact.value(w) for w in (case.w, case.start, case.best))
    assert best < start
    assert value <= start
    assert value - best <= 1e-3 * (start - best)


def noise_floor(case):
    """What rounding leaves of a gradient: its own error, and that of the coefficients."""
    _, ours = value_and_grad(case.fit.coefficients, *case.arrays, **case.settings)
    own = norm(np.asarray(ours, np.float64) - case.exact.gradient(case.w))
    half_spacing = np.spacing(np.abs(np.float32(case.w))) / 2
    return own + norm(case.exact.hessian(case.w) @ half_spacing)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_is_small_next_to_that_of_least_squares(dtype, name, seed):
    case = fitted(name, seed, dtype.name)
    left, first = norm(case.exact.gradient(case.w)), norm(case.exact.gradient(case.start))
    floor = 2 * noise_floor(case) if dtype == jnp.float32 else 0.0
    assert left <= max(1e-5 * first, floor)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_the_report_of_a_fit_is_correct(dtype, name, seed):
    case = fitted(name, seed, dtype.name)
    fit, exact = case.fit, case.exact
    single = dtype == jnp.float32
    ratio = norm(exact.gradient(case.w)) / norm(exact.gradient(0 * case.w))
    np.testing.assert_allclose(fit.gradient_ratio, ratio, rtol=1e-3, atol=1e-6 if single else 1e-15)
    assert fit.converged == (ratio <= (1e-4 if single else 1e-8))
    assert fit.converged
    assert fit.reason in ("gradient", "no_progress")
    if not single:
        assert fit.reason == "gradient"
    assert 1 <= fit.num_steps <= kl_search.MAX_STEPS
    rtol = 1e-4 if single else 1e-10
    np.testing.assert_allclose(fit.objective, exact.value(case.w), rtol=rtol)
    np.testing.assert_allclose(fit.objective_ls, exact.value(case.start), rtol=rtol)
    p, p_hat = exact.plan(exact.y), exact.plan(exact.x @ case.w)
    divergence = p * (np.log(np.where(p > 0, p, 1.0)) - np.log(np.where(p > 0, p_hat, 1.0)))
    np.testing.assert_allclose(fit.plan_kl, divergence.sum((-2, -1)).mean(), rtol=rtol)


@pytest.mark.parametrize("seed", range(6))
def test_fit_is_never_worse_than_least_squares_even_if_that_is_nearly_exact(seed):
    """Features that hold the target leave the fit nothing but the shrinkage of the ridge."""
    (x, y, s, shift), mask = layer(seed, size=1.0)
    x = np.concatenate([y[..., None], x[..., 1:]], -1)
    ls = np.asarray(aj.fit_ls(x, y).coefficients, np.float64)
    w = np.asarray(aj.fit_kl(x, y, s, shift, mask=mask).coefficients, np.float64)
    exact = Objective(x, y, s, shift)
    assert exact.value(w) <= exact.value(ls)


def blocks_of(arrays, mask=None, *, epsilon=1.0, key_mass="balanced"):
    """The microbatch of some arrays."""
    return kl_objective.make_block(*arrays, mask, epsilon=epsilon, key_mass=key_mass)


def itself(block):
    """From an item to its block, for items that are blocks."""
    return block


def sums_of(parts, num_heads=None):
    """Normal equations of some (arrays, mask) pairs."""
    size, dtype = parts[0][0][0].shape[-1], parts[0][0][0].dtype
    sums = aj.NormalEquations.zero(size, num_heads=num_heads, dtype=dtype)
    for (x, y, *_), mask in parts:
        sums = sums.add(x, y, mask.any(-1))
    return sums


def minimise(parts, *, in_memory, per_head=False, max_steps=kl_search.MAX_STEPS, epsilon=1.0):
    """Drives the fit of some (arrays, mask) pairs, one microbatch each, either way."""
    blocks = [blocks_of(arrays, mask, epsilon=epsilon) for arrays, mask in parts]
    items = tuple(blocks)  # anything that is not a list is gone through again and again
    if in_memory:
        shapes = {block.kernel.shape: [] for block in blocks}
        for block in blocks:
            shapes[block.kernel.shape].append(block)
        items = [jax.tree.map(lambda *x: jnp.stack(x), *group) for group in shapes.values()]
    return kl_search.minimise(
        sums_of(parts, HEADS if per_head else None),
        items,
        itself,
        epsilon=epsilon,
        ridge=RIDGE,
        num_problems=sum(int(np.prod(arrays[1].shape[:-1])) for arrays, _ in parts),
        max_steps=max_steps,
    )


CAP = 2


@pytest.mark.parametrize(
    ("size", "enough"), [(3.0, ()), (0.5, ("float32",))], ids=["sharp", "soft"]
)
def test_a_fit_with_a_step_limit_reports_whether_it_converged(dtype, size, enough):
    """Two steps are enough for the soft layer by the tolerance of single precision only."""
    arrays, mask = layer(0, dtype.name, size=size)
    fit = minimise([(arrays, mask)], in_memory=True, max_steps=CAP)
    assert (fit.reason, fit.num_steps) == ("cap", CAP)
    exact = Objective(*arrays)
    w = np.asarray(fit.coefficients, np.float64)
    ratio = norm(exact.gradient(w)) / norm(exact.gradient(0 * w))
    np.testing.assert_allclose(fit.gradient_ratio, ratio, rtol=1e-2, atol=1e-6)
    assert fit.converged == (ratio <= {"float32": 1e-4, "float64": 1e-8}[dtype.name])
    assert fit.converged == (dtype.name in enough)
    assert exact.value(w) < exact.value(least_squares(exact))


@pytest.mark.parametrize("features", ["single", "double"])
def test_precision_follows_the_data_among_64_bit_types(x64, features):
    """Float32 data stay float32 with 64-bit types on; one float64 array makes the fit double."""
    (x, y, s, shift), mask = layer(0)
    if features == "double":
        x = x.astype(jnp.float64)
    fit = aj.fit_kl(x, y, s, shift, mask=mask)
    chex.assert_type(fit.coefficients, {"single": jnp.float32, "double": jnp.float64}[features])
    assert fit.converged
    exact = Objective(x, y, s, shift)
    start = least_squares(exact)
    best = exact.value(exact.minimum(start))
    value = exact.value(np.asarray(fit.coefficients, np.float64))
    assert value - best <= 1e-3 * (exact.value(start) - best)


def test_half_precision_activations_are_fitted_in_single(rng):
    (x, y, s, shift), mask = layer(0)
    low = [a.astype(jnp.bfloat16) for a in (x, y, s, shift)]
    fit = aj.fit_kl(*low, mask=mask)
    chex.assert_type(fit.coefficients, jnp.float32)
    same = aj.fit_kl(*(a.astype(jnp.float32) for a in low), mask=mask)
    chex.assert_trees_all_equal(fit.coefficients, same.coefficients)


def test_settings_can_be_any_real_scalar(x64):
    arrays, mask = layer(0)
    expected = aj.fit_kl(*arrays, mask=mask).coefficients
    for one in (np.float32(1), np.float64(1), jnp.ones(())):
        ridge = np.asarray(1e-3)
        fit = aj.fit_kl(*arrays, epsilon=one, ridge=ridge, mask=mask)
        chex.assert_trees_all_equal(fit.coefficients, expected)


# ------------------------------------------------------------------------------- a trained layer


class Net(nn.Module):
    """One Sinkhorn layer of stock attention between two dense ones."""

    spec: aj.SinkhornSpec
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x, mask=None):
        dense = lambda size: nn.Dense(size, dtype=self.dtype)
        x = dense(HEADS * DIM)(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=HEADS,
            attention_fn=aj.linen.SinkhornAttention(self.spec, name="core"),
            dtype=self.dtype,
        )(x, mask=mask)
        return dense(4)(nn.relu(dense(HEADS * DIM)(x)))


def clusters(rng, examples, length=LENGTH):
    """Noisy tokens of three clusters, and for each token the mean of its cluster's tokens."""
    centres = 1.5 * rng.normal(size=(examples, 3, 4))
    kind = rng.integers(0, 3, size=(examples, length))
    tokens = np.take_along_axis(centres, kind[..., None], 1)
    tokens = tokens + 0.7 * rng.normal(size=tokens.shape)
    member = np.eye(3)[kind]
    means = np.swapaxes(member, 1, 2) @ tokens / np.maximum(member.sum(1), 1)[..., None]
    means = np.take_along_axis(means, kind[..., None], 1)
    return tokens.astype(np.float32), means.astype(np.float32)


@pytest.fixture(scope="module")
def trained():
    """The net, trained to denoise, and its variables."""
    rng = np.random.default_rng(0)
    net = Net(aj.SinkhornSpec(num_steps=10))
    x, y = (np.reshape(a, (200, 8, LENGTH, 4)) for a in clusters(rng, 1600))
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train(variables):
        def step(carry, batch):
            variables, state = carry
            loss = lambda v: jnp.mean(jnp.square(net.apply(v, batch[0]) - batch[1]))
            value, slope = jax.value_and_grad(loss)(variables)
            change, state = optimizer.update(slope, state)
            return (optax.apply_updates(variables, change), state), value

        (variables, _), losses = jax.lax.scan(step, (variables, optimizer.init(variables)), (x, y))
        return variables, losses

    with jax.numpy_dtype_promotion("standard"):
        variables, losses = train(jax.jit(net.init)(jax.random.key(0), x[0]))
    losses = np.asarray(losses)
    assert losses[-10:].mean() < 0.2 * losses[0]
    return net, variables


def test_a_trained_layer_takes_few_steps(trained):
    net, variables = trained
    tokens, _ = clusters(np.random.default_rng(1), 256)
    record = recorded(net, variables, tokens)["asap_capture"]["core"]["record"]
    q, k = (np.swapaxes(x, 1, 2) for x in (record.query, record.key))
    bank = aj.slice_directions(0, 32, DIM)
    x, target, s, shift = data_of(q, k, bank, None, None, spec=net.spec)
    fit = aj.fit_kl(x, target, s, shift)
    assert fit.num_steps <= 15
    assert fit.converged
    exact = Objective(x, target, s, shift)
    start = least_squares(exact)
    w, best = np.asarray(fit.coefficients, np.float64), exact.minimum(start)
    assert exact.value(w) - exact.value(best) <= 1e-3 * (exact.value(start) - exact.value(best))
    assert norm(exact.gradient(w)) <= 1e-5 * norm(exact.gradient(start))


# ------------------------------------------------------------------------- two ways to drive it


def mixed_parts(dtype="float32", **settings):
    """Microbatches of three shapes: other lengths, other batch sizes, other masks."""
    (x, y, s, shift), mask = layer(0, dtype, **settings)
    whole = ((x, y, s, shift), mask)
    arrays, mask = layer(1, dtype, kind="padded_tokens", **settings)
    short = lambda a, rank: a[(slice(None), slice(None)) + (slice(0, 9),) * rank]
    x, y, s, shift = arrays
    cut = ((short(x, 1), short(y, 1), short(s, 2), short(shift, 1)), mask[:, :, :9, :9])
    arrays, mask = layer(2, dtype, **settings)
    return [whole, cut, (tuple(a[:1] for a in arrays), mask[:1]), layer(3, dtype, **settings)]


@pytest.mark.parametrize("per_head", [False, True], ids=["pooled", "per_head"])
def test_fits_in_and_out_of_memory_give_the_same_coefficients(per_head):
    parts = mixed_parts(size=1.5)
    memory = minimise(parts, in_memory=True, per_head=per_head)
    stream = minimise(parts, in_memory=False, per_head=per_head)
    chex.assert_shape(memory.coefficients, (HEADS, 12) if per_head else (12,))
    chex.assert_trees_all_close(memory.coefficients, stream.coefficients, atol=1e-5, rtol=0)
    for fit in (memory, stream):
        assert fit.converged
        w = np.asarray(fit.coefficients, np.float64)
        value = RIDGE * (w**2).sum() / 2
        for arrays, mask in parts:
            for head in range(HEADS):
                one = [a[:, head : head + 1] for a in arrays]
                part = Objective(*one, ridge=0.0, mask=mask)
                value += part.value(w[head] if per_head else w)
        np.testing.assert_allclose(fit.objective, value, rtol=1e-4)


def test_the_fit_does_not_depend_on_how_the_data_are_split_into_batches(x64):
    whole = fitted("plain", 1, "float64").fit
    (x, y, s, shift), mask = layer(1, "float64")
    halves = [
        (tuple(a[i : i + 2] for a in (x, y, s, shift)), mask[i : i + 2]) for i in range(0, BATCH, 2)
    ]
    parts = minimise(halves, in_memory=True)
    chex.assert_trees_all_close(parts.coefficients, whole.coefficients, atol=1e-7)
    np.testing.assert_allclose(parts.plan_kl, whole.plan_kl, rtol=1e-9)


def test_a_fit_per_head_is_a_fit_of_each_head(x64):
    arrays, mask = layer(0, "float64")
    apart = minimise([(arrays, mask)], in_memory=True, per_head=True)
    for head in range(HEADS):
        exact = Objective(*(a[:, head : head + 1] for a in arrays))
        best = exact.minimum(least_squares(exact))
        np.testing.assert_allclose(apart.coefficients[head], best, atol=1e-6)


@pytest.fixture(scope="module")
def small():
    """A net with a two-step teacher, and calibration batches of two lengths with masks."""
    net = Net(aj.SinkhornSpec(num_steps=2))
    rng = np.random.default_rng(3)
    tokens, _ = clusters(rng, 4)
    variables = jax.jit(net.init)(jax.random.key(1), tokens)
    batches = []
    for length in (8, 6, 8):
        tokens, _ = clusters(rng, 4, length)
        mask = problems.token_padding([length, length - 2, length, 4], length)
        batches.append(tuple(map(problems.array, (2 * tokens, mask))))
    return net, variables, batches


def compiled(net, variables, batches, **settings):
    """The state and the fit figures of the one layer."""
    fit = aj.PaperFit(objective="kl", num_slices=6, **settings)
    result = aj.linen.compile(net, variables, batches, fit=fit, holdout=0.0)
    (state,), (report,) = result.states.values(), result.report.layers.values()
    return state.predictor.coefficients, report.fit


@pytest.fixture(scope="module")
def in_memory(small):
    """What compiling in memory gives, pooled and per head."""
    return {sharing: compiled(*small, coefficients=sharing) for sharing in ("pooled", "per_head")}


def test_compiling_in_and_out_of_memory_give_the_same_coefficients(small, in_memory):
    memory, figures = in_memory["per_head"]
    stream, again = compiled(*small, coefficients="per_head", in_memory=False)
    chex.assert_shape(memory, (HEADS, 6))
    chex.assert_trees_all_close(memory, stream, atol=1e-5, rtol=0)
    assert figures["kl_converged"]
    assert again["kl_converged"]
    np.testing.assert_allclose(figures["plan_kl"], again["plan_kl"], rtol=1e-4)


def test_compiling_fits_the_records_of_the_layer(small, in_memory):
    """Against the minimum for the recorded activations, masks and all."""
    net, variables, batches = small
    coefficients, figures = in_memory["pooled"]
    parts = []
    bank = aj.slice_directions(jax.random.key(0), 6, DIM)
    for tokens, mask in batches:
        record = recorded(net, variables, tokens, mask)["asap_capture"]["core"]["record"]
        q, k = (np.swapaxes(x, 1, 2) for x in (record.query, record.key))
        valid = np.asarray(mask).any(-1)
        x, target, s, shift = data_of(q, k, bank, mask, valid, spec=net.spec)
        parts.append(Objective(x, target, s, shift, ridge=0.0, mask=mask))

    class Total(Objective):
        def __init__(self):
            self.ridge = RIDGE

        def value(self, w):
            return sum(part.value(w) for part in parts) + RIDGE * w @ w / 2

        def gradient(self, w):
            return sum(part.gradient(w) for part in parts) + RIDGE * w

        def hessian(self, w):
            return sum(part.hessian(w) for part in parts) + RIDGE * np.eye(len(w))

    total, w = Total(), np.asarray(coefficients, np.float64)
    best = total.minimum(w)
    np.testing.assert_allclose(w, best, atol=2e-4)
    assert total.value(w) - total.value(best) <= 1e-6 * total.value(best)
    problems_seen = sum(len(part.y) for part in parts)
    plan_kl = (total.value(w) - RIDGE * w @ w / 2) / problems_seen
    np.testing.assert_allclose(figures["plan_kl"], plan_kl, rtol=1e-3)


def test_a_float64_model_compiles(small, in_memory, x64):
    net, variables, batches = small
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), variables)
    wide_batches = [(tokens.astype(jnp.float64), mask) for tokens, mask in batches]
    double, figures = compiled(Net(net.spec, "float64"), wide, wide_batches)
    chex.assert_type(double, jnp.float64)
    assert figures["kl_converged"]
    single, _ = in_memory["pooled"]
    np.testing.assert_allclose(double, single, atol=1e-3)


def test_a_bfloat16_model_compiles(small, in_memory):
    net, variables, batches = small
    low, figures = compiled(Net(net.spec, "bfloat16"), variables, batches)
    chex.assert_type(low, jnp.float32)
    assert figures["kl_converged"]
    single, _ = in_memory["pooled"]
    chex.assert_trees_all_close(low, single, atol=0.1 * float(jnp.abs(single).max()))


# ----------------------------------------------------------------------------------- bad data


def degenerate(name, dtype="float32"):
    """Data that leave the coefficients undetermined but for the ridge."""
    (x, y, s, shift), mask = layer(0, dtype)
    if name == "one short example":  # of four tokens, for twelve features
        x, y, shift = (a[:1, :1, :4] for a in (x, y, shift))
        return (x, y, s[:1, :1, :4, :4], shift), mask[:1, :, :4, :4]
    change = {
        "all zero": lambda: np.zeros_like(x),
        "duplicated slices": lambda: np.concatenate([x[..., :6], x[..., :6]], -1),
        "constant": lambda: np.ones_like(x),
        "one zero slice": lambda: np.where(np.arange(12) == 3, np.zeros_like(x), x),
        "one example": lambda: x,
    }
    if name == "one example":
        mask = mask & (np.arange(BATCH) < 1)[:, None, None, None]
    return (change[name](), y, s, shift), mask


DEGENERATE = [
    "all zero",
    "duplicated slices",
    "constant",
    "one zero slice",
    "one example",
    "one short example",
]


@pytest.mark.parametrize("ridge", [RIDGE, 0.0])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_features_give_finite_coefficients(name, ridge):
    arrays, mask = degenerate(name)
    fit = aj.fit_kl(*arrays, ridge=ridge, mask=mask)
    w = np.asarray(fit.coefficients, np.float64)
    assert np.isfinite(w).all()
    assert np.isfinite([fit.objective, fit.plan_kl, fit.gradient_ratio]).all()
    assert np.abs(w).max() < 1e3
    exact = Objective(*arrays, ridge=ridge, mask=mask)
    valid = mask.any(-1)
    ls = np.asarray(aj.fit_ls(*arrays[:2], ridge=ridge, valid=valid).coefficients, np.float64)
    rounding = 1e-6 * np.abs(exact.nu).sum()
    assert exact.value(w) <= exact.value(ls) + rounding
    if name == "all zero":
        np.testing.assert_array_equal(w, 0.0)
        assert fit.converged
    if name == "duplicated slices" and ridge:  # which makes the minimiser unique
        np.testing.assert_allclose(w[:6], w[6:], atol=1e-3)


@pytest.mark.parametrize("name", ["all zero", "one short example"])
def test_degenerate_features_can_be_streamed(name):
    arrays, mask = degenerate(name)
    fit = minimise([(arrays, mask)], in_memory=False)
    assert np.isfinite(fit.coefficients).all()
    exact = Objective(*arrays, mask=mask)
    value = exact.value(np.asarray(fit.coefficients, np.float64))
    memory = np.asarray(aj.fit_kl(*arrays, mask=mask).coefficients, np.float64)
    np.testing.assert_allclose(value, exact.value(memory), rtol=1e-4)


def test_one_short_example_is_enough_to_compile(small):
    """Three tokens for six slices."""
    net, variables, _ = small
    tokens, _ = clusters(np.random.default_rng(5), 1, 3)
    coefficients, figures = compiled(net, variables, [tokens])
    assert np.isfinite(coefficients).all()
    assert np.isfinite(figures["plan_kl"])


@pytest.mark.parametrize("which", ["features", "targets", "scores", "shift"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(which, bad):
    arrays, mask = layer(0)
    names = ["features", "targets", "scores", "shift"]
    changed = [a.copy() for a in arrays]
    changed[names.index(which)][0, 0, 2] = bad
    with pytest.raises(ValueError, match="finite"):
        aj.fit_kl(*changed, mask=mask)


def test_values_of_masked_queries_do_not_matter():
    arrays, mask = layer(0, kind="padded_tokens")
    clean = aj.fit_kl(*arrays, mask=mask).coefficients
    for dirty in with_rubbish(*arrays, mask, rubbish=(np.nan, np.inf)):
        chex.assert_trees_all_equal(aj.fit_kl(*dirty, mask=mask).coefficients, clean)


def test_no_data_are_refused():
    (x, y, s, shift), mask = layer(0)
    with pytest.raises(ValueError, match="active|empty|problem"):
        aj.fit_kl(x, y, s, shift, mask=np.zeros_like(mask))
    with pytest.raises(ValueError, match="active|empty|problem"):
        aj.fit_kl(x[:0], y[:0], s[:0], shift[:0])


@pytest.mark.parametrize("in_memory", [True, False])
def test_compiling_without_data_is_refused(small, in_memory):
    net, variables, batches = small
    fit = aj.PaperFit(objective="kl", num_slices=6, in_memory=in_memory)
    with pytest.raises(ValueError, match="batch"):
        aj.linen.compile(net, variables, [], fit=fit)
    tokens, mask = batches[0]
    with pytest.raises(ValueError, match="no active|token"):
        aj.linen.compile(net, variables, [(tokens, np.zeros(mask.shape, bool))], fit=fit)
    with pytest.raises(ValueError, match="finite"):
        aj.linen.compile(net, variables, [tokens.at[0, 0, 0].set(jnp.nan)], fit=fit)


def test_streaming_refuses_batches_that_can_be_read_only_once(small):
    net, variables, batches = small
    fit = aj.PaperFit(objective="kl", in_memory=False)
    for once in ((b for b in batches), iter(batches), map(tuple, batches)):
        with pytest.raises(TypeError, match="re-iterable"):
            aj.linen.compile(net, variables, once, fit=fit)


def test_a_fit_in_memory_accepts_batches_that_can_be_read_only_once(small, in_memory):
    net, variables, batches = small
    once, _ = compiled(net, variables, (b for b in batches))
    chex.assert_trees_all_equal(once, in_memory["pooled"][0])


def test_data_that_are_missing_on_the_second_pass_are_an_error():
    parts = [layer(0)]
    blocks = (blocks_of(*part) for part in parts)
    with pytest.raises(ValueError, match="re-iterable"):
        kl_search.minimise(sums_of(parts), blocks, itself, epsilon=1.0, ridge=RIDGE, num_problems=8)


@pytest.mark.parametrize(
    ("changes", "error", "part"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"epsilon": "1"}, TypeError, "epsilon"),
        ({"ridge": -1.0}, ValueError, "ridge"),
        ({"ridge": np.inf}, ValueError, "ridge"),
        ({"key_mass": "other"}, ValueError, "balanced"),
        ({"mask": np.ones((4, 16), bool)}, ValueError, "mask"),
    ],
)
def test_invalid_settings_are_refused(changes, error, part):
    arrays, _ = layer(0)
    with pytest.raises(error, match=part):
        aj.fit_kl(*arrays, **changes)
    with pytest.raises(error, match=part):
        aj.kl_objective(jnp.ones(12), *arrays, **changes)


@pytest.mark.parametrize("which", range(4))
def test_shapes_that_do_not_fit_are_refused(which):
    arrays, _ = layer(0)
    cut = [a[:, :, 1:] if i == which else a for i, a in enumerate(arrays)]
    with pytest.raises(ValueError, match="features") as caught:
        aj.fit_kl(*cut)
    for array in cut:
        assert str(array.shape) in str(caught.value)
    counts = [a.astype(jnp.int32) if i == which else a for i, a in enumerate(arrays)]
    name = ["features", "targets", "scores", "shift"][which]
    with pytest.raises(TypeError, match=name):
        aj.fit_kl(*counts)


def test_coefficients_that_do_not_fit_are_refused():
    arrays, _ = layer(0)
    for shape in ((11,), (3, 12), (12, 1)):
        with pytest.raises(ValueError, match="coefficients"):
            aj.kl_objective(jnp.ones(shape), *arrays)


def test_sharp_plans_are_fitted_to_the_minimum():
    """The Hessian at the start is far from that at the minimum; one whitening took 100 steps."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(3, 12, 8)) for _ in range(2))
    size = np.sqrt(50 / np.std(reference.scores(q, k)))
    q, k = (problems.array(size * x, "float32") for x in (q, k))
    s, shift = aj.scores(q, k), aj.query_shift(q)
    y = aj.sinkhorn_duals(s, spec=aj.SinkhornSpec(10)).source + shift
    y = y - y.mean(-1, keepdims=True)
    x = aj.sliced_potentials(q, k, aj.slice_directions(0, 16, 8))
    arrays = [np.asarray(a) for a in (x, y, s, shift)]
    fit = aj.fit_kl(*arrays)
    assert fit.converged
    assert fit.reason in ("gradient", "no_progress")
    with jax.enable_x64(True):
        best = aj.fit_kl(*(a.astype("float64") for a in arrays))
    assert best.reason == "gradient"
    exact = Objective(*arrays)
    value = lambda fit: exact.value(np.asarray(fit.coefficients, np.float64))
    zero = exact.value(np.zeros(16))
    assert value(fit) - value(best) <= 1e-6 * zero
