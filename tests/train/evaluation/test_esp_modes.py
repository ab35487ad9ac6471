"""One ESP checkpoint under three operators, against weights collected call by call."""

import dataclasses

import jax
import numpy as np
import pytest

import asap_jax as aj
from train.data.examples import Examples
from train.data.text import Tokens
from train.evaluation import esp_modes
from train.models.text_encoder import EncoderSizes
from train.recipes import ag_news
from train.recipes.esp import Esp
from train.runtime.errors import UserError
from train.training import factory
from train.training.teacher import Teacher

ESP = Esp(slices=3, inverse_temperature=2.0)


def untrained(recipe):
    """A model with random parameters, large enough that it attends to few tokens."""
    model, inputs = factory.build(recipe), recipe.example_inputs()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), inputs))["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    return Teacher(recipe, 0, 10, {"params": params})


@pytest.fixture(scope="module")
def teacher(shallow):
    return untrained(dataclasses.replace(shallow, attention="esp", esp=ESP))


def collected(recipe, variables, inputs, **settings):
    """Logits and the weights of every layer, from the attention function itself."""
    weights = []
    directions = aj.slice_directions(0, ESP.slices, recipe.model.head_dim)

    def attend(query, key, value, bias=None, mask=None):
        out, a = aj.esp_attention(
            query,
            key,
            value,
            bias,
            mask,
            directions=directions,
            inverse_temperature=ESP.inverse_temperature,
            return_weights=True,
            **settings,
        )
        weights.append(np.asarray(a, np.float64))
        return out

    logits = factory.build(recipe, lambda layer: attend).apply(variables, inputs)
    return np.asarray(logits), weights


def test_the_figures_are_those_of_the_weights_of_each_operator(teacher, test_examples):
    rows = esp_modes.measure(teacher, test_examples, num_steps=20, rounds=1)
    inputs = teacher.recipe.inputs.prepare(test_examples)
    predictions = {}
    for row in rows:
        logits, weights = collected(teacher.recipe, teacher.variables, inputs, mode=row.mode)
        predictions[row.mode] = logits.argmax(-1)
        errors = [[np.abs(a.sum(axis) - 1).mean() for a in weights] for axis in (-1, -2)]
        total = [a.sum(-1, keepdims=True) for a in weights]
        p = [a / t for a, t in zip(weights, total, strict=True)]
        log = [np.log(np.where(x > 0, x, 1.0)) for x in p]
        entropy = [-(x * y).sum(-1).mean() for x, y in zip(p, log, strict=True)]
        assert row.accuracy == np.mean(predictions[row.mode] == test_examples.labels)
        assert row.changed == pytest.approx(np.mean(predictions[row.mode] != predictions["soft"]))
        found = [row.row_error, row.column_error, row.entropy]
        np.testing.assert_allclose(found, [*map(np.mean, errors), np.mean(entropy)], atol=1e-5)
        assert row.examples_per_second > 0
    soft, released, hard = rows
    assert soft.changed == 0
    assert max(hard.row_error, hard.column_error) < 1e-5
    assert soft.column_error > 1e-3
    assert hard.entropy < soft.entropy
    assert released.mode == "hard_released"


def test_the_table_names_the_operators_and_the_settings(teacher, test_examples, tmp_path):
    rows = esp_modes.measure(teacher, test_examples, num_steps=20, rounds=0)
    text = esp_modes.report(teacher, test_examples, rows).write(tmp_path, "esp")[0].read_text()
    assert all(name in text for name in esp_modes.MODES.values())
    assert "3 slices, inverse temperature 2" in text
    assert "step 10" in text


def test_padding_of_texts_is_no_part_of_the_errors():
    recipe = dataclasses.replace(
        ag_news.SMALL,
        attention="esp",
        esp=ESP,
        inputs=Tokens(("title",), vocab_size=9, length=6),
        model=EncoderSizes(width=8, depth=1, num_heads=2, mlp_dim=8),
    )
    rows = np.random.default_rng(0).integers(2, 9, (10, 6)).astype(np.int32)
    rows[:, 4:] = 0
    test = Examples(rows, np.zeros(10, np.int32), ("a", "b", "c", "d"), unit="texts")
    figures = esp_modes.measure(untrained(recipe), test, num_steps=20, rounds=0)
    hard = figures[-1]
    assert max(hard.row_error, hard.column_error) < 1e-5


def test_annealed_checkpoints_are_soft_at_the_temperature_of_their_step(shallow):
    recipe = dataclasses.replace(shallow, attention="esp_annealed")
    schedule = factory.esp_temperature(recipe, 20)
    assert float(schedule(0)) == pytest.approx(1e-3)
    assert float(schedule(20)) == pytest.approx(1e-6)
    teacher = dataclasses.replace(untrained(recipe), step=20)
    plain, _ = esp_modes.models(teacher, 20)["soft"]
    assert plain.attention(0).temperature == pytest.approx(1e-6)


def test_other_attention_is_refused(teacher, test_examples):
    recipe = dataclasses.replace(teacher.recipe, attention="sinkhorn")
    trained = dataclasses.replace(teacher, recipe=recipe)
    with pytest.raises(UserError, match="trained with sinkhorn attention: choose a run of"):
        esp_modes.measure(trained, test_examples, num_steps=20)
