"""Compiling a trained model: what may be given, what is fitted, what is reported."""

import functools
import math

import chex
import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_models import (
    BATCH,
    FEATURES,
    FIRST,
    HEADS,
    LENGTH,
    PAPER,
    SECOND,
    SPEC,
    Model,
    compile_model,
    data,
    teacher,
    variables_of,
)

import asap_jax as aj

CALLS = {"ASAP-0": 2, "ASAP": 4, "Sinkhorn S=1": 1, "Sinkhorn S=2": 3, "Sinkhorn S=3": 3}


def coefficients(result, path=FIRST):
    return result.states[path].predictor.coefficients


# ------------------------------------------------------------------------ how batches may be given


FORMS = {
    "a tuple": lambda batches: [(x,) for x in batches],
    "a list": lambda batches: [[x] for x in batches],
    "a dict": lambda batches: [{"x": x} for x in batches],
    "a NumPy array": lambda batches: [np.asarray(x) for x in batches],
    "from a generator": lambda batches: (x for x in batches),
    "in a tuple": tuple,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_form_of_batches_does_not_change_the_fit(rng, form):
    batches = data(rng)
    result = compile_model(form(batches))
    chex.assert_trees_all_equal(result.states, compile_model(batches).states)
    assert (result.report.num_fit_batches, result.report.num_report_batches) == (2, 1)


@pytest.mark.parametrize("form", [lambda x: (x,), lambda x: {"inputs_q": x}], ids=["tuple", "dict"])
@pytest.mark.usefixtures("unmeasured")
def test_batches_of_an_nnx_model_may_be_tuples_or_dicts(rng, form):
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, attention_fn=aj.nnx.SinkhornAttention(SPEC),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    batches = data(rng)
    result = aj.nnx.compile(layer, [form(x) for x in batches])
    expected = aj.nnx.compile(layer, batches)
    chex.assert_trees_all_equal(result.states, expected.states)


@pytest.mark.usefixtures("unmeasured")
def test_masks_count_in_batches_in_apply_kwargs_and_in_forward(rng):
    """In a dict batch or as apply_kwargs; either way they count."""
    batches, mask = data(rng), problems.token_padding([LENGTH, 4, 5], LENGTH)
    by_batch = compile_model([{"x": x, "mask": mask} for x in batches])
    by_keyword = compile_model(batches, apply_kwargs={"mask": mask, "train": False})
    by_forward = compile_model(
        batches, forward=lambda variables, x: teacher()[0].apply(variables, x, mask, train=False)
    )
    chex.assert_trees_all_equal(by_keyword.states, by_batch.states)
    chex.assert_trees_all_equal(by_forward.states, by_batch.states)
    assert jnp.abs(coefficients(by_batch) - coefficients(compile_model(batches))).max() > 1e-2


@pytest.mark.parametrize(
    "mutable", ["batch_stats", ["batch_stats"], True, flax.core.DenyList("params")], ids=str
)
def test_forward_can_request_mutable_collections(rng, mutable):
    batches, model = data(rng), teacher()[0]
    forward = lambda variables, x: model.apply(variables, x, mutable=mutable)[0]
    result = compile_model(batches, forward=forward)
    chex.assert_trees_all_equal(result.states, compile_model(batches).states)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_jitted_forward_works_if_it_returns_the_records(rng, warm):
    """And it may be used again: the second compile meets its traces in a cache."""
    batches, (model, variables) = data(rng), teacher()
    forward = jax.jit(lambda variables, x: model.apply(variables, x, mutable=["asap_capture"]))
    if warm:
        forward(variables, batches[0])
    first, second = (compile_model(batches, forward=forward) for _ in range(2))
    chex.assert_trees_all_equal(second.states, first.states)
    chex.assert_trees_all_close(first.states, compile_model(batches).states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_jitted_forward_that_drops_the_records_is_an_error_that_names_the_remedy(rng, warm):
    batches, (model, variables) = data(rng), teacher()
    forward = jax.jit(lambda variables, x: model.apply(variables, x))
    if warm:
        forward(variables, batches[0])
    with pytest.raises(ValueError, match="asap_capture"):
        compile_model(batches, forward=forward)


@pytest.mark.parametrize("calls", [0, 2])
def test_forward_must_run_the_model_once(rng, calls):
    model = teacher()[0]

    def forward(variables, x):
        for _ in range(calls):
            x = model.apply(variables, x)
        return x

    with pytest.raises(ValueError, match=f"exactly once, it did {calls} times"):
        compile_model(data(rng), forward=forward)


# ----------------------------------------------------------------------------- what is not accepted


@pytest.mark.parametrize(
    "batches",
    [jnp.ones((BATCH, LENGTH, FEATURES)), np.ones((BATCH, LENGTH, FEATURES)), {"x": 1}, "x"],
    ids=["jax array", "NumPy array", "dict", "string"],
)
def test_a_single_batch_instead_of_an_iterable_is_refused(batches):
    with pytest.raises(TypeError, match=r"batches must be an iterable .* give \[batch\]"):
        compile_model(batches)


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize(
    "second", [np.ones((BATCH, LENGTH), bool), np.ones((BATCH, LENGTH, FEATURES), np.int32)]
)
def test_inputs_of_one_batch_are_not_read_as_batches(kind, second):
    batches = kind([jnp.ones((BATCH, LENGTH, FEATURES)), second])
    with pytest.raises(TypeError, match=r"looks like a single batch, .*float32.* give \[batch\]"):
        compile_model(batches)


@pytest.mark.parametrize("batches", [[], (), iter(())], ids=["list", "tuple", "generator"])
def test_an_empty_iterable_of_batches_is_refused(batches):
    with pytest.raises(ValueError, match="batches holds no batch"):
        compile_model(batches)


def test_batches_without_an_active_token_are_refused(rng):
    batch = {"x": data(rng)[0], "mask": np.zeros((BATCH, 1, LENGTH, LENGTH), bool)}
    with pytest.raises(ValueError, match=f"'{FIRST}': no active token"):
        compile_model([batch])


def test_a_model_without_the_layer_is_refused(rng):
    model = nn.MultiHeadDotProductAttention(HEADS)
    with pytest.raises(ValueError, match=r"no SinkhornAttention layer ran.*attention_fn"):
        compile_model(data(rng), model, variables_of(model, rng))


def test_a_teacher_with_one_step_is_refused_unless_its_layer_is_left_out(rng):
    model, variables = teacher((SPEC, aj.SinkhornSpec(num_steps=1)))
    with pytest.raises(ValueError, match=rf"'{SECOND}' has num_steps=1.*layers="):
        compile_model(data(rng), model, variables)
    assert list(compile_model(data(rng), model, variables, layers=[FIRST]).states) == [FIRST]


REFUSED = {
    "holdout": (1.0, -0.1, float("nan")),
    "ridge": (-1.0, float("inf")),
    "num_slices": (0, -1),
    "fit": ("cheap", "Moments", ""),
    "objective": ("l1",),
    "coefficients": ("each",),
    "closures": ("three_sided", 0, -1, 4, 5),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in REFUSED.items() for v in vs])
def test_settings_out_of_range_are_refused(rng, name, value):
    with pytest.raises(ValueError, match=name):
        compile_model(data(rng), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("closures", True), ("closures", 1.0), ("num_slices", 2.5), ("ridge", "1"), ("seed", "a"),
     ("seed", 1.5), ("holdout", None), ("layers", FIRST), ("fit", None), ("fit", 3),
     ("fit", aj.PaperFit)],
)  # fmt: skip
def test_settings_of_another_type_are_refused(rng, name, value):
    with pytest.raises(TypeError, match=name):
        compile_model(data(rng), **{name: value})


