"""The dual that a compiled layer starts from, predicted a few problems at a time."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import asap_jax as aj
from asap_jax.predictor import Correction, MLPHead
from asap_jax.predictor.starting_dual import DeferredStart
from asap_jax.solvers import batching

BATCH, HEADS, LENGTH, DIM = 4, 3, 6, 4
SPEC = aj.SinkhornSpec(6)


@dataclasses.dataclass  # with __eq__ and without __hash__, and no pytree
class Lengths:
    """A family of one's own: squared norms of both sides."""

    seen: list

    def num_features(self, head_dim):
        return 1

    def __call__(self, q, k, *, scale=None, query_valid=None, key_valid=None):
        self.seen.append(q.shape)
        x = jnp.sum(q * q, -1) * jnp.mean(jnp.sum(k * k, -1), -1, keepdims=True)
        return x[..., None]


def predictor_of(kind, rng):
    draw = functools.partial(problems.normal, rng, size=0.1)
    moments, bank = aj.Moments(), aj.slice_directions(0, 5, DIM)
    width = moments.num_features(DIM)
    if kind == "per head":
        head = aj.LinearHead(draw(HEADS, width))
        return aj.Predictor((moments,), head, token_bias=draw(HEADS, LENGTH))
    if kind == "slices":
        return aj.Predictor(directions=bank, coefficients=draw(5), token_bias=draw(LENGTH))
    if kind == "first step":
        return aj.Predictor(directions=bank, coefficients=draw(5), baseline="first_step")
    if kind == "corrected":
        head = aj.LinearHead(draw(HEADS, 1 + width))
        corrections = (Correction((moments,), head),)
        return aj.Predictor(directions=bank, coefficients=draw(HEADS, 5), corrections=corrections)
    if kind == "hidden units":
        head = MLPHead(draw(HEADS, width), draw(HEADS, width, 2), draw(HEADS, 2), draw(HEADS, 2))
        return aj.Predictor((moments,), head)
    assert kind == "of one's own"
    return aj.Predictor((Lengths([]),), lambda x: 0.1 * x[..., 0])


KINDS = ("per head", "slices", "first step", "corrected", "hidden units", "of one's own")


# A head, an example, two examples at a time.
@pytest.mark.parametrize(
    ("kind", "limit"), [*((kind, 36) for kind in KINDS), ("per head", 108), ("per head", 216)]
)
def test_predicting_in_groups_gives_the_same_output_and_gradient(rng, monkeypatch, kind, limit):
    q, k, v = problems.attention_inputs(rng, queries=LENGTH, keys=LENGTH, batch=BATCH)
    mask = problems.array(problems.token_padding([6, 4, 5, 3], LENGTH))
    bias = problems.normal(rng, 1, HEADS, 1, LENGTH)
    predictor = predictor_of(kind, rng)
    arrays = DeferredStart.of(predictor, SPEC, 3).arrays

    def results():
        def layer(arrays, q, k, v, bias):
            predicting = DeferredStart.of(predictor, SPEC, 3).replace(arrays=arrays).predictor
            return aj.asap_attention(
                q, k, v, bias, mask, predictor=predicting, spec=SPEC, closures=3
            )

        return problems.graded(layer, (0, 1, 2, 3, 4))(arrays, q, k, v, bias)

    monkeypatch.setattr(batching, "ELEMENTS", {})
    whole = results()
    monkeypatch.setattr(batching, "ELEMENTS", {jax.default_backend(): limit})
    chex.assert_trees_all_close(results(), whole, atol=2e-5)


def test_all_heads_of_an_example_are_predicted_together(rng, monkeypatch):
    q, k, v = problems.attention_inputs(rng, queries=LENGTH, keys=LENGTH, batch=BATCH)
    predictor = predictor_of("of one's own", rng)
    for limit, examples in ((36, 1), (216, 2), (1000, 4)):
        monkeypatch.setattr(batching, "ELEMENTS", {jax.default_backend(): limit})
        predictor.features[0].seen.clear()
        aj.asap_attention(q, k, v, predictor=predictor, spec=SPEC)
        assert set(predictor.features[0].seen) == {(examples, HEADS, LENGTH, DIM)}


def test_repeated_calls_outside_jit_trace_once(rng):
    q, k, v = problems.attention_inputs(rng)
    family = Lengths([])
    layer = lambda head, q: aj.asap_attention(
        q, k, v, predictor=aj.Predictor((family,), head), spec=SPEC
    )
    outs = [layer(aj.LinearHead(jnp.array([c])), size * q) for c, size in ((0.1, 1), (0.2, 2))]
    traced = len(family.seen)
    outs += [layer(aj.LinearHead(jnp.array([0.2])), 2 * q)]
    assert traced == 1 == len(family.seen)
    np.testing.assert_array_equal(outs[1], outs[2])
    assert np.abs(outs[0] - outs[1]).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_deferred_start_returns_the_same_predictor(rng, kind):
    predictor = predictor_of(kind, rng).replace(statistics={"rows": jnp.ones(2)})
    start = DeferredStart.of(predictor, SPEC, 3)
    hash(jax.tree.structure(start))
    again, expected = start.predictor, predictor.replace(statistics=None)
    assert jax.tree.structure(again) == jax.tree.structure(expected)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, expected)), strict=True))
    assert start.side == ("key" if kind == "corrected" else "query")


@pytest.mark.parametrize("offset", [100, 1e4])
@pytest.mark.parametrize("implementation", ["log", "streaming"])
def test_tokens_far_from_zero_lose_only_the_digits_of_their_products(rng, offset, implementation):
    """Squared lengths of such tokens would have no digit left at 1e4, and three at 100."""
    inputs = [problems.normal(rng, 2, 12, HEADS, DIM) for _ in range(3)]
    inputs = [inputs[0] + np.float32(offset), inputs[1] + np.float32(offset), inputs[2]]
    head = aj.LinearHead(problems.normal(rng, HEADS, DIM + 8, size=0.1))
    predictor = aj.Predictor((aj.Moments(),), head, side="key")

    def attend(*inputs):
        options = dict(predictor=predictor, closures=2, implementation=implementation)
        return aj.asap_attention(*inputs, spec=SPEC, **options)

    with jax.enable_x64(True):
        exact = attend(*(np.asarray(x, "float64") for x in inputs))
    np.testing.assert_allclose(attend(*inputs), exact, rtol=0, atol=1e-6 * offset)
