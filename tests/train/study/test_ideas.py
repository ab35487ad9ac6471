"""Ideas of the study: their features against NumPy, and what is written."""

import dataclasses
import json

import jax
import numpy as np
import problems
import pytest
import reference
from scipy.special import logsumexp

import asap_jax as aj
from train.cli import parser
from train.study import idea_features, ideas
from train.training import loop


@pytest.mark.parametrize("masked", [False, True])
def test_third_order_features_follow_their_formula(rng, x64, masked):
    q, k = (problems.normal(rng, n, 3, dtype="float64") for n in (9, 7))
    valid, key_valid = np.arange(9) < (6 if masked else 9), np.arange(7) < (5 if masked else 7)
    x = idea_features.ThirdOrder()(q, k, query_valid=valid, key_valid=key_valid)
    root = 3**-0.25
    u = root * (q - q[valid].mean(0))
    own = np.cov(root * q[valid].T, bias=True)
    other = np.cov(root * k[key_valid].T, bias=True)
    column = np.einsum("nd,de,ef,fg,ng->n", u, other, own, other, u)
    np.testing.assert_allclose(x[..., 0], reference.center(column, valid), atol=1e-9)


def test_the_gaussian_plan_is_sinkhorn_between_gaussians(rng, x64):
    """In one dimension the half-steps are done by quadrature."""
    q, k = (
        problems.normal(rng, 40, 1, dtype="float64"),
        problems.normal(rng, 30, 1, dtype="float64"),
    )
    q, k = q - q.mean(), 0.6 * (k - k.mean())
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    x, y = q.std() * nodes, k.std() * nodes
    log_weights = np.log(weights / weights.sum())
    product = np.outer(x, y)
    step = lambda scores, dual: -logsumexp(scores + dual + log_weights, axis=-1)
    u = step(product, 0.0)
    for _ in range(4):
        u = step(product, step(product.T, u))
    curvature = -2 * np.polyfit(x, u, 2)[0]
    features = idea_features.GaussianPlan(steps=4)(q, k)
    expected = reference.center(curvature * q[:, 0] ** 2, np.ones(40, bool))
    np.testing.assert_allclose(features[:, 0], expected, atol=1e-3)
    np.testing.assert_allclose(features[:, 1], 0, atol=1e-9)  # equal means


@pytest.fixture(scope="module")
def run(minute, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    recipe = dataclasses.replace(minute, spec=aj.SinkhornSpec(num_steps=3))
    loop.train(recipe, examples, folder, seed=3)
    return folder


@pytest.mark.slow
def test_every_idea_is_measured_and_written(run, tmp_path, monkeypatch, capsys):
    """Three steps: no three closures; without masks, nothing that only masks tell apart."""
    few = ("moments", "moments of active tokens", "moments, weighted", "moments, Gaussian plan")
    every = ideas.ideas
    pick = lambda d: tuple(c for c in every(d) if c.name in (*few, "moments, chain"))
    monkeypatch.setitem(ideas.run.__kwdefaults__, "choose", pick)
    settings = ["--test-examples", "40", "--calibration", "60", "--out", str(tmp_path)]
    assert parser.main(["study", "ideas", str(run), *settings]) == 0
    tried = json.loads((tmp_path / "ideas.json").read_text())["tried"]
    counts = {one["name"]: sorted(one["rel_l2"]) for one in tried}
    assert counts == {
        "moments": ["1", "2"],
        "moments, weighted": ["1"],
        "moments, Gaussian plan": ["1", "2"],
        "moments, chain": ["2"],
    }
    assert all(0 < value < 1 for one in tried for value in one["rel_l2"].values())
    text = (tmp_path / "ideas.md").read_text()
    assert f"| moments, chain | - | {tried[-1]['rel_l2']['2']:.4f} |" in text
    assert "moments, Gaussian plan" in capsys.readouterr().out
    monkeypatch.setattr(ideas, "measure", lambda *a, **k: pytest.fail("measured again"))
    assert parser.main(["study", "ideas", str(run), *settings]) == 0
    assert (tmp_path / "ideas.md").read_text() == text
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        parser.main(["study", "ideas", str(run), *settings, "--again"])


def test_settings_of_the_other_study_are_refused(run, capsys):
    with pytest.raises(SystemExit):
        parser.main(["study", "ideas", str(run), "--thorough"])
    assert "unrecognized arguments: --thorough" in capsys.readouterr().err


def test_candidates_accept_other_feature_families(rng):
    with pytest.raises(ValueError, match="features must hold a feature family"):
        aj.Candidate("x", features=())
    with pytest.raises(TypeError, match="features"):
        aj.Candidate("x", features=("moments",))
    names = [candidate.name for candidate in ideas.ideas(4)]
    assert len(set(names)) == len(names)
    assert jax.tree.leaves(ideas.ideas(4)[8].features)[0].shape == (32, 4)