def test_an_error_about_too_many_closures_names_the_layer(rng):
    message = rf"closures=4 needs a teacher of more steps than layer '{FIRST}' with num_steps=4"
    for closures in (4, np.int64(4)):
        with pytest.raises(ValueError, match=message):
            compile_model(data(rng), closures=closures)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_error_about_data_that_are_not_finite_names_batch_and_layer(rng, index, bad):
    """The second of three batches is held out; it is checked all the same."""
    batches = data(rng)
    batches[index] = batches[index].at[1, 2, 3].set(bad)
    with pytest.raises(ValueError, match=rf"batch {index}\b.*not finite.*'{FIRST}'"):
        compile_model(batches)


def test_a_held_out_batch_without_an_active_token_is_refused(rng):
    """Its figures would all be NaN."""
    batches = [{"x": x, "mask": np.ones((BATCH, 1, LENGTH, LENGTH), bool)} for x in data(rng)]
    batches[1]["mask"] = np.zeros_like(batches[1]["mask"])
    with pytest.raises(ValueError, match="no active token"):
        compile_model(batches)


def test_a_mask_with_values_other_than_zero_and_one_is_refused(rng):
    mask = np.full((BATCH, 1, LENGTH, LENGTH), 0.5, np.float32)
    with pytest.raises(ValueError, match="must hold only 0 and 1"):
        compile_model([{"x": x, "mask": mask} for x in data(rng)])


