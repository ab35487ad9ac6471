"""The finite-budget teacher: weights, duals, marginals and gradients."""

import chex
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference

import asap_jax as aj

BUDGETS = [1, 2, 3, 4, 5, 10, 11, 20]
SHAPE = (2, 3, 7, 5)

sinkhorn_duals = jax.jit(aj.sinkhorn_duals, static_argnames="before_end")
attention_weights = jax.jit(aj.attention_weights, static_argnames="epsilon")


def teacher(s, spec, mask=None):
    """The teacher's weights from its duals."""
    duals = sinkhorn_duals(s, spec=spec, mask=mask)
    return attention_weights(s, duals.query, duals.key, epsilon=spec.epsilon, mask=mask)


def expected_weights(s, spec, mask=None):
    """The same weights by the float64 reference, for a whole batch."""
    settings = {"epsilon": spec.epsilon, "key_mass": spec.key_mass}
    return reference.batched(
        lambda s, mask: reference.sinkhorn(s, num_steps=spec.num_steps, mask=mask, **settings),
        (s, 2),
        (mask, 2),
    )


@pytest.mark.parametrize("num_steps", BUDGETS)
def test_weights_are_the_alternating_row_and_column_normalisations(rng, dtype, num_steps):
    s = problems.uniform_scores(rng, *SHAPE, dtype=dtype)
    weights = teacher(s, aj.SinkhornSpec(num_steps=num_steps))
    chex.assert_type(weights, dtype)
    expected = reference.batched(reference.matrix_sinkhorn, (s, 2), num_steps=num_steps)
    tolerance = {"float32": 5e-6, "float64": 1e-10}[dtype.name]
    np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 20])
def test_weights_stay_exact_at_sharp_scores(rng, dtype, num_steps):
    s = problems.uniform_scores(rng, 2, 3, 7, 7, dtype=dtype, bound=50.0)
    spec = aj.SinkhornSpec(num_steps=num_steps)
    tolerance = {"float32": 2e-5, "float64": 1e-10}[dtype.name]
    np.testing.assert_allclose(teacher(s, spec), expected_weights(s, spec), rtol=0, atol=tolerance)


@pytest.mark.parametrize("key_mass", ["balanced", "unit"])
@pytest.mark.parametrize("epsilon", [1.0, 0.25])
@pytest.mark.parametrize("num_steps", [1, 4, 5])
def test_masks_key_mass_and_epsilon_follow_the_reference(rng, dtype, num_steps, epsilon, key_mass):
    s = problems.uniform_scores(rng, *SHAPE, dtype=dtype, bound=10.0 * epsilon)
    mask = problems.random_mask(rng, 2, 1, 7, 5)
    mask[0, 0, 2, :] = False
    mask[1, 0, :, 3] = False
    spec = aj.SinkhornSpec(num_steps=num_steps, epsilon=epsilon, key_mass=key_mass)
    weights = teacher(s, spec, problems.array(mask))
    tolerance = {"float32": 5e-6, "float64": 1e-10}[dtype.name]
    np.testing.assert_allclose(weights, expected_weights(s, spec, mask), rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_steps", [2, 3, 6, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_duals_are_those_of_the_iterations(rng, x64, num_steps, masked):
    s = problems.uniform_scores(rng, *SHAPE, dtype="float64")
    mask = problems.random_mask(rng, *SHAPE) if masked else None
    if masked:
        mask[0, 0, 2, :] = False
        mask[1, 1, :, 3] = False
    settings = {"mask": None if mask is None else problems.array(mask)}
    history = lambda s, mask: tuple(
        dual for _, dual in reference.sinkhorn_history(s, num_steps=num_steps, mask=mask)
    )
    met = reference.batched(history, (s, 2), (mask, 2))
    duals = sinkhorn_duals(s, spec=aj.SinkhornSpec(num_steps=num_steps), **settings)
    last_row, last_column = (
        (num_steps - 1, num_steps) if num_steps % 2 == 0 else (num_steps, num_steps - 1)
    )
    source = num_steps - 1 if num_steps % 2 == 0 else num_steps - 2
    chex.assert_trees_all_close(duals.query, met[last_row - 1], atol=1e-11)
    chex.assert_trees_all_close(duals.key, met[last_column - 1], atol=1e-11)
    chex.assert_trees_all_close(duals.source, met[source - 1], atol=1e-11)
    assert duals.aligned is None
    for before_end in range(1, num_steps):
        duals = sinkhorn_duals(
            s, spec=aj.SinkhornSpec(num_steps=num_steps), before_end=before_end, **settings
        )
        step = num_steps - before_end
        assert duals.aligned_side == ("query" if step % 2 else "key")
        chex.assert_trees_all_close(duals.aligned, met[step - 1], atol=1e-11)
        chex.assert_trees_all_close(duals.source, met[source - 1], atol=1e-11)


def test_one_step_is_row_softmax_and_has_no_source_dual(rng, dtype):
    s = problems.uniform_scores(rng, *SHAPE, dtype=dtype)
    spec = aj.SinkhornSpec(num_steps=1)
    duals = sinkhorn_duals(s, spec=spec)
    assert duals.source is None
    assert (duals.key == 0).all()
    chex.assert_trees_all_close(teacher(s, spec), jax.nn.softmax(s, -1), atol=1e-6)


@pytest.mark.parametrize("num_steps", [2, 3, 8, 9])
def test_marginals_are_exact_on_the_side_of_the_last_step(rng, dtype, num_steps):
    s = problems.uniform_scores(rng, *SHAPE, dtype=dtype)
    spec = aj.SinkhornSpec(num_steps=num_steps)
    weights = teacher(s, spec)
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype.name]
    if spec.last_step == "row":
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=tolerance)
    else:
        np.testing.assert_allclose(weights.sum(-2), 7 / 5, atol=tolerance)


