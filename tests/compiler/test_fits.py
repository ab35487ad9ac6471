"""Which fit a compile takes: names, defaults, where settings belong, sums over processes."""

import dataclasses
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import reference
from small_models import (
    AUTO,
    FIRST,
    PAPER,
    SECOND,
    SMALL,
    SPEC,
    Model,
    compile_fit,
    data,
    teacher,
    variables_of,
)

import asap_jax as aj
from asap_jax.compiler.single_fit import RecordsFit, SumsFit


def test_the_default_is_moments_of_all_tokens_with_two_closures(rng):
    batches, (model, variables) = data(rng), teacher()
    result = aj.linen.compile(model, variables, batches)
    by_name = compile_fit(batches, aj.Candidate("x", padding="none"), closures=2)
    for path, state in result.states.items():
        assert (state.closures, state.predictor.features) == (2, (aj.Moments(),))
        assert (state.predictor.side, state.predictor.padding) == ("key", "none")
        chex.assert_trees_all_equal(state, by_name.states[path])
        assert "compiled, 2 closures" in result.report.layers[path].rows
        assert "ASAP" not in str(result.report)
    assert aj.Options() == aj.Options(fit=aj.CANDIDATES[0])


def test_an_nnx_model_has_the_same_default(rng):
    from flax import nnx

    attend = aj.nnx.SinkhornAttention(SPEC)
    layer = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
    batches = data(rng)
    result, named = aj.nnx.compile(layer, batches), aj.nnx.compile(layer, batches, fit="moments")
    chex.assert_trees_all_equal(result.states, named.states)
    assert [state.closures for state in result.states.values()] == [2]


@pytest.mark.usefixtures("unmeasured")
def test_the_papers_fit_gives_the_numbers_it_gave_when_it_was_the_default():
    """Numbers of the release before fits had a type."""
    batches = data(np.random.default_rng(5), 5)
    states = compile_fit(batches, PAPER).states
    expected = {
        FIRST: [0.4854031, 0.7347851, 0.7164911],
        SECOND: [0.54657537, 0.8429289, 0.13007393],
    }
    for path, numbers in expected.items():
        np.testing.assert_allclose(states[path].predictor.coefficients, numbers, atol=2e-5)
        assert states[path].closures == "two_sided"
    fit = aj.Options(fit="paper").fit
    assert fit == aj.PaperFit()
    assert (fit.objective, fit.num_slices, fit.ridge) == ("ls", 32, 1e-3)
    assert (fit.features, fit.coefficients) == ("sliced_potentials", "pooled")


@pytest.mark.parametrize("name", [c.name for c in aj.THOROUGH])
def test_every_candidate_has_a_name_that_is_a_fit(name):
    closures = 1 if "weighted" in name else 2
    assert aj.Options(fit=name, closures=closures).fit.name == name
    assert aj.Options(fit="auto", closures=closures).fit == aj.AutoFit()


# --------------------------------------------------------------------------- where settings belong