# ------------------------------------------------------------------------------------ which layers


def test_layers_are_chosen_by_path(rng):
    batches = data(rng)
    every, one = compile_model(batches), compile_model(batches, layers=[SECOND])
    assert list(every.states) == list(every.report.layers) == [FIRST, SECOND]
    assert list(one.states) == list(one.report.layers) == list(one.variables["asap"]) == [SECOND]
    chex.assert_trees_all_equal(one.states[SECOND], every.states[SECOND])
    by_generator = compile_model(batches, layers=(path for path in [SECOND]))
    chex.assert_trees_all_equal(by_generator.states, one.states)


def test_unknown_layers_are_refused(rng):
    with pytest.raises(ValueError, match=rf"\['layer_0'\] are not in the model.*{FIRST}.*{SECOND}"):
        compile_model(data(rng), layers=[FIRST, "layer_0"])


def test_an_empty_choice_of_layers_is_refused(rng):
    with pytest.raises(ValueError, match="layers"):
        compile_model(data(rng), layers=[])


@pytest.mark.usefixtures("unmeasured")
def test_more_than_ten_layers_stay_in_order(rng):
    model, variables = teacher((SPEC,) * 11)
    paths = [f"SinkhornAttention_{i}" for i in range(11)]
    assert list(compile_model(data(rng, 1), model, variables).states) == paths


# ---------------------------------------------------------------------------------- what is fitted


def projections(variables, x):
    """Q and k of a layer of the first position, (batch, heads, length, dim), float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    p = p["layer_0"]
    dense = lambda name: np.einsum("bnf,fhd->bhnd", x, p[name]["kernel"]) + p[name]["bias"][:, None]
    return dense("query"), dense("key")


def paper_fit(q, k, directions, *, num_steps, ridge):
    """Least squares from the paper's formulas, one head of one example at a time."""
    rows, targets = [], []
    dim = q.shape[-1]
    per_head = (z.reshape(-1, *z.shape[-2:]) for z in (q, k))
    for queries, keys in zip(*per_head, strict=True):
        kernel = np.exp(queries @ keys.T / math.sqrt(dim))
        u, v = np.ones(len(queries)), np.ones(len(keys))
        for step in range(1, num_steps):  # up to the last row step before the final closure
            if step % 2:
                u = 1 / (kernel @ v)
                source = u
            elif step < num_steps - 1:
                v = len(queries) / len(keys) / (kernel.T @ u)
        dual = np.log(source) + (queries**2).sum(1) / (2 * math.sqrt(dim))
        targets.append(dual - dual.mean())
        columns = []
        for theta in directions:
            a, b = queries @ theta / dim**0.25, np.sort(keys @ theta / dim**0.25)
            order = np.argsort(a)
            potential = np.zeros(len(a))
            for rank, i in enumerate(order):
                potential[i] = a[i] ** 2 / 2 - sum(
                    b[r - 1] * (a[order[r]] - a[order[r - 1]]) for r in range(1, rank + 1)
                )
            columns.append(potential - potential.mean())
        rows.append(np.stack(columns, 1))
    x, y = np.concatenate(rows), np.concatenate(targets)
    return np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y)