def test_both_marginals_are_exact_after_many_steps(rng, x64):
    s = problems.uniform_scores(rng, *SHAPE, dtype="float64", bound=2.0)
    mask = np.ones((2, 1, 7, 5), bool)
    mask[0, :, 5:, :] = False
    mask[1, ..., 4] = False
    weights = teacher(s, aj.SinkhornSpec(num_steps=400), problems.array(mask))
    queries, keys = mask.any(-1), mask.any(-2)
    target = keys * queries.sum(-1, keepdims=True) / keys.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights.sum(-1), np.broadcast_to(queries, (2, 3, 7)), atol=1e-10)
    np.testing.assert_allclose(weights.sum(-2), np.broadcast_to(target, (2, 3, 5)), atol=1e-10)


@pytest.mark.parametrize("num_steps", [4, 10])
def test_a_peer_library_agrees_at_the_same_number_of_half_steps(rng, num_steps):
    from ott.geometry import geometry
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    s = problems.uniform_scores(rng, 8, 8, bound=4.0)
    # The peer is not written for strict promotion. One of its iterations is two half-steps, with
    # keys first, hence the transposed problem; its plan has total mass one.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        problem = linear_problem.LinearProblem(geometry.Geometry(cost_matrix=-s.T, epsilon=1.0))
        iterations = num_steps // 2
        solver = sinkhorn.Sinkhorn(
            threshold=-1.0,
            min_iterations=iterations,
            max_iterations=iterations,
            inner_iterations=1,
        )
        plan = 8 * solver(problem).matrix.T
    np.testing.assert_allclose(teacher(s, aj.SinkhornSpec(num_steps=num_steps)), plan, atol=2e-6)


@pytest.mark.parametrize("num_steps", [2, 3, 4, 5])
def test_gradient_matches_finite_differences(rng, x64, num_steps):
    s = problems.uniform_scores(rng, *SHAPE, dtype="float64", bound=2.0)
    mask = problems.random_mask(rng, *SHAPE)
    mask[0, 0] = False
    mask[1, 1, 2, :] = False
    mask = problems.array(mask)
    spec = aj.SinkhornSpec(num_steps=num_steps)
    mixing = problems.normal(rng, *SHAPE, dtype="float64")
    loss = lambda s: jnp.sum(mixing * jnp.square(teacher(s, spec, mask)))
    exact, measured = problems.slope(loss, (s,), rng)
    np.testing.assert_allclose(exact, measured, rtol=1e-6)
    gradient = np.asarray(jax.grad(loss)(s))
    assert np.isfinite(gradient).all()
    assert (gradient[~np.asarray(mask)] == 0).all()


