"""Compiling to layers that end on rows, for teachers that end on columns."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from small_models import (
    FIRST,
    SPEC,
    Model,
    compile_fit,
    data,
    teacher,
    variables_of,
)

import asap_jax as aj
from asap_jax.fitting.targets import log_row_sums
from asap_jax.predictor.row_mass import row_sums
from asap_jax.records import problem

MOMENTS = aj.Candidate("moments")
WITH_MASS = aj.Candidate("moments, row mass", row_mass=True)


def records_of(model, variables, batch):
    """The record of each layer on one batch."""
    _, state = jax.jit(functools.partial(model.apply, train=False, mutable=["asap_capture"]))(
        variables, batch
    )
    return {path: found["record"] for path, found in state["asap_capture"].items()}


def single_layer(rng, num_steps):
    model = Model((aj.SinkhornSpec(num_steps),))
    return model, variables_of(model, rng)


@pytest.mark.parametrize(
    "fit",
    [MOMENTS, aj.Candidate("codebook", rounds=1, num_centres=4), aj.PaperFit(num_slices=3)],
    ids=["sums", "records", "paper"],
)
@pytest.mark.parametrize("closures", [1, 2])
@pytest.mark.usefixtures("unmeasured")
def test_the_fit_is_that_of_the_teacher_continued_by_a_row_step(rng, fit, closures):
    """One layer: its inputs do not depend on how many steps it takes."""
    batches = data(rng)
    even, odd = (single_layer(np.random.default_rng(1), s) for s in (4, 5))
    row = compile_fit(batches, fit, *even, closures=closures, ending="row").states[FIRST]
    continued = compile_fit(batches, fit, *odd, closures=closures).states[FIRST]
    chex.assert_trees_all_equal(row.predictor, continued.predictor)
    assert (row.ending, row.spec, row.closures) == ("row", aj.SinkhornSpec(4), closures)
    assert row.predictor.side == ("key" if closures == 1 else "query")


def test_the_default_is_one_closure_which_the_layer_runs_as_one_softmax(rng):
    model, variables = teacher()
    batch, *batches = data(rng, 4)
    result = aj.linen.compile(model, variables, batches, ending="row")
    assert {state.closures for state in result.states.values()} == {1}
    compiled = records_of(model, result.variables, batch)
    for path, record in compiled.items():
        state, (q, k, v, *_) = result.states[path], record.tokens
        bias, scale, rows = state.to_bias(q, k)
        assert rows is None
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            expected = jax.nn.dot_product_attention(q, k, v, bias=bias, scale=float(scale))
        settings = dict(predictor=state.predictor, closures=1, ending="row")
        out = aj.asap_attention(q, k, v, spec=SPEC, **settings)
        chex.assert_trees_all_close(out, expected, atol=2e-6)


def test_the_report_has_calls_output_errors_and_the_ending_gap(rng):
    batches, (model, variables) = data(rng), teacher()
    result = compile_fit(batches, MOMENTS, closures=1, ending="row")
    for path, record in records_of(model, variables, batches[1]).items():
        run = lambda function, record=record, **settings: function(
            *record.tokens, return_weights=True, **settings
        )
        out, weights = run(aj.sinkhorn_attention, spec=SPEC)
        one = dict(predictor=result.states[path].predictor, closures=1, ending="row")
        operators = {
            "compiled, 1 closure, row ending": (1, run(aj.asap_attention, spec=SPEC, **one)),
            "teacher, one more row step": (5, run(aj.sinkhorn_attention, spec=aj.SinkhornSpec(5))),
            "Sinkhorn S=1": (1, run(aj.sinkhorn_attention, spec=aj.SinkhornSpec(1))),
            "Sinkhorn S=2": (3, run(aj.sinkhorn_attention, spec=aj.SinkhornSpec(2))),
            "Sinkhorn S=3": (3, run(aj.sinkhorn_attention, spec=aj.SinkhornSpec(3))),
            "teacher": (5, (out, weights)),
        }
        rows = result.report.layers[path].rows
        assert list(rows) == list(operators)
        for name, (calls, (own_out, own_weights)) in operators.items():
            assert rows[name]["calls"] == calls
            error = own_out - out
            square = lambda x: np.square(np.asarray(x, np.float64)).sum((0, 1, 3))
            expected = np.sqrt(square(error) / square(out)).mean()
            np.testing.assert_allclose(rows[name]["output_rel_l2"], expected, rtol=1e-3, atol=1e-6)
            rel_l2 = aj.metrics.attention_rel_l2(own_weights, weights)
            np.testing.assert_allclose(rows[name]["rel_l2"], rel_l2, rtol=1e-3, atol=1e-6)
    for word in ("calls", "output rel-l2", "teacher, one more row step"):
        assert word in str(result.report)


@pytest.mark.parametrize(
    ("closures", "ending", "calls"),
    [(1, "teacher", 2), (2, "teacher", 3), (3, "teacher", 4), (1, "row", 1), (3, "row", 3)],
)
def test_calls_are_closures_and_one_more_after_a_column_step(rng, closures, ending, calls):
    report = compile_fit(data(rng, 2), MOMENTS, closures=closures, ending=ending).report
    (name,) = (name for name in report.layers[FIRST].rows if name.startswith("compiled"))
    assert report.layers[FIRST].rows[name]["calls"] == calls


@pytest.mark.usefixtures("unmeasured")
def test_row_masses_are_the_ridge_regression_of_the_teachers_log_row_sums(rng):
    batches, (model, variables) = data(rng), teacher()
    state = compile_fit(batches, WITH_MASS, holdout=0, ending="row").states[FIRST]
    features, targets = [], []
    for batch in batches:
        p = problem(records_of(model, variables, batch)[FIRST])
        features.append(np.asarray(aj.Moments()(p.q, p.k, scale=p.scale), np.float64))
        targets.append(np.asarray(log_row_sums(p, SPEC), np.float64))
    x, y = np.concatenate(features), np.concatenate(targets)
    for head in range(x.shape[1]):
        rows, logs = x[:, head].reshape(-1, x.shape[-1]), y[:, head].reshape(-1)
        gram = rows.T @ rows
        w = np.linalg.solve(gram + 1e-5 * np.diag(np.diag(gram)), rows.T @ logs)
        fitted = rows @ np.asarray(state.predictor.row_mass.head.coefficients[head], np.float64)
        np.testing.assert_allclose(fitted, rows @ w, rtol=0, atol=2e-3 * np.abs(logs).max())


def test_row_masses_keep_the_total_and_bring_the_rows_nearer_to_the_teachers(rng):
    batches, (model, variables) = data(rng, 8), teacher()
    state = compile_fit(batches, WITH_MASS, holdout=0, ending="row").states[FIRST]
    errors = []
    for batch in batches:
        record = records_of(model, variables, batch)[FIRST]
        _, weights = aj.sinkhorn_attention(*record.tokens, spec=SPEC, return_weights=True)
        rows = row_sums(problem(record), SPEC, state.predictor.row_mass)[..., 0]
        np.testing.assert_allclose(rows.sum(-1), weights.sum((-1, -2)), rtol=1e-5)
        logs = [jnp.log(x / weights.sum(-1)) for x in (rows, jnp.ones_like(rows))]
        errors.append([float(jnp.sum(jnp.square(x))) for x in logs])
    predicted, equal = np.sum(errors, 0)
    assert predicted < 0.9 * equal


def test_the_automatic_choice_goes_by_output_errors(rng):
    candidates = (MOMENTS, WITH_MASS, aj.Candidate("codebook", rounds=1, num_centres=4))
    batches, (model, variables) = data(rng, 5), teacher()
    fit = aj.AutoFit(candidates=candidates, ladder=(1, 2), time_limit=None)
    result = compile_fit(batches, fit, closures=1, ending="row")
    choice = batches[2]  # of five batches the second is for the report, the third for the choice
    for path, layer in result.report.layers.items():
        assert set(layer.fit["choice"]) == {candidate.name for candidate in candidates}
        fits = [candidate.fit for candidate in candidates]
        record = records_of(model, variables, choice)[path]
        continued = [
            dataclasses.replace(records_of(model, variables, b)[path], spec=SPEC.ended("row"))
            for b in (batches[0], *batches[3:])
        ]
        out = aj.sinkhorn_attention(*record.tokens, spec=SPEC)
        for candidate, fit in zip(candidates, fits, strict=True):
            predictor, _ = fit(continued, 1)
            own = aj.asap_attention(
                *record.tokens, predictor=predictor, spec=SPEC, closures=1, ending="row"
            )
            expected = aj.metrics.output_rel_l2(own, out)
            np.testing.assert_allclose(layer.fit["choice"][candidate.name], expected, rtol=2e-2)
        assert set(layer.ladder["moments"]) == {1, 2}
        name = "compiled, 1 closure, row ending"
        chosen = layer.ladder[layer.fit["candidate"]][1].rel_l2
        assert chosen == pytest.approx(layer.rows[name]["output_rel_l2"], rel=1e-3)


@pytest.mark.parametrize("fit", [MOMENTS, WITH_MASS])
def test_a_row_ending_is_saved_and_loaded(rng, tmp_path, fit):
    model, variables = teacher()
    result = compile_fit(data(rng), fit, ending="row")
    aj.save(tmp_path / "file", result)
    loaded = aj.load(tmp_path / "file", like=variables)
    (x,) = data(rng, 1)
    chex.assert_trees_all_equal(
        model.apply(loaded, x, train=False), model.apply(result.variables, x, train=False)
    )
    other = compile_fit(data(rng), MOMENTS, closures=1).variables
    with pytest.raises(ValueError, match="ending|side|row_mass"):
        aj.load(tmp_path / "file", like=other)


def test_compiled_layers_are_nearer_in_outputs_than_softmax(rng):
    """One softmax call each: the dual is what the compiled layer adds."""
    result = compile_fit(data(rng, 8), MOMENTS, ending="row")
    model, variables = teacher()
    record = records_of(model, variables, data(rng, 1)[0])[FIRST]
    out = aj.sinkhorn_attention(*record.tokens, spec=SPEC)
    one = dict(predictor=result.states[FIRST].predictor, closures=1, ending="row")
    error = lambda x: float(aj.metrics.output_rel_l2(x, out))
    ours = error(aj.asap_attention(*record.tokens, spec=SPEC, **one))
    assert ours < 0.5 * error(aj.softmax_attention(*record.tokens))


@pytest.mark.parametrize(
    ("fit", "settings", "match"),
    [
        (MOMENTS, {"ending": "rows"}, "ending.*'rows'.*teacher.*row"),
        (aj.PaperFit(), {"ending": "row", "closures": "one_sided"}, "does not end on rows"),
        (aj.PaperFit(), {"ending": "row", "closures": "none"}, "does not end on rows"),
        (WITH_MASS, {}, "row_mass=True of fit 'moments, row mass' is for.*num_steps=4"),
        (MOMENTS, {"ending": "row", "closures": 5}, "closures=5 needs a teacher of more steps"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_ending_are_refused(rng, fit, settings, match):
    with pytest.raises(ValueError, match=match):
        compile_fit(data(rng, 2), fit, **settings)


def test_row_masses_are_refused_for_teachers_that_end_on_rows(rng):
    with pytest.raises(ValueError, match="num_steps=5, got ending='row'"):
        compile_fit(data(rng, 2), WITH_MASS, *single_layer(rng, 5), ending="row")


def test_the_paper_fit_ends_on_rows_after_two_closures(rng):
    result = compile_fit(data(rng), aj.PaperFit(num_slices=3), ending="row")
    assert result.states[FIRST].closures == "two_sided"
    row = result.report.layers[FIRST].rows["ASAP, row ending"]
    assert (row["calls"], row["row_error"] < 1e-5) == (2, True)
    assert reference.ending("two_sided", "row") == 2