@pytest.mark.parametrize("num_steps", [4, 3])
def test_coefficients_are_the_ridge_fit_of_the_paper(rng, num_steps):
    model, variables = teacher((aj.SinkhornSpec(num_steps),))
    batches = data(rng)
    result = compile_model(batches, model, variables, ridge=0.3)
    (family,) = result.states[FIRST].predictor.features
    q, k = projections(variables, np.concatenate([batches[0], batches[2]]))
    expected = paper_fit(q, k, np.asarray(family.directions), num_steps=num_steps, ridge=0.3)
    np.testing.assert_allclose(coefficients(result), expected, rtol=0, atol=2e-5)
    assert result.states[FIRST].predictor.side == "query"
    rows = 2 * BATCH * HEADS * LENGTH
    assert result.report.layers[FIRST].fit["num_rows"] == rows


@pytest.mark.usefixtures("unmeasured")
def test_coefficients_of_a_float64_model_are_float64(rng, x64):
    model = Model((SPEC,), attention_settings=flax.core.FrozenDict(param_dtype=jnp.float64))
    variables = jax.tree.map(lambda p: p.astype(jnp.float64), variables_of(model, rng))
    batches = [x.astype(jnp.float64) for x in data(rng)]
    result = compile_model(batches, model, variables, ridge=np.float64(0.3))
    chex.assert_type(coefficients(result), jnp.float64)
    (family,) = result.states[FIRST].predictor.features
    q, k = projections(variables, np.concatenate([batches[0], batches[2]]))
    bank = np.asarray(family.directions, np.float64)
    bank /= np.linalg.norm(bank, axis=-1, keepdims=True)  # unit in float32 so far
    expected = paper_fit(q, k, bank, num_steps=4, ridge=0.3)
    np.testing.assert_allclose(coefficients(result), expected, rtol=0, atol=1e-10)
    chex.assert_type(model.apply(result.variables, batches[0]), jnp.float64)


def test_a_bfloat16_model_compiles_to_float32_coefficients(rng):
    model = Model((SPEC,), attention_settings=flax.core.FrozenDict(dtype=jnp.bfloat16))
    _, variables = teacher((SPEC,))
    batches = [x.astype(jnp.bfloat16) for x in data(rng)]
    result = compile_model(batches, model, variables, ridge=0.3)
    chex.assert_type(coefficients(result), jnp.float32)
    _, state = model.apply(variables, batches[0], mutable=["asap_capture"])
    record = state["asap_capture"][FIRST]["record"]
    chex.assert_type(record.query, jnp.bfloat16)
    fit = result.report.layers[FIRST]
    assert fit.rows["teacher"]["column_error"] < 1e-6
    assert all(math.isfinite(x) for row in fit.rows.values() for x in row.values())


