"""The linear baseline: its optimum, its features, its accuracy on real data."""

import dataclasses

import numpy as np
import pytest
import scipy.optimize

from train.data import tfds
from train.data.examples import Examples
from train.data.text import Tokens
from train.recipes import ag_news
from train.training import linear_baseline
from train.training.splits import Split


def test_the_fit_equals_the_optimum_of_another_solver(rng):
    x = rng.standard_normal((60, 4)).astype(np.float32)
    labels = rng.integers(0, 3, 60)
    weights, bias = linear_baseline.fit(x, labels, 3, 1e-2)

    def loss(flat):
        w, b = flat[:12].reshape(4, 3), flat[12:]
        z = x @ w + b
        top = z.max(1, keepdims=True)
        log_sum = top[:, 0] + np.log(np.exp(z - top).sum(1))
        return (log_sum - z[np.arange(60), labels]).mean() + 1e-2 * (w**2).sum()

    best = scipy.optimize.minimize(loss, np.zeros(15), tol=1e-10)
    found = np.concatenate([np.ravel(weights), np.ravel(bias)])
    assert loss(found) == pytest.approx(best.fun, abs=1e-6)
    np.testing.assert_allclose(weights, best.x[:12].reshape(4, 3), atol=1e-3)


def test_the_features_of_a_text_are_the_set_of_its_tokens():
    recipe = dataclasses.replace(ag_news.SMALL, inputs=Tokens(("title",), vocab_size=6, length=4))
    rows = np.array([[2, 3, 2, 0], [0, 0, 0, 0]], np.int32)
    examples = Examples(rows, np.zeros(2, np.int32), ("a",))
    half = np.sqrt(0.5)
    np.testing.assert_allclose(
        linear_baseline.features(recipe, examples), [[0, 0, half, half, 0, 0], [0] * 6], atol=1e-6
    )


def test_the_pixel_baseline_learns_to_classify_clothes(tiny, examples, test_examples):
    accuracy, decay = linear_baseline.run(tiny, Split(examples, test_examples, tfds.PACKAGED))
    assert 0.55 < accuracy < 0.9  # 200 images teach a linear model this much
    assert decay in linear_baseline.DECAYS
