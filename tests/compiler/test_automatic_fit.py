"""The automatic choice: candidates, choice, ladder; on linen, nnx, under scan, in a file."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx
from small_models import (
    AUTO,
    FIRST,
    HEADS,
    LENGTH,
    SMALL,
    SPEC,
    Model,
    compile_auto,
    compile_fit,
    data,
    teacher,
    variables_of,
)

import asap_jax as aj
from asap_jax.compiler import automatic_fit
from asap_jax.compiler.report import METRICS, SAME_ENDING, LayerReport, Rung
from asap_jax.fitting import stages

TWO = "compiled, 2 closures"


def test_every_layer_gets_its_best_candidate(rng):
    batches = data(rng, 5)
    result = compile_auto(batches)
    assert (result.report.num_fit_batches, result.report.num_report_batches) == (4, 1)
    for path, state in result.states.items():
        fit = result.report.layers[path].fit
        assert (state.closures, fit["chosen_in_sample"], fit["too_slow"]) == (2, False, ())
        assert set(fit["choice"]) == {"moments", "chain", "codebook"}
        best = min(fit["choice"].values())
        assert fit["choice"][fit["candidate"]] <= best / (1 - automatic_fit.MARGIN) ** 2
        corrections = {"moments": 0, "chain": 1, "codebook": 0}[fit["candidate"]]
        assert len(state.predictor.corrections) == corrections
    assert "chosen of 3 on held-out batches" in str(result.report)


def test_a_layer_no_closer_than_sinkhorn_with_the_same_steps_gets_a_warning():
    """At n=1 the lowest budget of the teacher's ending has two steps: no comparison."""
    rung = lambda *errors: {n: Rung(e, 1e-3) for n, e in enumerate(errors, 1)}
    ladder = {"moments": rung(0.9, 0.3), SAME_ENDING: rung(0.2, 0.2), "teacher": {6: Rung(0, 1)}}
    fit = dict(r_squared=0.5, num_rows=9, candidate="moments", choice={"moments": 0.3})
    fit |= dict(chosen_in_sample=False, too_slow=(), left_out=())
    rows = {TWO: dict.fromkeys(METRICS, 0.3)}
    layer = LayerReport("layer", rows, fit, ladder)
    assert (
        "WARNING: 'moments' is no closer than Sinkhorn with the same number of steps at n=2;"
        in str(layer)
    )
    ladder["moments"] = rung(0.9, 0.1)
    assert "WARNING" not in str(layer)


def test_the_report_matches_the_compiled_state(rng):
    """Fidelity, ladder and choice agree where they look at the same batch."""
    batches = data(rng, 5)
    result = compile_auto(batches, ladder=(1, 2, 3))
    assert "nan" not in str(result.report)
    for path, state in result.states.items():
        layer = result.report.layers[path]
        name = layer.fit["candidate"]
        assert layer.ladder[name][2].rel_l2 == pytest.approx(layer.rows[TWO]["rel_l2"])
        assert set(layer.ladder["moments"]) == {1, 2, 3}
        assert set(layer.ladder["chain"]) == {2, 3}
        assert set(layer.ladder[SAME_ENDING]) == {1, 2}
        assert layer.ladder[SAME_ENDING][2].rel_l2 == pytest.approx(
            layer.rows["Sinkhorn S=2"]["rel_l2"]
        )
        assert layer.ladder["closures from zero"][2].rel_l2 == pytest.approx(
            layer.rows["Sinkhorn S=2"]["rel_l2"], rel=1e-4
        )
        assert all(r.seconds > 0 for r in layer.ladder["moments"].values())
        assert state.closures == 2
    assert "closures from zero" in str(result.report)


def test_no_fit_uses_report_batches_and_the_final_fit_uses_choice_batches(rng):
    """Of five batches the second is reported on; the third is chosen on, and fitted then."""
    batches = data(rng, 5)
    one = dict(candidates=SMALL[:1])
    plain = compile_auto(batches, **one).states
    for index, same in enumerate((False, True, False)):
        changed = list(batches)
        changed[index] = 2 * batches[index]
        moved = compile_auto(changed, **one).states[FIRST].predictor.coefficients
        difference = jnp.abs(moved - plain[FIRST].predictor.coefficients).max()
        assert (difference < 1e-6) == same
    alone = compile_auto([*batches[:2], *batches[3:], batches[2]], **one).states
    chex.assert_trees_all_close(alone, plain, rtol=1e-3, atol=1e-4)