def by_hand(q, k, directions, *, spec, closures, ridge, mask=None, per_head=False):
    """The fit of either side's dual under any mask, from the references."""
    rows, targets, heads = [], [], []
    for example, head in np.ndindex(q.shape[:2]):
        queries, keys = q[example, head], k[example, head]
        s = reference.scores(queries, keys, scale=spec.scale)
        allowed = None if mask is None else np.broadcast_to(mask, (*q.shape[:2], *s.shape))
        allowed = reference.full_mask(None if mask is None else allowed[example, head], s.shape)
        settings = {"epsilon": spec.epsilon, "mask": allowed, "key_mass": spec.key_mass}
        side, dual = "query", None
        if isinstance(closures, str):
            dual = reference.source_dual(s, num_steps=spec.num_steps, **settings)
        else:
            side, dual = reference.aligned_dual(
                s, num_steps=spec.num_steps, before_end=closures, **settings
            )
        valid = reference.feature_validity(allowed, spec.padding)
        if side == "key":
            queries, keys, valid = keys, queries, valid[::-1]
        dual = reference.center(dual + reference.query_shift(queries, scale=spec.scale), valid[0])
        features = reference.sliced_features(
            queries, keys, directions, scale=spec.scale, query_valid=valid[0], key_valid=valid[1]
        )
        rows.append(features[valid[0]])
        targets.append(dual[valid[0]])
        heads.append(np.full(valid[0].sum(), head))
    x, y, heads = np.concatenate(rows), np.concatenate(targets), np.concatenate(heads)
    if not per_head:
        return reference.ridge_fit(x, y, ridge=ridge)
    return np.stack(
        [reference.ridge_fit(x[heads == h], y[heads == h], ridge=ridge) for h in range(q.shape[1])]
    )


OTHER_SPEC = aj.SinkhornSpec(num_steps=4, epsilon=0.7, key_mass="unit", scale=0.3)
KEYS = problems.key_padding([LENGTH, 4, 5], LENGTH)
ENTRIES = problems.random_mask(np.random.default_rng(3), BATCH, HEADS, LENGTH, LENGTH)
FITS = {
    "two closures": (SPEC, 2, None, {}),
    "odd teacher, two closures": (aj.SinkhornSpec(3), 2, None, {}),
    "one-sided": (SPEC, "one_sided", None, {}),
    "per head": (SPEC, "two_sided", None, {"coefficients": "per_head"}),
    "key mask, another spec": (OTHER_SPEC, "two_sided", KEYS, {}),
    "mask by entry, one closure": (SPEC, 1, ENTRIES, {}),
}


@pytest.mark.parametrize(("spec", "closures", "mask", "settings"), FITS.values(), ids=FITS)
def test_coefficients_follow_closures_masks_and_spec(rng, spec, closures, mask, settings):
    model, variables = teacher((spec,))
    (x,) = data(rng, 1)
    batch = x if mask is None else {"x": x, "mask": mask}
    result = compile_model([batch], model, variables, closures=closures, ridge=0.3, **settings)
    state = result.states[FIRST]
    q, k = projections(variables, np.asarray(x))
    expected = by_hand(
        q, k, np.asarray(state.predictor.features[0].directions), spec=spec, closures=closures,
        ridge=0.3, mask=mask, per_head=bool(settings),
    )  # fmt: skip
    np.testing.assert_allclose(coefficients(result), expected, rtol=0, atol=2e-5)
    assert (state.closures, state.spec) == (closures, spec)
    operator = {"one_sided": "ASAP-0", "two_sided": "ASAP"}.get(
        closures, f"compiled, {closures} closure{'s' if closures == 2 else ''}"
    )
    assert operator in result.report.layers[FIRST].rows
    side = "query" if isinstance(closures, str) else spec.side_before_end(closures)
    assert state.predictor.side == side
    # the layer ends on the teacher's last step, or on a key step where the paper's ASAP-0 does
    row = result.report.layers[FIRST].rows[operator]
    ends_on_keys = spec.last_step == "column" or closures == "one_sided"
    assert row["column_error" if ends_on_keys else "row_error"] < 1e-5


def test_all_layers_can_share_one_coefficient_vector(rng):
    batches = data(rng)
    shared = compile_model(batches, coefficients="shared")
    chex.assert_trees_all_equal(coefficients(shared), coefficients(shared, SECOND))
    own = compile_model(batches)
    assert jnp.abs(coefficients(own) - coefficients(shared)).max() > 1e-3