AUTOS = [field.name for field in dataclasses.fields(aj.AutoFit)]
PAPERS = [field.name for field in dataclasses.fields(aj.PaperFit) if field.name not in AUTOS]
MOVED = [(name, "PaperFit") for name in PAPERS] + [(name, "AutoFit") for name in AUTOS]
ENTRIES = {
    "linen.compile": lambda **k: aj.linen.compile(*teacher(), [], **k),
    "nnx.compile": lambda **k: aj.nnx.compile(None, [], **k),
    "Options": aj.Options,
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize(("name", "kind"), MOVED)
def test_a_fit_setting_passed_to_compile_is_an_error_that_says_where_it_belongs(entry, name, kind):
    message = rf"^{name} is a setting of a fit: compile\(\.\.\., fit={kind}\({name}=\.\.\.\)\)$"
    with pytest.raises(TypeError, match=message):
        entry(**{name: 1})


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_the_old_keyword_recipe_is_an_error_that_names_fit(entry):
    with pytest.raises(
        TypeError, match=r"^recipe is called fit now: compile\(\.\.\., fit='auto'\)"
    ):
        entry(recipe="auto")


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_other_unknown_keywords_raise_as_usual(entry):
    with pytest.raises(TypeError, match="unexpected keyword argument 'slices'"):
        entry(slices=3)


@pytest.mark.parametrize("function", [aj.linen.compile, aj.nnx.compile, aj.Options])
def test_signatures_show_eight_settings_at_most_beside_the_model_and_the_data(function):
    parameters = inspect.signature(function).parameters
    assert len(set(parameters) - {"model", "variables", "batches"}) <= 8
    assert {"fit", "closures", "layers", "holdout", "seed"} <= set(parameters)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize(
    ("fit", "closures", "message"),
    [
        ("moments", "two_sided", r"closures='two_sided' is for fit=PaperFit"),
        ("moments, weighted", 2, "damping=0.1 .* give closures=1"),
        ("moments, weighted", None, "damping=0.1 .* give closures=1"),
        ("codebook, chain", 1, "chain=True .* two closures or more"),
        (aj.PaperFit(objective="kl"), 2, "closures must be one of"),
        (aj.PaperFit(token_bias=True), "none", "needs baseline='none' and token_bias=False"),
    ],
)
def test_closures_that_the_fit_does_not_support_are_refused(fit, closures, message):
    with pytest.raises(ValueError, match=message):
        aj.Options(fit=fit, closures=closures)


@pytest.mark.parametrize("fit", [PAPER, aj.Candidate("x"), AUTO], ids=["paper", "single", "auto"])
def test_fits_are_frozen_and_hashable(fit):
    assert {fit, dataclasses.replace(fit)} == {fit}
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.ridge = 1.0


# ---------------------------------------------------------------------------- one way of predicting


def test_default_closures_are_limited_by_the_teacher_and_the_report_says_so(rng):
    model = Model((aj.SinkhornSpec(2), SPEC))
    result = compile_fit(data(rng), "moments", model, variables_of(model, rng))
    assert [state.closures for state in result.states.values()] == [1, 2]
    short, long = result.report.layers.values()
    assert (short.fit["left_out"], long.fit["left_out"]) == ((2,), ())
    assert "the teacher has too few steps for 2 closures, left out" in str(short)
    assert "too few steps" not in str(long)
    assert "compiled, 1 closure" in short.rows
    with pytest.raises(ValueError, match=rf"closures=2 .*'{FIRST}' with num_steps=2"):
        compile_fit(data(rng), "moments", model, variables_of(model, rng), closures=2)


@pytest.mark.parametrize("candidate", SMALL, ids=lambda candidate: candidate.name)
@pytest.mark.usefixtures("unmeasured")
def test_a_single_candidate_is_fitted_as_in_the_automatic_fit(rng, candidate):
    """On the same records, whether it holds them or adds up sums."""
    batches = data(rng, 4)
    alone = compile_fit(batches, candidate, holdout=0.0)
    auto = compile_fit(batches, dataclasses.replace(AUTO, candidates=(candidate,)), holdout=0.0)
    for path, state in auto.states.items():
        chex.assert_trees_all_close(alone.states[path], state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("candidate", SMALL, ids=lambda candidate: candidate.name)
def test_a_fit_with_one_stage_stores_only_sums_of_constant_size(rng, candidate):
    model, variables = teacher()
    calibration = aj.linen.Calibration(model, aj.Options(fit=candidate))
    sizes = []
    for batch in data(rng, 2):
        calibration.add(variables, batch)
        fit = calibration.fits[FIRST]
        held = fit.sums if isinstance(fit, SumsFit) else fit.records
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(held)))
    assert isinstance(fit, SumsFit if candidate.name == "moments" else RecordsFit)
    assert (sizes[0] == sizes[1]) == (candidate.name == "moments")