def test_two_batches_are_enough_and_the_report_says_the_choice_is_in_sample(rng):
    result = compile_auto(data(rng, 2))
    assert result.report.layers[FIRST].fit["chosen_in_sample"]
    assert "on the fit's own batches" in str(result.report)


@pytest.mark.parametrize(("setting", "value"), [("closures", 3), ("ladder", (1, 3))])
def test_more_closures_than_the_teacher_has_steps_are_refused(rng, setting, value):
    model = Model((aj.SinkhornSpec(3), SPEC))
    variables = variables_of(model, rng)
    with pytest.raises(ValueError, match=rf"^{setting}=.*3.*'{FIRST}' with num_steps=3"):
        compile_auto(data(rng), model, variables, **{setting: value})


def test_the_default_closures_are_limited_by_the_teacher_and_the_report_says_so(rng):
    model = Model((aj.SinkhornSpec(2), SPEC))
    one = dict(candidates=SMALL[:1], ladder=None)
    result = compile_auto(data(rng), model, variables_of(model, rng), **one)
    assert [state.closures for state in result.states.values()] == [1, 2]
    short, long = result.report.layers.values()
    assert (short.fit["left_out"], long.fit["left_out"]) == ((2, 3), ())
    assert "the teacher has too few steps for 2, 3 closures, left out" in str(short)
    assert "too few steps" not in str(long)
    assert (set(short.ladder["moments"]), set(long.ladder["moments"])) == ({1}, {1, 2, 3})


def test_if_all_candidates_are_too_slow_the_fastest_is_chosen(rng):
    result = compile_auto(data(rng), time_limit=1e-9)
    fit = result.report.layers[FIRST].fit
    assert set(fit["too_slow"]) == set(fit["choice"])
    assert fit["candidate"] == fit["too_slow"][0]
    assert "ALL beyond the time limit" in str(result.report)


def test_a_costlier_candidate_must_be_better_by_a_margin():
    good = automatic_fit.cheapest_good
    costs = {"a": (0, 0, 0), "b": (32, 0, 0), "c": (32, 1, 0), "b too": (32, 0, 0)}
    assert good({"a": 0.100, "b": 0.099}, costs) == "a"
    assert good({"a": 0.100, "b": 0.090, "c": 0.0895}, costs) == "b"
    assert good({"a": math.nan, "b": 0.5}, costs) == "b"
    assert good({"b": 0.0900, "b too": 0.0899}, costs) == "b too"  # which costs no more
    plain = aj.Candidate("a", rounds=2)
    assert plain.cost == aj.Candidate("b", rounds=2, damping=0.1, padding="none").cost
    assert plain.cost < aj.Candidate("c", rounds=2, chain=True).cost


@pytest.mark.parametrize("closures", [1, 2])
@pytest.mark.usefixtures("unmeasured")
def test_compiled_states_can_be_saved_and_loaded(rng, tmp_path, closures):
    """Corrections, codebooks and the predictors inside them."""
    wanted = aj.Candidate("all", rounds=2, num_centres=4, chain=closures > 1,
                          damping=0.1 if closures == 1 else None)  # fmt: skip
    result = compile_auto(data(rng), candidates=(wanted,), closures=closures)
    aj.save(tmp_path / "compiled.npz", result)
    loaded = aj.load(tmp_path / "compiled.npz", like=teacher()[1])
    chex.assert_trees_all_equal(loaded["asap"], dict(result.variables["asap"]))


def test_masked_batches_compile(rng):
    """Key masks: what padded queries add makes candidates; an empty batch counts for nothing."""
    tries = (
        aj.Candidate("spec's", padding="self"),
        aj.Candidate("rows", rows="all"),
        aj.Candidate("features", padding="none"),
    )
    mask = problems.key_padding([LENGTH, 4, 5], LENGTH)
    batches = [{"x": x, "mask": mask} for x in data(rng, 4)]
    result = compile_auto(batches, candidates=tries)
    assert set(result.report.layers[FIRST].fit["choice"]) == {"spec's", "rows", "features"}
    paddings = {candidate.name: candidate.padding for candidate in tries}
    for path, state in result.states.items():
        chosen = result.report.layers[path].fit["candidate"]
        assert state.predictor.padding == paddings[chosen]
    empty = {"x": batches[3]["x"], "mask": np.zeros_like(mask)}
    again = compile_auto([*batches, empty], candidates=tries[2:])
    assert {state.predictor.padding for state in again.states.values()} == {"none"}
    assert math.isfinite(again.report.layers[FIRST].rows[TWO]["rel_l2"])