def test_a_numpy_number_of_closures_becomes_a_python_int(rng):
    batches = data(rng)
    result = compile_model(batches, closures=np.int64(1))
    assert type(result.states[FIRST].closures) is int
    chex.assert_trees_all_equal(result.states, compile_model(batches, closures=1).states)


def test_closures_of_the_wrong_parity_are_refused_by_the_layer(rng):
    batches, (model, _) = data(rng), teacher()
    result = compile_model(batches, closures=1)
    state = result.states[FIRST].replace(closures=2)
    variables = {**result.variables, "asap": {FIRST: {"state": state}}}
    with pytest.raises(ValueError, match="closures=2 from side='query' end on a row step"):
        model.apply(variables, batches[0])


def test_padding_does_not_change_the_fit_or_the_report(rng):
    """With queries and keys masked; whatever the padded tokens hold."""
    model, variables = teacher()
    real = data(rng, 2, length=4)
    expected = compile_model(real, model, variables)
    for fill in (1.0, np.nan, np.inf):
        padded = [jnp.pad(x, ((0, 0), (0, 2), (0, 0)), constant_values=fill) for x in real]
        mask = problems.token_padding([4] * BATCH, LENGTH)
        result = compile_model([{"x": x, "mask": mask} for x in padded], model, variables)
        for path, state in expected.states.items():
            chex.assert_trees_all_close(result.states[path], state, rtol=1e-5, atol=1e-5)
            found, wanted = result.report.layers[path], expected.report.layers[path]
            chex.assert_trees_all_close(found.rows, wanted.rows, rtol=1e-3, atol=1e-6)
            assert found.fit["num_rows"] == wanted.fit["num_rows"]


@pytest.mark.usefixtures("unmeasured")
def test_dropout_is_off_during_calibration(rng):
    batches = data(rng)
    dropping, (plain, variables) = Model(rate=0.5), teacher()
    out = jax.jit(lambda key: dropping.apply(variables, batches[0], rngs={"dropout": key}))
    assert jnp.abs(out(jax.random.key(1)) - out(jax.random.key(2))).max() > 1e-2
    results = [
        compile_model(
            batches, dropping, variables, apply_kwargs={"rngs": {"dropout": jax.random.key(key)}}
        )
        for key in (1, 2)
    ]
    chex.assert_trees_all_equal(results[0].states, results[1].states)
    chex.assert_trees_all_close(
        results[0].states, compile_model(batches, plain, variables).states, rtol=1e-4, atol=1e-5
    )
    chex.assert_trees_all_equal(compile_model(batches, dropping, variables).states,
                                results[0].states)  # fmt: skip


def test_a_seed_always_gives_the_same_fit(rng):
    batches = data(rng)
    first, again, other = (compile_model(batches, seed=seed) for seed in (5, 5, 6))
    chex.assert_trees_all_equal(first.states, again.states)
    directions = lambda result: result.states[FIRST].predictor.features[0].directions
    assert jnp.abs(directions(first) - directions(other)).max() > 1e-2


@pytest.mark.usefixtures("unmeasured")
def test_adding_up_sums_of_parts_gives_the_fit_of_all_batches(rng):
    """Two batches, one of twice the size, and that one spread over two devices."""
    parts = data(rng, 2)
    whole = jnp.concatenate(parts)
    expected = compile_model([whole], holdout=0)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("data")))
    assert len(spread.sharding.device_set) == 2
    for batches in (parts, [spread]):
        result = compile_model(batches, holdout=0)
        for path in (FIRST, SECOND):
            chex.assert_trees_all_close(
                jax.device_get(coefficients(result, path)), coefficients(expected, path), atol=1e-5
            )


