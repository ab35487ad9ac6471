"""Training through compiled layers: running sums, solve, distance, and what is refused."""

import functools

import chex
import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference
from small_models import FIRST, HEADS, SECOND, SPEC, Model, data, teacher, variables_of

import asap_jax as aj

DECAY, RIDGE = 0.6, 1e-5


@functools.cache
def training(**settings):
    model, _ = teacher()
    return aj.linen.AmortizedTraining(model, **{"decay": DECAY, **settings})


@functools.cache
def refresh(**settings):
    return jax.jit(training(**settings).refresh)


def moved(variables, step):
    """The variables later in training."""
    rng = np.random.default_rng(step)
    move = lambda p: p + problems.normal(rng, *p.shape, dtype=p.dtype, size=0.1)
    return jax.tree.map(move, variables)


# ------------------------------------------------------------------------------------- the fit


def rows_by_hand(variables, x, closures):
    """Features (H, rows, F) and targets (H, rows) of the first layer on one batch, in NumPy."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"]["layer_0"])
    dense = lambda name: np.einsum("bnf,fhd->bhnd", x, p[name]["kernel"]) + p[name]["bias"][:, None]

    def head(q, k):
        side, dual = reference.aligned_dual(
            reference.scores(q, k), num_steps=SPEC.num_steps, before_end=closures
        )
        own, other = (q, k) if side == "query" else (k, q)
        target = reference.center(dual + reference.query_shift(own))
        return reference.moment_features(own, other), target

    features, targets = reference.batched(head, (dense("query"), 2), (dense("key"), 2))
    by_head = lambda z: np.moveaxis(z, 1, 0).reshape(HEADS, -1, *z.shape[3:])
    return by_head(features), by_head(targets)


@pytest.mark.parametrize("closures", [1, 2])
def test_the_state_is_the_weighted_least_squares_fit_of_all_batches(rng, x64, closures):
    """Three batches at three states of the teacher; the oldest has the weight decay squared."""
    model = Model((SPEC,), attention_settings=flax.core.FrozenDict(param_dtype=jnp.float64))
    variables = jax.tree.map(lambda p: p.astype(jnp.float64), variables_of(model, rng))
    batches = [x.astype(jnp.float64) for x in data(rng)]
    amortized = aj.linen.AmortizedTraining(model, closures=closures, decay=DECAY)
    state = amortized.init(variables, batches[0])
    parts = [rows_by_hand(variables, batches[0], closures)]
    for step in (1, 2):
        variables = moved(variables, step)
        state = amortized.refresh(state, variables, batches[step])
        parts.append(rows_by_hand(variables, batches[step], closures))
    features, targets = (np.concatenate(z, 1) for z in zip(*parts, strict=True))
    weights = np.repeat(DECAY ** np.array([2, 1, 0]), parts[0][1].shape[1])
    (sums,) = state.sums[FIRST]
    chex.assert_type(sums.gram, jnp.float64)
    for head, (x, y) in enumerate(zip(features, targets, strict=True)):
        gram = x.T @ (weights[:, None] * x)
        np.testing.assert_allclose(sums.gram[head], gram, rtol=0, atol=1e-9)
        np.testing.assert_allclose(sums.moment[head], x.T @ (weights * y), rtol=0, atol=1e-9)
        np.testing.assert_allclose(sums.num_rows[head], weights.sum(), rtol=1e-12)
        # Ridge regression as ordinary least squares with further rows.
        root = np.sqrt(weights)
        rows = np.concatenate([root[:, None] * x, np.diag(np.sqrt(RIDGE * np.diag(gram)))])
        expected, *_ = np.linalg.lstsq(rows, np.append(root * y, np.zeros(x.shape[1])), rcond=None)
        found = state.layers[FIRST].predictor.head.coefficients[head]
        np.testing.assert_allclose(x @ np.asarray(found), x @ expected, rtol=0, atol=1e-6)


def compiled_states(model, variables, batches, **settings):
    """Those of a compile to all batches, without the calibration statistics of a finished model."""
    states = aj.linen.compile(model, variables, batches, holdout=0, **settings).states
    bare = lambda state: state.replace(predictor=state.predictor.replace(statistics=None))
    return {path: bare(state) for path, state in states.items()}


CASES = {
    "column end": {},
    "one call": {"ending": "row"},
    "row masses": {"ending": "row", "fit": "moments, row mass"},
    "three closures": {"closures": 3},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("unmeasured")
def test_a_fresh_state_is_the_compile_of_its_batch(rng, settings):
    (batch,), (model, variables) = data(rng, 1), teacher()
    state = training(**settings).init(variables, batch)
    expected = compiled_states(model, variables, [batch], **{"fit": "moments", **settings})
    chex.assert_trees_all_close(state.layers, expected, rtol=1e-6, atol=1e-6)
    assert list(state.layers) == list(expected) == [FIRST, SECOND]


def test_without_decay_two_refreshes_are_the_compile_of_two_batches(rng):
    batches, (model, variables) = data(rng, 2), teacher()
    amortized = training(decay=1)
    state = amortized.init(variables, batches[0])
    state = refresh(decay=1)(state, variables, batches[1])
    expected = compiled_states(model, variables, batches)
    chex.assert_trees_all_close(state.layers, expected, rtol=1e-3, atol=1e-3)


def test_with_decay_0_only_the_latest_batch_counts(rng):
    batches, (model, variables) = data(rng, 2), teacher()
    state = training(decay=0).init(moved(variables, 1), batches[0])
    state = refresh(decay=0)(state, variables, batches[1])
    expected = compiled_states(model, variables, batches[1:])
    chex.assert_trees_all_close(state.layers, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["init", "refresh"])
def test_under_jit_a_state_is_the_same(rng, method):
    batches, (_, variables) = data(rng, 2), teacher()
    amortized = training()
    given = (variables, batches[1])
    if method == "refresh":
        given = (amortized.init(variables, batches[0]), *given)
    eager = getattr(amortized, method)(*given)
    jitted = jax.jit(getattr(amortized, method))(*given)
    chex.assert_trees_all_close(eager.sums, jitted.sums, rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(eager, jitted, rtol=1e-2, atol=1e-3)
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)


# ---------------------------------------------------------------------------------- the distance


def weights_of(model, variables, x):
    """Weights (B, H, N, M) of both layers, as the modules sow them for the inputs they get."""
    _, sown = model.apply(variables, x, mutable=["asap_capture"])
    return {
        path: aj.sinkhorn_attention(*record["record"].tokens, spec=SPEC, return_weights=True)[1]
        for path, record in sown["asap_capture"].items()
    }, sown["asap_capture"]


def test_distances_are_those_of_the_new_and_of_the_replaced_layers(rng):
    batches, (model, variables) = data(rng, 2), teacher()
    amortized = training()
    before = amortized.init(variables, batches[0])
    after = amortized.refresh(before, variables, batches[1])
    true, records = weights_of(model, variables, batches[1])
    for found, state in ((after.rel_l2, after), (after.rel_l2_before, before)):
        assert set(found) == {FIRST, SECOND}
        for path, layer in state.layers.items():
            _, weights = aj.asap_attention(
                *records[path]["record"].tokens,
                predictor=layer.predictor,
                spec=SPEC,
                closures=2,
                return_weights=True,
            )
            square = lambda z: np.square(np.asarray(z, np.float64)).sum((0, 2, 3))
            error = np.sqrt(square(weights - true[path]) / square(true[path])).mean()
            np.testing.assert_allclose(found[path], error, rtol=1e-3)
            assert error > 1e-3
        chex.assert_trees_all_close(
            amortized.distance(state, variables, batches[1]), found, rtol=1e-5
        )


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fit": "paper"}, ValueError, "fit must be a Candidate .* sums .*got PaperFit"),
        ({"fit": "auto"}, ValueError, "fit must be a Candidate .* sums .*got AutoFit"),
        ({"fit": "codebook"}, ValueError, "rounds=0, chain=False, tuned=0; got 'codebook'"),
        ({"fit": "moments, chain"}, ValueError, "got 'moments, chain'"),
        ({"fit": "nothing"}, ValueError, "fit='nothing' is not known"),
        ({"decay": 1.5}, ValueError, r"decay must be in \[0, 1\], got 1.5"),
        ({"decay": -0.1}, ValueError, "decay must be >= 0"),
        ({"decay": "fast"}, TypeError, "decay must be a real number"),
        ({"closures": 0}, ValueError, "closures must be >= 1"),
        ({"closures": "two_sided"}, ValueError, "closures='two_sided'"),
        ({"ending": "column"}, ValueError, "ending='column' is not known"),
        ({"layers": []}, ValueError, r"layers=\(\)"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(settings, error, message):
    model, _ = teacher()
    with pytest.raises(error, match=message):
        aj.linen.AmortizedTraining(model, **settings)
    with pytest.raises(error, match=message):
        aj.nnx.AmortizedTraining(**settings)


def test_arguments_of_another_kind_are_refused_by_name(rng):
    (batch,), (_, variables) = data(rng, 1), teacher()
    amortized = training()
    with pytest.raises(TypeError, match="model must be a linen Module"):
        aj.linen.AmortizedTraining("model")
    with pytest.raises(TypeError, match="variables must be the variables of a linen model"):
        amortized.init(3, batch)
    with pytest.raises(TypeError, match="the batch of this refresh must hold arrays only"):
        amortized.init(variables, "text")
    with pytest.raises(TypeError, match="state must be the AmortizedState of init, got dict"):
        amortized.refresh({}, variables, batch)
    with pytest.raises(TypeError, match="state must be the AmortizedState of init, got None"):
        amortized.variables(None, variables)
    with pytest.raises(ValueError, match=r"layers=\['layer_9'\] are not in the model"):
        training(layers=("layer_9",)).init(variables, batch)
    with pytest.raises(ValueError, match="closures=4 needs a teacher of more steps"):
        training(closures=4).init(variables, batch)
    dense = nn.Dense(2)
    own = dense.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match="no SinkhornAttention layer ran"):
        aj.linen.AmortizedTraining(dense).init(own, batch)


def test_a_state_of_other_settings_is_refused(rng):
    """The sums have the same shapes, but belong to another dual."""
    (batch,), (_, variables) = data(rng, 1), teacher()
    state = training(closures=2).init(variables, batch)
    with pytest.raises(ValueError, match="it was fitted with {'closures': 2"):
        training(closures=1, ending="row").refresh(state, variables, batch)


def test_a_state_of_other_layers_is_refused(rng):
    (batch,), (_, variables) = data(rng, 1), teacher()
    state = training(layers=(FIRST,)).init(variables, batch)
    assert set(state.layers) == {FIRST}
    with pytest.raises(ValueError, match=r"state has the layers \['SinkhornAttention_0'\], but"):
        training().refresh(state, variables, batch)
    with pytest.raises(ValueError, match="state does not fit layer 'SinkhornAttention_0'"):
        training(layers=(FIRST,), ending="row", fit="moments, row mass").refresh(
            state, variables, batch
        )


def test_a_batch_that_is_not_finite_is_an_error_or_left_out(rng):
    """Eagerly it is named; under jit, where values are not known, the fit stays as it was."""
    batches, (_, variables) = data(rng, 2), teacher()
    state = training().init(variables, batches[0])
    wild = batches[1].at[0, 0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="batch of this refresh gives a value that is not finite"):
        training().refresh(state, variables, wild)
    after = refresh()(state, variables, wild)
    chex.assert_trees_all_equal(after.sums, state.sums)
    chex.assert_trees_all_close(after.layers, state.layers, rtol=1e-2, atol=1e-3)
    assert all(np.isnan(x) for x in after.rel_l2.values())


def test_padding_without_any_token_is_an_error_that_says_so(rng):
    (batch,), (_, variables) = data(rng, 1), teacher()
    mask = jnp.zeros((len(batch), 1, 1, batch.shape[1]), bool)
    with pytest.raises(ValueError, match="no active token"):
        training().init(variables, (batch, mask))


def test_a_guard_is_refused_because_there_are_no_statistics():
    with pytest.raises(ValueError, match="guard=True needs the statistics"):
        training(fit=aj.Candidate("moments", padding="none", guard=True))
