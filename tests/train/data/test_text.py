"""Text: the tokenizer, padded batches, the encoder and its named quirks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import asap_jax as aj
from train.data import text
from train.data.examples import Batches, Examples
from train.models.text_encoder import EncoderSizes, positions, sinusoids
from train.recipes import ag_news
from train.runtime.errors import UserError
from train.training import factory

SENTENCES = [
    "the cat sat on the mat",
    "a dog ran after the cat",
    "stocks fell on fears of rate rises",
    "shares rose after the bank cut rates",
] * 10
TOKENS = text.Tokens(features=("title", "body"), vocab_size=60, length=7)


@pytest.fixture(scope="module")
def recipe():
    return dataclasses.replace(
        ag_news.SMALL,
        inputs=TOKENS,
        model=EncoderSizes(width=8, depth=2, num_heads=2, mlp_dim=16),
    )


@pytest.fixture
def tokens(rng):
    rows = rng.integers(1, 60, (3, 7)).astype(np.int32)
    rows[0, 4:] = 0
    return rows


def with_sizes(model, **changes):
    return dataclasses.replace(model, sizes=dataclasses.replace(model.sizes, **changes))


def test_training_the_tokenizer_twice_gives_the_same_one_within_its_size():
    one, two = (text.train_tokenizer(SENTENCES, 60) for _ in range(2))
    assert one.to_str() == two.to_str()
    assert one.get_vocab_size() <= 60
    assert (one.token_to_id("[PAD]"), one.token_to_id("[UNK]")) == (0, text.UNKNOWN)


def test_texts_are_cut_padded_at_the_end_and_never_empty():
    tokenizer = text.train_tokenizer(SENTENCES, 200)
    rows = text.encode(tokenizer, ["The CAT", "", "the cat " * 9], 7)
    cat, the = tokenizer.token_to_id("▁cat"), tokenizer.token_to_id("▁the")
    np.testing.assert_array_equal(
        rows, [[the, cat, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0], [the, cat] * 3 + [the]]
    )


def test_the_stored_tokenizer_is_used_and_a_damaged_one_named(tmp_path):
    first = text.tokenizer_for(SENTENCES, TOKENS, tmp_path)
    again = text.tokenizer_for(["quite other words"], TOKENS, tmp_path)
    assert again.to_str() == first.to_str()
    smaller = dataclasses.replace(TOKENS, vocab_size=20)
    with pytest.raises(UserError, match=r"pieces, the recipe allows 20: name another folder"):
        text.tokenizer_for(SENTENCES, smaller, tmp_path)
    (tmp_path / text.FILE).write_text("{")
    with pytest.raises(UserError, match=r"tokenizer.json is damaged .* put the file back"):
        text.tokenizer_for(SENTENCES, TOKENS, tmp_path)


def test_only_the_first_host_stores_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    second = text.tokenizer_for(SENTENCES, TOKENS, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert text.tokenizer_for(SENTENCES, TOKENS, tmp_path).to_str() == second.to_str()
    assert (tmp_path / text.FILE).exists()


def test_batches_of_texts_depend_on_seed_and_step_and_hide_tokens_except_pads(rng):
    rows = rng.integers(2, 60, (100, 7)).astype(np.int32)
    rows[:, 5:] = 0
    examples = Examples(rows, np.arange(100, dtype=np.int32), ("a",), "texts")
    inputs = dataclasses.replace(TOKENS, unknown=0.3)
    one, two = (Batches(examples, inputs, 50, seed=1) for _ in range(2))
    one.at(0)
    batch, labels = one.at(3)
    np.testing.assert_array_equal(batch, two.at(3)[0])
    hidden = batch == text.UNKNOWN
    np.testing.assert_array_equal(np.where(hidden, 0, batch), np.where(hidden, 0, rows[labels]))
    assert not hidden[:, 5:].any()
    assert 0.15 < hidden[:, :5].mean() < 0.45


def test_positions_count_from_one_with_pads_at_zero_and_the_table_is_sines():
    valid = jnp.array([[True, True, False]])
    assert positions(valid).tolist() == [[1, 2, 0]]
    table = sinusoids(5, 6)
    np.testing.assert_allclose(table[3, 4], np.sin(3 / 10000 ** (4 / 6)), rtol=1e-6)
    np.testing.assert_allclose(table[3, 5], np.cos(3 / 10000 ** (4 / 6)), rtol=1e-6)


def test_padded_text_masks_only_keys_and_has_unit_columns(recipe, tokens):
    model = factory.build(recipe)
    variables = model.init(jax.random.key(0), tokens)
    _, state = model.apply(variables, tokens, mutable=["asap_capture"])
    record = state["asap_capture"]["block_1"]["SinkhornAttention_0"]["record"]
    assert record.mask.shape == (3, 1, 1, 7)
    np.testing.assert_array_equal(record.mask[:, 0, 0] > 0, tokens != 0)
    spec = recipe.spec
    assert (spec.key_mass, spec.padding) == ("unit", "self")
    _, weights = aj.sinkhorn_attention(
        record.query, record.key, record.value, mask=record.mask, spec=spec, return_weights=True
    )
    np.testing.assert_allclose(weights[0].sum(-2)[:, :4], 1, atol=1e-5)
    assert not weights[0][..., 4:].any()


def test_pads_are_left_out_of_the_pool_unless_asked_for(recipe, tokens):
    model = factory.build(recipe, lambda layer: aj.softmax_attention)
    variables = model.init(jax.random.key(0), tokens)
    short = model.apply(variables, tokens[:1, :4])
    np.testing.assert_allclose(model.apply(variables, tokens[:1]), short, atol=1e-5)
    released = with_sizes(model, pool_pads=True)
    assert np.abs(released.apply(variables, tokens[:1]) - short).max() > 1e-3


def test_options_of_the_released_model_keep_the_parameters_and_work(recipe, tokens):
    model = factory.build(recipe)
    variables = model.init(jax.random.key(0), tokens)
    logits = np.asarray(model.apply(variables, tokens))
    twice = with_sizes(model, double_softmax=True).apply(variables, tokens)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(twice, expected, atol=1e-6)
    noisy = with_sizes(model, random_positions=True)
    assert np.abs(noisy.apply(variables, tokens) - logits).max() > 1e-3
    np.testing.assert_array_equal(
        noisy.apply(variables, tokens), noisy.apply(variables, tokens.copy())
    )


def test_dropout_acts_only_in_training(recipe, tokens):
    model = factory.build(recipe)
    variables = model.init(jax.random.key(0), tokens)
    run = lambda seed: model.apply(
        variables, tokens, deterministic=False, rngs={"dropout": jax.random.key(seed)}
    )
    assert np.abs(run(0) - run(1)).max() > 1e-3
    np.testing.assert_array_equal(run(0), run(0))