def test_batches_of_several_lengths_are_pooled(rng):
    model, variables = teacher((SPEC,))
    batches = data(rng, 1) + data(rng, 1, length=4)
    result = compile_model(batches, model, variables, holdout=0, ridge=0.3)
    assert result.report.layers[FIRST].fit["num_rows"] == BATCH * HEADS * (LENGTH + 4)
    out = jax.jit(model.apply)(result.variables, data(rng, 1, batch=2, length=5)[0])
    chex.assert_shape(out, (2, 5, FEATURES))
    chex.assert_tree_all_finite(out)


# ------------------------------------------------------------------------------- the given teacher


def test_compiling_does_not_change_the_variables(rng):
    batches, (model, variables) = data(rng), teacher()
    before = jax.tree.map(jnp.array, variables)
    result = compile_model(batches, model, variables)
    chex.assert_trees_all_equal(variables, before)
    assert set(variables) == {"params"}
    assert set(result.variables) == {"params", "asap"}
    chex.assert_trees_all_equal(result.variables["params"], before["params"])
    apply = jax.jit(model.apply)
    outs = apply(result.variables, batches[0]), apply(variables, batches[0])
    assert jnp.abs(outs[0] - outs[1]).max() > 1e-3


def test_compiling_compiled_variables_gives_the_same_states(rng):
    batches, model = data(rng), teacher()[0]
    first = compile_model(batches)
    again = compile_model(batches, model, flax.core.freeze(first.variables))
    chex.assert_trees_all_equal(again.states, first.states)


def test_compiling_keeps_other_collections(rng):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.BatchNorm(use_running_average=not train)(x)
            return Model((SPEC,), name="model")(x)

    batches, model = data(rng), Normed()
    variables = variables_of(model, rng)
    variables["batch_stats"] = jax.tree.map(jnp.abs, variables["batch_stats"])
    before = jax.tree.map(jnp.array, variables["batch_stats"])
    path = f"model/{FIRST}"
    running = compile_model(batches, model, variables)
    chex.assert_trees_all_equal(running.variables["batch_stats"], before)
    assert list(running.states) == [path]
    training = compile_model(
        batches, model, variables, apply_kwargs={"train": True, "mutable": ["batch_stats"]}
    )
    chex.assert_trees_all_equal(training.variables["batch_stats"], before)
    assert jnp.abs(coefficients(running, path) - coefficients(training, path)).max() > 1e-3


def test_calibration_batch_by_batch_equals_compile(rng):
    batches, (model, variables) = data(rng), teacher()
    calibration = aj.linen.Calibration(model, aj.Options(fit=PAPER))
    for batch in (batches[0], batches[2]):
        calibration.add(variables, batch)
    result = calibration.finish(variables, [batches[1]])
    expected = compile_model(batches)
    chex.assert_trees_all_equal(result.states, expected.states)
    for path, layer in expected.report.layers.items():
        chex.assert_trees_all_close(result.report.layers[path].rows, layer.rows)


# --------------------------------------------------------------------------------------- the report


@pytest.mark.parametrize(
    ("batches", "holdout", "fit", "held_out"),
    [(1, 0.2, 1, 0), (2, 0.2, 1, 1), (5, 0.2, 4, 1), (10, 0.2, 8, 2), (4, 0.5, 2, 2), (3, 0, 3, 0),
     (1, 0.9, 1, 0), (2, 0.9, 1, 1)],
)  # fmt: skip
def test_holdout_sets_how_many_batches_are_held_out(rng, batches, holdout, fit, held_out):
    model, variables = teacher((SPEC,))
    result = compile_model(data(rng, batches), model, variables, holdout=holdout)
    report = result.report
    assert list(result.states) == [FIRST]
    assert report.held_out == bool(held_out)
    assert report.num_fit_batches == fit
    assert report.num_report_batches == (held_out or 1)
    assert report.layers[FIRST].fit["num_rows"] == fit * BATCH * HEADS * LENGTH
    assert ("held-out" if held_out else "that the fit has seen") in str(report)