@pytest.mark.parametrize("fit", ["moments", PAPER], ids=["moments", "paper"])
def test_adding_up_sums_of_two_processes_gives_the_fit_of_all_batches(rng, fit):
    batches, (model, variables) = data(rng, 2), teacher()
    parts = [aj.linen.Calibration(model, aj.Options(fit=fit)) for _ in batches]
    for calibration, batch in zip(parts, batches, strict=True):
        calibration.add(variables, batch)
    sums = {path: [part.fits[path] for part in parts] for path in parts[0].fits}

    def totals():
        """What every process's sums add up to, layer by layer in the order of ``reduce``."""
        for path in sorted(sums):
            of = lambda fit: (
                (fit.sums, fit.observed)
                if isinstance(fit, SumsFit)
                else (fit.sums, fit.offset, fit.observed)
            )
            yield jax.tree.map(jnp.add, *map(of, sums[path]))

    one_by_one = totals()
    parts[0].reduce(lambda _: next(one_by_one))
    result = parts[0].finish(variables, [batches[0]])
    expected = compile_fit(batches, fit, holdout=0.0)
    chex.assert_trees_all_close(result.states, expected.states, rtol=1e-5, atol=1e-6)


def test_sums_over_a_changing_teacher_are_the_least_squares_of_all_its_rows(rng):
    """Late-training accumulation, against all rows at once in float64."""
    model, _ = teacher((SPEC,))
    changing = [variables_of(model, rng) for _ in range(3)]
    batches = data(rng, 3)
    calibration = aj.linen.Calibration(model, aj.Options(fit=PAPER))
    rows = []
    for variables, batch in zip(changing, batches, strict=True):
        calibration.add(variables, batch)
        record = calibration.records(variables, batch)[FIRST]
        rows.append([problems.heads_first(x) for x in (record.query, record.key)])
    predictor = calibration.finish(changing[-1], [batches[0]]).states[FIRST].predictor
    fit = lambda rows: reference.calibrate(
        *map(np.concatenate, zip(*rows, strict=True)),
        np.asarray(predictor.features[0].directions),
        num_steps=SPEC.num_steps,
        ridge=PAPER.ridge,
    )
    np.testing.assert_allclose(predictor.coefficients, fit(rows), rtol=1e-3, atol=1e-4)
    assert np.abs(fit(rows) - fit(rows[-1:])).max() > 1e-2  # the last state alone gives another fit


@pytest.mark.parametrize(
    "fit", ["codebook", "auto", aj.PaperFit(objective="kl", num_slices=3)],
    ids=["codebook", "auto", "kl"],
)  # fmt: skip
def test_fits_that_store_activations_refuse_several_processes(rng, fit):
    model, variables = teacher()
    calibration = aj.linen.Calibration(model, aj.Options(fit=fit))
    with pytest.raises(ValueError, match="every process needs at least one"):
        calibration.reduce(lambda sums: sums)
    calibration.add(variables, data(rng, 1)[0])
    with pytest.raises(ValueError, match=rf"only sums add up .*'{FIRST}'.*on one process"):
        calibration.reduce(lambda sums: sums)


@pytest.mark.parametrize("fit", ["moments", "codebook", "auto", PAPER], ids=str)
def test_errors_about_bad_data_name_layer_and_batch_for_every_fit(rng, fit):
    (x,) = data(rng, 1)
    with pytest.raises(ValueError, match=rf"batch 0\b.*not finite.*'{FIRST}'"):
        compile_fit([x.at[0, 0, 0].set(np.nan)], fit)
    empty = {"x": x, "mask": np.zeros((len(x), 1, 6, 6), bool)}
    with pytest.raises(ValueError, match=f"'{FIRST}': no active token"):
        compile_fit([empty], fit)
    with pytest.raises(ValueError, match="must hold only 0 and 1"):
        compile_fit([dict(empty, mask=np.full((len(x), 1, 6, 6), 0.5, np.float32))], fit)
