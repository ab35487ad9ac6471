"""Diagnosing compiled layers: what is measured, what is said, what is refused."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import linen_models
import nnx_models
import numpy as np
import problems
import pytest
from flax import nnx

import asap_jax as aj
from asap_jax.compiler import diagnosis
from asap_jax.records import CompiledState

KEEP = problems.key_padding([6, 4, 5], linen_models.LENGTH)


@pytest.fixture(scope="module")
def compiled():
    """A stack of layers under a scan, compiled, and a batch ``(x, mask)`` like its own."""
    rng = np.random.default_rng(5)
    model = linen_models.Scan()
    variables = linen_models.initial(rng, model)
    batches = [(x, problems.array(KEEP)) for x in linen_models.data(rng, 4)]
    result = aj.linen.compile(model, variables, batches)
    return model, result, batches[1]


@pytest.fixture(scope="module")
def found(compiled):
    model, result, batch = compiled
    diagnose = jax.jit(lambda v, b: aj.linen.diagnose(model, v, b, teacher=True))
    return lambda x, mask=batch[1]: diagnose(result.variables, (x, mask))


def test_a_calibrated_layer_is_ok_and_prints_a_line_for_each_layer_of_the_stack(compiled, found):
    _, result, (x, _) = compiled
    shown = found(x)
    assert not shown.recalibrate
    names = [name for name, _ in shown.each()]
    assert names == list(result.report.layers)
    assert str(shown).splitlines()[-1] == "verdict: ok"


def test_the_figures_are_those_of_the_report(compiled, found):
    """On the report's own batch; the first layer, which receives the same as in the teacher."""
    _, result, (x, _) = compiled
    name, layer = next(found(x).each())
    row = result.report.layers[name].rows["compiled, 2 closures"]
    for metric in ("rel_l2", "output_rel_l2", "row_error", "column_error"):
        np.testing.assert_allclose(getattr(layer, metric), row[metric], rtol=1e-3, atol=1e-6)
    teacher = result.report.layers[name].rows["teacher"]
    error = max(teacher["row_error"], teacher["column_error"])
    np.testing.assert_allclose(layer.teacher_error, error, rtol=1e-3)
    assert (float(layer.underflow), int(layer.num_active)) == (0.0, 3 * 2 * linen_models.LENGTH)


def test_larger_inputs_are_out_of_the_calibration(compiled, found):
    _, _, (x, _) = compiled
    shown = found(4 * x)
    _, layer = next(shown.each())
    assert shown.recalibrate
    assert float(layer.drift) > diagnosis.LIMIT
    assert float(layer.score_ratio) > 2
    assert "RECALIBRATE" in str(shown)


def test_a_layer_far_from_its_teacher_is_not_ok(compiled, found):
    _, _, (x, _) = compiled
    shown = found(x)
    far = {
        name: dataclasses.replace(layer, output_rel_l2=layer.output_rel_l2.at[0].set(0.3))
        for name, layer in shown.layers.items()
    }
    text = str(dataclasses.replace(shown, layers=far))
    assert "FAR from its teacher: output rel-l2 0.3, limit 0.2" in text
    assert "verdict: 1 of " in text


def test_values_that_are_not_finite_are_named(compiled, found):
    _, _, (x, mask) = compiled
    shown = found(x.at[0, 0, 0].set(jnp.nan))
    assert shown.recalibrate
    assert "NOT FINITE" in str(shown)
    padded = found(jnp.where(mask[:, 0, 0, :, None], x, x))
    chex.assert_trees_all_close(padded, found(x))


def test_with_nothing_active_every_figure_is_not_a_number(compiled, found):
    _, _, (x, mask) = compiled
    shown = found(x, jnp.zeros_like(mask))
    _, layer = next(shown.each())
    for name in ("row_error", "column_error", "drift", "score_ratio", "underflow",
                 "teacher_error", "rel_l2", "output_rel_l2"):  # fmt: skip
        assert np.isnan(getattr(layer, name)), name
    assert layer.verdict() == "nothing active"


def test_without_statistics_the_drift_is_unknown(compiled):
    model, result, batch = compiled
    forget = lambda state: dataclasses.replace(
        state, predictor=dataclasses.replace(state.predictor, statistics=None)
    )
    is_state = lambda x: isinstance(x, CompiledState)
    variables = jax.tree.map(
        lambda x: forget(x) if is_state(x) else x, result.variables, is_leaf=is_state
    )
    shown = aj.linen.diagnose(model, variables, batch)
    assert shown.recalibrate
    assert "UNKNOWN" in str(shown)
    assert "rel-l2" not in str(shown).splitlines()[0]


def test_states_without_a_layer_and_layers_without_a_state_are_named(rng):
    """As after an edit of a path in a file: on linen, variables alone do not show it."""
    model = linen_models.Loop()
    variables = linen_models.initial(rng, model)
    batches = linen_models.data(rng, 4)
    result = aj.linen.compile(model, variables, batches)
    first, *others = result.states
    states = {"nowhere": result.states[first], **{path: result.states[path] for path in others}}
    wrong = {**variables, "asap": aj.linen.state_tree(states)}
    shown = aj.linen.diagnose(model, wrong, batches[0])
    assert (shown.not_run, shown.with_loop) == (("nowhere",), (first,))
    assert list(shown.layers) == others
    assert "no layer used the state on this batch: nowhere" in str(shown)
    assert f"ran the Sinkhorn loop: {first}" in str(shown)


def test_models_without_compiled_layers_and_bad_batches_are_refused(compiled):
    model, result, batch = compiled
    teacher = {"params": result.variables["params"]}
    with pytest.raises(ValueError, match="no compiled layer"):
        aj.linen.diagnose(model, teacher, batch)
    with pytest.raises(TypeError, match="the batch to diagnose"):
        aj.linen.diagnose(model, result.variables, "text")
    with pytest.raises(TypeError, match="the batch to diagnose must be one batch.*a list of 2"):
        aj.linen.diagnose(model, result.variables, [batch, batch])
    with pytest.raises(TypeError, match="teacher"):
        aj.linen.diagnose(model, result.variables, batch, teacher=1)


def test_nnx_models_are_diagnosed_alike(rng):
    """With statistics in the file as well, under ``nnx.jit``."""
    layer = nnx_models.shake(rng, nnx_models.attention())
    batches = nnx_models.data(rng)
    fit = aj.Candidate("moments", padding="none", guard=True)
    model = aj.nnx.compile(layer, batches, fit=fit).model
    (state,) = (m.asap.get_value() for m in aj.nnx.sinkhorn_layers(model).values())
    assert set(state.predictor.statistics) == {*diagnosis.statistics.NAMES, "limits"}
    shown = nnx.jit(aj.nnx.diagnose)(model, batches[1])
    assert not shown.recalibrate
    assert aj.nnx.diagnose(model, 5 * batches[1]).recalibrate
    with pytest.raises(ValueError, match="no compiled layer"):
        aj.nnx.diagnose(layer, batches[1])


def test_scores_that_underflow_are_counted():
    """One query; its second key is 200 below the first, its third 10."""
    q, k = jnp.ones((1, 1, 1, 1)), jnp.array([0.0, -200.0, -10.0]).reshape(1, 3, 1, 1)
    spec = aj.SinkhornSpec(num_steps=3, scale=1.0)
    p = diagnosis.problem(diagnosis.Record.of(q, k, k, None, None, spec))
    np.testing.assert_allclose(diagnosis._underflow(p, spec), 1 / 3, rtol=1e-6)