def test_forward_and_reverse_jacobians_agree(rng, x64):
    s = problems.uniform_scores(rng, 4, 3, dtype="float64", bound=2.0)
    weights = lambda s: teacher(s, aj.SinkhornSpec(num_steps=3))
    chex.assert_trees_all_close(jax.jacrev(weights)(s), jax.jacfwd(weights)(s), atol=1e-12)


def test_backward_pass_stores_vectors_per_step_not_matrices():
    s = jnp.zeros((64, 64))

    def temporary(num_steps):
        spec = aj.SinkhornSpec(num_steps=num_steps)
        loss = lambda s: jnp.sum(jnp.square(aj.sinkhorn_duals(s, spec=spec).key))
        compiled = jax.jit(jax.grad(loss)).lower(s).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = temporary(44) - temporary(4)
    assert more < 40 * s.nbytes / 8, f"40 steps more took {more / s.nbytes:.1f} matrices more"


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_scores_or_mask_equals_a_loop(rng, axes):
    s = problems.uniform_scores(rng, *SHAPE)
    mask = problems.array(problems.random_mask(rng, *SHAPE))
    if axes[0] is None:
        s = s[0]
    if axes[1] is None:
        mask = mask[0]
    spec = aj.SinkhornSpec(num_steps=4)
    weights = jax.vmap(lambda s, mask: teacher(s, spec, mask), in_axes=axes)(s, mask)
    loop = [
        teacher(s if axes[0] is None else s[i], spec, mask if axes[1] is None else mask[i])
        for i in range(2)
    ]
    chex.assert_trees_all_close(weights, jnp.stack(loop), atol=1e-6)


@pytest.mark.parametrize("num_steps", [4, 5])
def test_an_example_does_not_depend_on_its_neighbours(rng, num_steps):
    s = problems.uniform_scores(rng, 1, 1, 7, 5)
    spec = aj.SinkhornSpec(num_steps=num_steps)
    alone = teacher(s, spec)
    for neighbour in (1e3 * s, jnp.full_like(s, jnp.nan)):
        together = teacher(jnp.concatenate([s, neighbour]), spec)
        chex.assert_trees_all_close(together[:1], alone, atol=1e-6)


def test_a_constant_on_all_scores_is_cancelled(rng):
    s = problems.uniform_scores(rng, *SHAPE)
    for num_steps in (4, 5):
        spec = aj.SinkhornSpec(num_steps=num_steps)
        np.testing.assert_allclose(teacher(s + 1e4, spec), teacher(s, spec), atol=5e-3)


@pytest.mark.parametrize("epsilon", [1.0, 1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("size", [1.0, 30.0, 300.0, 1000.0])
def test_marginals_stay_exact_at_small_entropy_and_large_scores(rng, epsilon, size):
    s = problems.normal(rng, *SHAPE, size=size)
    for num_steps in (4, 5):
        spec = aj.SinkhornSpec(num_steps=num_steps, epsilon=epsilon)
        q = jnp.zeros((2, 7, 3, 4))
        k, v = jnp.zeros((2, 5, 3, 4)), jnp.zeros((2, 5, 3, 4))
        _, weights = jax.jit(aj.sinkhorn_attention, static_argnames="return_weights")(
            q, k, v, s, spec=spec, return_weights=True
        )
        assert np.isfinite(weights).all()
        sums, target = (weights.sum(-1), 1.0) if num_steps % 2 else (weights.sum(-2), 7 / 5)
        np.testing.assert_allclose(sums, target, atol=1e-3)


@hypothesis.given(
    s=hypothesis.extra.numpy.arrays(np.float64, (1, 4, 3), elements=st.floats(-50, 50)),
    mask=hypothesis.extra.numpy.arrays(np.bool_, (1, 4, 3)),
    num_steps=st.sampled_from([2, 5]),
    key_mass=st.sampled_from(["balanced", "unit"]),
)
def test_any_scores_and_any_mask_follow_the_reference(s, mask, num_steps, key_mass):
    spec = aj.SinkhornSpec(num_steps=num_steps, key_mass=key_mass)
    with jax.enable_x64(True):
        weights = teacher(problems.array(s), spec, problems.array(mask))
    np.testing.assert_allclose(weights, expected_weights(s, spec, mask), rtol=0, atol=1e-10)