def test_held_out_batches_do_not_change_the_fit(rng):
    batches = data(rng)
    first = compile_model(batches)
    batches[1] = 2 * batches[1]
    second = compile_model(batches)
    chex.assert_trees_all_equal(first.states, second.states)
    figures = lambda result: result.report.layers[FIRST].rows["ASAP"]["rel_l2"]
    assert figures(first) != figures(second)


def test_report_figures_are_the_metrics_on_the_held_out_batch(rng):
    batches, (model, variables) = data(rng), teacher()
    mask = problems.token_padding([LENGTH, 4, 5], LENGTH)
    result = compile_model([{"x": x, "mask": mask} for x in batches])
    _, state = jax.jit(functools.partial(model.apply, train=False, mutable=["asap_capture"]))(
        variables, batches[1], mask
    )
    for path, found in state["asap_capture"].items():
        r = found["record"]
        run = lambda function, r=r, **settings: jax.jit(
            functools.partial(function, return_weights=True, **settings)
        )(r.query, r.key, r.value, mask=r.mask)
        predictor = result.states[path].predictor
        asap = functools.partial(run, aj.asap_attention, predictor=predictor, spec=SPEC)
        operators = {
            "ASAP-0": asap(closures="one_sided"),
            "ASAP": asap(closures="two_sided"),
            "Sinkhorn S=1": run(aj.sinkhorn_attention, spec=aj.SinkhornSpec(1)),
            "Sinkhorn S=2": run(aj.sinkhorn_attention, spec=aj.SinkhornSpec(2)),
            "Sinkhorn S=3": run(aj.sinkhorn_attention, spec=aj.SinkhornSpec(3)),
            "teacher": run(aj.sinkhorn_attention, spec=SPEC),
        }
        rows = result.report.layers[path].rows
        assert set(rows) == set(operators)
        out, weights = operators["teacher"]
        valid = mask.any(-1)
        for name, (out_, weights_) in operators.items():
            expected = {
                "rel_l2": aj.metrics.attention_rel_l2(weights_, weights),
                "calls": CALLS.get(name, 5),
                "output_rel_l2": aj.metrics.output_rel_l2(out_, out),
                "output_rmse": aj.metrics.output_rmse(out_, out, query_valid=valid[:, 0]),
                "row_error": aj.metrics.row_error(weights_, valid),
                "column_error": aj.metrics.column_error(weights_, valid),
            }
            for metric, value in expected.items():
                np.testing.assert_allclose(
                    rows[name][metric], value, rtol=1e-3, atol=1e-6, err_msg=f"{name} {metric}"
                )


def test_the_report_prints_as_a_table(rng):
    text = str(compile_model(data(rng)).report)
    for word in (FIRST, SECOND, "2 layer(s)", "fitted on 2 batch(es)", "1 held-out batch(es)",
                 "attention rel-l2", "output RMSE", "row error", "column error", "ASAP-0", "ASAP",
                 "Sinkhorn S=2", "Sinkhorn S=3", "teacher"):  # fmt: skip
        assert word in text


@pytest.mark.parametrize("fit", [PAPER, "moments"], ids=["paper", "moments"])
@pytest.mark.usefixtures("unmeasured")
def test_compiled_variables_can_be_trained_further(rng, fit):
    model, variables = teacher()
    x = data(rng, 1)[0]
    compiled = aj.linen.compile(model, variables, data(rng), fit=fit).variables
    loss = lambda v: jnp.sum(jnp.sin(model.apply(v, x, train=False)))
    gradient = jax.grad(loss)(compiled)
    slope = gradient["asap"][FIRST]["state"].predictor.coefficients
    step = jax.tree.map(lambda g: 1e-3 * g, gradient)
    moved = [loss(jax.tree.map(op, compiled, step)) for op in (jnp.add, jnp.subtract)]
    squares = sum(float(jnp.vdot(g, g)) for g in jax.tree.leaves(gradient))
    assert float(moved[0] - moved[1]) == pytest.approx(2e-3 * squares, rel=0.05)
    assert np.abs(np.asarray(slope)).max() > 0
