"""Feature families in a compile: by name, by instance, together, and through a file."""

import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import FIRST, SLICES, SPEC, Model, compile_model, data, paper, teacher

import asap_jax as aj
from asap_jax.features import FAMILIES, register

BANK = aj.slice_directions(0, SLICES, 4)

CHOICES = {
    "moments": ("moments", 12),
    "joined names": ("sliced_potentials+moments", SLICES + 12),
    "names and instances": ((aj.SlicedPotentials(BANK), "moments"), SLICES + 12),
    "instances": ((aj.Moments(absolute=False),), 10),
}


@pytest.mark.parametrize(("features", "width"), CHOICES.values(), ids=CHOICES)
@pytest.mark.usefixtures("unmeasured")
def test_families_compile_and_can_be_saved_and_loaded(rng, tmp_path, features, width):
    settings = dict(features=features, coefficients="per_head", token_bias=True)
    result = compile_model(data(rng), **settings)
    predictor = result.states[FIRST].predictor
    chex.assert_shape(predictor.coefficients, (2, width))
    aj.save(tmp_path / "compiled.npz", result)
    loaded = aj.load(tmp_path / "compiled.npz", like=teacher()[1])
    chex.assert_trees_all_equal(loaded["asap"], dict(result.variables["asap"]))


def test_moments_predict_better_than_the_same_number_of_slices(rng):
    batches = data(rng, 6, batch=16)
    error = lambda **settings: (
        compile_model(batches, closures=2, **settings)
        .report.layers[FIRST]
        .rows["compiled, 2 closures"]
    )["rel_l2"]
    assert error(features="moments") < 0.7 * error(num_slices=12)


@pytest.mark.parametrize("features", ["slices", "moments+", "moments+slices", (), ""])
def test_unknown_families_are_refused(features):
    with pytest.raises(ValueError, match="features"):
        aj.PaperFit(features=features)


@flax.struct.dataclass
class Constant:
    """A stranger's family without any extra: two powers of the first value of a token."""

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None):
        x = jnp.stack([q[..., 0], q[..., 0] ** 2], axis=-1)
        return x - x.mean(-2, keepdims=True)


@pytest.mark.usefixtures("unmeasured")
def test_a_family_registered_in_a_test_compiles_and_loads(rng, tmp_path):
    register("constant")(Constant)
    try:
        result = compile_model(data(rng), features=(Constant(),))
        chex.assert_shape(result.states[FIRST].predictor.coefficients, (2,))
        aj.save(tmp_path / "compiled.npz", result)
        loaded = aj.load(tmp_path / "compiled.npz", like=teacher()[1])
        chex.assert_trees_all_equal(loaded["asap"], dict(result.variables["asap"]))
    finally:
        del FAMILIES["constant"]


@pytest.mark.parametrize("settings", [
    {"weighting": "gauss_newton"}, {"weighting": "gauss_newton", "closures": 2},
    {"weighting": "newton"}, {"rows": "some"}, {"ridge_scale": "none"}, {"damping": 0.0},
    {"damping": 1.5}, {"objective": "kl", "rows": "all"}, {"padding": "left"},
], ids=str)  # fmt: skip
def test_settings_of_a_fit_that_contradict_each_other_are_refused(settings):
    with pytest.raises(ValueError, match="|".join(settings)):
        aj.Options(**paper(**settings))


@pytest.mark.parametrize("settings", [
    {"rows": "all", "closures": 1}, {"ridge_scale": "diagonal", "ridge": 0.3},
    {"weighting": "gauss_newton", "closures": 1, "damping": 0.5},
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("unmeasured")
def test_settings_of_a_fit_change_its_coefficients(rng, settings):
    batches = [{"x": x, "mask": np.arange(6).reshape(1, 1, 1, 6) < 4} for x in data(rng)]
    closures = settings.get("closures", 2)
    plain = compile_model(batches, closures=closures, features="moments")
    other = compile_model(batches, **{"closures": 2, **settings}, features="moments")
    coefficients = lambda result: result.states[FIRST].predictor.coefficients
    assert np.abs(np.subtract(coefficients(other), coefficients(plain))).max() > 1e-4


@pytest.mark.parametrize("settings", [
    {}, {"objective": "kl"}, {"objective": "kl", "in_memory": False}, {"closures": "none"},
], ids=str)  # fmt: skip
def test_padding_of_a_fit_overrides_that_of_the_spec(rng, settings):
    """Padded queries of a key mask carry features: coefficients, weights and report agree."""
    mask = np.arange(6).reshape(1, 1, 1, 6) < 4
    batches = [{"x": x, "mask": mask} for x in data(rng)]
    _, variables = teacher((SPEC,))
    model = lambda padding: Model((dataclasses.replace(SPEC, padding=padding),))
    by_fit = compile_model(batches, model("self"), variables, padding="none", **settings)
    by_spec = compile_model(batches, model("none"), variables, **settings)
    plain = compile_model(batches, model("self"), variables, **settings)
    leaves = lambda result: jax.tree.leaves([s.predictor for s in result.states.values()])
    chex.assert_trees_all_close(leaves(by_fit), leaves(by_spec), rtol=1e-6)
    for layer in by_fit.report.layers:
        rows = [one.report.layers[layer].rows for one in (by_fit, by_spec, plain)]
        for name in rows[0]:
            assert rows[0][name]["rel_l2"] == pytest.approx(rows[1][name]["rel_l2"], rel=1e-5)
        ours = next(name for name in rows[0] if "Sinkhorn" not in name)
        assert rows[0][ours]["rel_l2"] != rows[2][ours]["rel_l2"]