class Stack(nn.Module):
    """Three layers under a scan."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                attend = aj.linen.SinkhornAttention(SPEC)
                layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attend)
                return x + layer(x), None

        axes = {"params": 0, "asap": 0, "asap_capture": 0}
        scan = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=3)
        return scan()(x, None)[0]


def test_layers_of_a_scanned_stack_share_a_candidate(rng):
    model, batches = Stack(), data(rng, 4)
    variables = variables_of(model, rng)
    whole = aj.Candidate("all", rounds=1, num_centres=4, chain=True, tuned=2, hidden=2)
    tries = (*SMALL[:1], whole)
    result = compile_auto(batches, model, variables, ladder=(2,), candidates=tries)
    (state,) = result.states.values()
    chosen = {layer.fit["candidate"] for layer in result.report.layers.values()}
    assert (len(result.report.layers), len(chosen)) == (3, 1)
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state.predictor))
    error = [layer.ladder[min(chosen)][2].rel_l2 for layer in result.report.layers.values()]
    rows = [layer.rows[TWO]["rel_l2"] for layer in result.report.layers.values()]
    np.testing.assert_allclose(error, rows, rtol=1e-3)
    assert jnp.isfinite(model.apply(result.variables, batches[0])).all()


def test_the_automatic_fit_compiles_an_nnx_model(rng, tmp_path):
    layer = nnx.MultiHeadAttention(
        HEADS, 8, decode=False, attention_fn=aj.nnx.SinkhornAttention(SPEC), rngs=nnx.Rngs(0)
    )
    batches = data(rng, 4)
    result = aj.nnx.compile(layer, batches, fit=AUTO)
    aj.save(tmp_path / "compiled.npz", result)
    loaded = aj.load(tmp_path / "compiled.npz", like=layer)
    chex.assert_trees_all_equal(loaded(batches[0]), result.model(batches[0]))
    (report,) = result.report.layers.values()
    assert report.rows[TWO]["rel_l2"] < 0.7 * report.rows["Sinkhorn S=2"]["rel_l2"]


@pytest.mark.parametrize(("name", "value"), [
    ("time_limit", 0.0), ("candidates", ()), ("candidates", (SMALL[0], SMALL[0])), ("ladder", (0,)),
])  # fmt: skip
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        aj.AutoFit(**{name: value})


def test_closures_that_no_candidate_supports_are_refused(rng):
    with pytest.raises(ValueError, match=r"closures='two_sided'.*PaperFit"):
        aj.Options(fit="auto", closures="two_sided")
    chain = aj.AutoFit(candidates=(SMALL[1],), ladder=(), time_limit=None)
    with pytest.raises(ValueError, match=r"no candidate of \['chain'\] suits closures=1"):
        aj.Options(fit=chain, closures=1)
    model = Model((aj.SinkhornSpec(2),))  # whose default budget is one closure
    with pytest.raises(
        ValueError, match=rf"suits closures=1 and.*of layer '{FIRST}' with num_steps=2"
    ):
        compile_fit(data(rng), chain, model, variables_of(model, rng))


@pytest.mark.parametrize("settings", [
    {"rounds": -1}, {"rounds": True}, {"num_centres": 0}, {"rows": "some"},
    {"coefficients": "shared"}, {"ridge": -1.0}, {"ridge_scale": "some"}, {"damping": 2.0},
    {"damping": -0.1}, {"padding": "left"},
], ids=str)  # fmt: skip
def test_candidates_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="|".join(settings)):
        aj.Candidate("x", **settings)


def test_stages_before_the_teachers_start_move_to_later_iterations():
    step = lambda num_steps, n: stages.half_step(aj.SinkhornSpec(num_steps), n)
    assert [step(5, n) for n in range(1, 8)] == [1, 2, 3, 4, 3, 4, 3]
    assert [step(2, n) for n in (1, 2, 3)] == [1, 0, 1]
