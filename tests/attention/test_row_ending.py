"""Compiled layers that end on rows: one softmax attention with a bias on the keys."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import operators
import problems
import pytest
import reference

import asap_jax as aj
from asap_jax.fitting.targets import log_row_sums
from asap_jax.predictor.row_mass import RowMass, row_sums
from asap_jax.problem import make_problem

compiled = jax.jit(
    aj.asap_attention, static_argnames=("return_weights", "closures", "ending", "implementation")
)


def one_problem(rng, dtype, *, n=9, m=6, dim=4):
    q, k, v = problems.attention_inputs(
        rng, queries=n, keys=m, dim=dim, batch=1, heads=1, dtype=dtype, size=1.5
    )
    return q, k, v, reference.scores(problems.heads_first(q), problems.heads_first(k))[0, 0]


def predictor_of(dual, own, dtype, side):
    """A predictor of one problem that answers with this dual, given in score coordinates."""
    shift = aj.query_shift(own)[0, :, 0]
    return aj.Predictor(
        directions=jnp.eye(1, own.shape[-1], dtype=dtype),
        coefficients=jnp.zeros(1, dtype),
        side=side,
        token_bias=problems.array(dual, dtype) + shift,
    )


@pytest.mark.parametrize("key_mass", ["balanced", "unit"])
@pytest.mark.parametrize("closures", [1, 2, 3])
@pytest.mark.parametrize("num_steps", [4, 10])
def test_the_exact_dual_gives_the_teacher_continued_to_a_row_step(
    rng, dtype, num_steps, closures, key_mass
):
    q, k, v, s = one_problem(rng, dtype)
    continued = dict(num_steps=num_steps + 1, key_mass=key_mass)
    side, dual = reference.aligned_dual(s, before_end=closures, **continued)
    out, weights = compiled(
        q, k, v,
        predictor=predictor_of(dual, q if side == "query" else k, dtype, side),
        spec=aj.SinkhornSpec(num_steps=num_steps, key_mass=key_mass),
        closures=closures, ending="row", return_weights=True,
    )  # fmt: skip
    # Rows of the teacher with unit key mass sum to active keys / active queries on average.
    factor = {"balanced": 1, "unit": 6 / 9}[key_mass]
    expected = factor * reference.sinkhorn(s, **continued)
    tolerance = {"float32": 2e-6, "float64": 1e-12}[dtype.name]
    np.testing.assert_allclose(weights[0, 0], expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(out[0, :, 0], expected @ np.asarray(v)[0, :, 0], atol=5 * tolerance)


@pytest.mark.parametrize("key_mass", ["balanced", "unit"])
def test_the_mass_of_padded_text_is_the_teachers(rng, key_mass):
    q, k, v = problems.attention_inputs(rng, queries=7, keys=7)
    mask = problems.array(problems.key_padding([7, 4], 7))  # padded queries stay in the closures
    spec = aj.SinkhornSpec(num_steps=20, key_mass=key_mass)
    _, teacher = aj.sinkhorn_attention(q, k, v, mask=mask, spec=spec, return_weights=True)
    _, weights = compiled(
        q, k, v, mask=mask,
        predictor=operators.sliced("float32", side="key"), spec=spec,
        closures=1, ending="row", return_weights=True,
    )  # fmt: skip
    mass = {"balanced": [7, 7], "unit": [7, 4]}[key_mass]
    np.testing.assert_allclose(teacher.sum((-1, -2)), np.transpose([mass] * 3), rtol=1e-5)
    np.testing.assert_allclose(weights.sum((-1, -2)), teacher.sum((-1, -2)), rtol=1e-5)
    rows = np.broadcast_to(np.asarray(mass)[:, None, None] / 7, (2, 3, 7))
    np.testing.assert_allclose(weights.sum(-1), rows, rtol=1e-5)


def test_a_row_ending_teacher_has_one_ending(rng):
    q, k, v = problems.attention_inputs(rng)
    settings = dict(predictor=operators.sliced("float32", side="key"), closures=1)
    spec = aj.SinkhornSpec(num_steps=5)
    both = [compiled(q, k, v, spec=spec, ending=e, **settings) for e in ("teacher", "row")]
    chex.assert_trees_all_equal(*both)


@pytest.mark.parametrize("masked", [False, True])
def test_one_closure_is_the_attention_of_jax_with_a_key_bias(rng, masked):
    q, k, v = problems.attention_inputs(rng)
    mask = problems.array(problems.key_padding([5, 3], 5)) if masked else None
    predictor, spec = operators.sliced("float32", side="key"), aj.SinkhornSpec(num_steps=4)
    out = compiled(q, k, v, mask=mask, predictor=predictor, spec=spec, closures=1, ending="row")

    @jax.jit
    def by_hand(q, k, v):
        p = make_problem(q, k, v, None, mask, scale=None)
        g = aj.predict(
            predictor, p.q, p.k,
            query_valid=None if p.validity is None else p.validity.query,
            key_valid=None if p.validity is None else p.validity.key,
        )  # fmt: skip
        bias = (g - aj.query_shift(p.k))[..., None, :]
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask)

    chex.assert_trees_all_close(out, by_hand(q, k, v), atol=2e-6)


@pytest.mark.parametrize("implementation", ["log", "scaling", "streaming"])
def test_implementations_agree_on_a_row_ending_with_row_mass(rng, implementation):
    q, k, v = problems.attention_inputs(rng)
    mask = problems.array(problems.key_padding([5, 3], 5))
    predictor = row_mass_predictor(rng)
    settings = dict(predictor=predictor, spec=aj.SinkhornSpec(num_steps=4), closures=1)
    run = lambda name: compiled(
        q, k, v, mask=mask, ending="row", implementation=name, **settings, return_weights=True
    )
    out, weights = run(implementation)
    chex.assert_trees_all_close((out, weights), run("auto"), atol=2e-6)
    np.testing.assert_allclose(weights.sum((-1, -2)), 7.0, rtol=1e-5)
    assert np.ptp(np.asarray(weights).sum(-1)) > 0.05


def row_mass_predictor(rng, *, size=0.3):
    family = aj.SlicedPotentials(aj.slice_directions(0, 6, 4))
    head = aj.predictor.LinearHead(problems.normal(rng, 6, size=size))
    return operators.sliced("float32", side="key").replace(row_mass=RowMass((family,), head))


def test_predicted_row_masses_follow_the_formula(rng, x64):
    q, k, v = problems.attention_inputs(rng, dtype="float64")
    mask = problems.array(problems.random_mask(rng, 2, 1, 7, 5))
    family = aj.SlicedPotentials(aj.slice_directions(0, 6, 4).astype(jnp.float64))
    head = aj.predictor.LinearHead(problems.normal(rng, 6, dtype="float64"))

    @jax.jit
    def evaluate(spec):
        p = make_problem(q, k, v, None, mask, scale=None)
        h = family(p.q, p.k, query_valid=p.validity.query, key_valid=p.validity.key)
        return row_sums(p, spec, RowMass((family,), head)), h, p.validity

    for key_mass in ("balanced", "unit"):
        spec = aj.SinkhornSpec(num_steps=4, key_mass=key_mass)
        rows, h, validity = jax.tree.map(np.asarray, evaluate(spec))
        rows, active = rows[..., 0], validity.query
        h = np.exp(h @ np.asarray(head.coefficients))
        mass = validity.key.sum(-1) if key_mass == "unit" else active.sum(-1)
        expected = mass[..., None] * h / (h * active).sum(-1, keepdims=True)
        np.testing.assert_allclose(rows * active, expected * active, rtol=1e-10)


@pytest.mark.parametrize("key_mass", ["balanced", "unit"])
def test_the_target_of_the_row_mass_is_the_teachers_row_sums(rng, x64, key_mass):
    q, k, v = problems.attention_inputs(rng, queries=7, keys=7, dtype="float64", size=2.0)
    mask = problems.array(problems.token_padding([7, 4], 7))
    spec = aj.SinkhornSpec(num_steps=4, key_mass=key_mass)
    _, weights = aj.sinkhorn_attention(q, k, v, mask=mask, spec=spec, return_weights=True)
    p = make_problem(q, k, v, None, mask, scale=None)
    rows = np.asarray(weights).sum(-1)
    valid = np.asarray(p.validity.query)
    logs = np.log(np.where(valid, rows, 1))
    expected = logs - logs.sum(-1, keepdims=True) / valid.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        np.where(valid, log_row_sums(p, spec), 0), np.where(valid, expected, 0), atol=1e-10
    )


def test_an_example_without_tokens_gives_zeros_and_no_gradient(rng):
    q, k, v = problems.attention_inputs(rng, queries=7, keys=7)
    mask = problems.array(problems.token_padding([7, 0], 7))
    settings = dict(predictor=row_mass_predictor(rng), spec=aj.SinkhornSpec(num_steps=4))

    def loss(q, k, v):
        out = compiled(q, k, v, mask=mask, closures=1, ending="row", **settings)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    chex.assert_tree_all_finite((out, grads))
    assert all((np.asarray(x)[1] == 0).all() for x in (out, *grads))


def test_gradients_of_a_row_ending_match_finite_differences(rng, x64):
    q, k, v = problems.attention_inputs(rng, dtype="float64")
    mask = problems.array(problems.random_mask(rng, 2, 1, 7, 5))
    family = aj.SlicedPotentials(aj.slice_directions(0, 6, 4).astype(jnp.float64))
    w, r = (problems.normal(rng, 6, dtype="float64", size=0.3) for _ in range(2))
    mixing = problems.normal(rng, 2, 7, 3, 4, dtype="float64")

    @jax.jit
    def loss(q, k, v, w, r):
        predictor = aj.Predictor(
            (family,), coefficients=w, side="key",
            row_mass=RowMass((family,), aj.predictor.LinearHead(r)),
        )  # fmt: skip
        spec = aj.SinkhornSpec(num_steps=4, key_mass="unit")
        out = aj.asap_attention(
            q, k, v, mask=mask, predictor=predictor, spec=spec, closures=1, ending="row"
        )
        return jnp.sum(mixing * out)

    slope, measured = problems.slope(loss, (q, k, v, w, r), rng)
    np.testing.assert_allclose(slope, measured, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"ending": "rows"}, ValueError, r"ending.*'rows'.*teacher.*row"),
        ({"closures": 2}, ValueError, r"closures=2 from side='key' end on a column.*num_steps=4"),
        (
            {"closures": "one_sided", "predictor": operators.sliced("float32")},
            ValueError,
            "one_sided.*columns",
        ),
        ({"closures": "none"}, TypeError, "DualPair"),
    ],
)
def test_endings_that_do_not_fit_are_refused(rng, settings, error, match):
    q, k, v = problems.attention_inputs(rng)
    predictor = operators.sliced("float32", side="key")
    settings = dict(closures=1, ending="row", predictor=predictor) | settings
    with pytest.raises(error, match=match):
        aj.asap_attention(q, k, v, spec=aj.SinkhornSpec(num_steps=4), **settings)


@pytest.mark.parametrize(
    ("num_steps", "ending", "closures"), [(5, "row", 1), (5, "teacher", 1), (4, "teacher", 2)]
)
def test_row_masses_are_for_row_endings_of_column_ending_teachers(rng, num_steps, ending, closures):
    q, k, v = problems.attention_inputs(rng)
    attend = functools.partial(
        aj.asap_attention, spec=aj.SinkhornSpec(num_steps=num_steps), ending=ending
    )
    with pytest.raises(ValueError, match=r"row_mass is for ending='row'"):
        attend(q, k, v, predictor=row_mass_predictor(rng), closures=closures)


# ------------------------------------------------------------------------------- the key bias


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("settings", [{}, {"key_mass": "unit", "epsilon": 0.7, "scale": 0.4}])
def test_a_state_gives_the_bias_for_any_attention_kernel(rng, settings, masked):
    q, k, v = problems.attention_inputs(rng)
    mask = problems.array(problems.key_padding([5, 3], 5)) if masked else None
    spec = aj.SinkhornSpec(num_steps=4, **settings)
    predictors = operators.sliced("float32", side="key"), row_mass_predictor(rng)
    for predictor in predictors:
        state = aj.CompiledState(predictor, spec, closures=1, ending="row")
        bias, scale, rows = jax.jit(state.to_bias)(q, k, None, mask)
        chex.assert_shape(bias, (2, 3, 1, 5))
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            out = jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, scale=float(scale))
            out = out if rows is None else rows * out
        expected = compiled(
            q, k, v, mask=mask, predictor=predictor, spec=spec, closures=1, ending="row"
        )
        chex.assert_trees_all_close(out, expected, atol=2e-6)


def test_layers_that_are_not_one_softmax_have_no_bias(rng):
    q, k, _ = problems.attention_inputs(rng)
    spec, predictor = aj.SinkhornSpec(num_steps=4), operators.sliced("float32", side="key")
    with pytest.raises(ValueError, match="closures=1 is a bias on the keys, got 3"):
        aj.CompiledState(predictor, spec, closures=3, ending="row").to_bias(q, k)
    from_queries = aj.CompiledState(operators.sliced("float32"), spec, closures=1, ending="row")
    with pytest.raises(ValueError, match=r"one closure from a key dual.*side='query'"):
        from_queries.to_bias(q, k)
    with pytest.raises(ValueError, match=r"ending='teacher' of a teacher with num_steps=4"):
        aj.CompiledState(predictor, spec, closures=1).to_bias(q, k)
    state = aj.CompiledState(predictor, spec, closures=1, ending="row")
    with pytest.raises(ValueError, match=r"head_dim of query and key differ: query \(.*, 4\), key"):
        state.to_bias(q, k[..., :3])


def test_the_bias_of_a_call_and_queries_without_keys_are_honoured(rng):
    q, k, v = problems.attention_inputs(rng)
    own = problems.normal(rng, 1, 3, 7, 5)
    mask = problems.random_mask(rng, 2, 1, 7, 5)
    mask[0, 0, 3] = False
    mask = problems.array(mask)
    spec = aj.SinkhornSpec(num_steps=4, epsilon=0.5)
    first = aj.Predictor(
        directions=aj.slice_directions(0, 6, 4), coefficients=jnp.full(6, 0.1), side="key",
        baseline="first_step",
    )  # fmt: skip

    def by_hand(state):
        bias, scale, rows = state.to_bias(q, k, own, mask)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return rows * jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, scale=scale)

    for predictor in (operators.sliced("float32", side="key"), first):
        state = aj.CompiledState(predictor, spec, closures=1, ending="row")
        out = jax.jit(functools.partial(by_hand, state))()
        settings = dict(predictor=predictor, spec=spec, closures=1, ending="row")
        chex.assert_trees_all_close(out, compiled(q, k, v, own, mask, **settings), atol=5e-6)
        assert (np.asarray(out)[0, 3] == 0).all()


def test_a_stack_of_layers_has_no_single_bias(rng):
    q, k, _ = problems.attention_inputs(rng)
    predictor, spec = operators.sliced("float32", side="key"), aj.SinkhornSpec(num_steps=4)
    state = aj.CompiledState(predictor, spec, 1, jnp.zeros(2), ending="row")
    with pytest.raises(ValueError, match=r"stack of \(2,\) layers"):
        state.to_bias(q, k)
