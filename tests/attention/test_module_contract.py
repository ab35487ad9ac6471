"""What holds for every operator inside stock Flax attention, linen and nnx, function or module."""

import functools

import chex
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import linen_models
import nnx_models
import numpy as np
import problems
import pytest
from flax import nnx
from operators import BATCH, DIM, FOUR, HEADS, LENGTH, OPERATORS, moments, tokens

import asap_jax as aj
from asap_jax.baselines.diff import VECTORS

FEATURES = HEADS * DIM
NAMES = ("softmax", "sinkhorn", "asap, moments", "diff", "esp, soft", "esp, hard")
MASKS = {
    "tokens, float32": tokens([LENGTH, 4]).astype(jnp.float32),
    "keys": problems.array(problems.key_padding([LENGTH, 4], LENGTH)),
    "keys of one example": problems.array(problems.key_padding([5], LENGTH)),
}


class Linen:
    """Stock linen attention around one attention function or module."""

    error = flax.errors.InvalidRngError

    def __init__(self, attention_fn, **settings):
        make = lambda **both: nn.MultiHeadDotProductAttention(HEADS, **both)
        self.layer = make(attention_fn=attention_fn, **settings)
        x = jnp.ones((BATCH, LENGTH, FEATURES))
        init = make(attention_fn=attention_fn)
        self.variables = linen_models.initial(np.random.default_rng(2), init, x)
        self.stock = jax.eval_shape(make().init, jax.random.key(0), x)["params"]

    @property
    def parameters(self):
        """Those of stock attention, without those of the operator."""
        params = dict(self.variables["params"])
        params.pop("attention_fn", None)
        return params

    @property
    def learned(self):
        return self.variables["params"].get("attention_fn", {})

    def __call__(self, x, *, rngs=None, **call):
        rngs = None if rngs is None else {"dropout": rngs}
        return jax.jit(functools.partial(self.layer.apply, **call))(self.variables, x, rngs=rngs)

    def sown(self, x, **call):
        _, state = self.layer.apply(
            self.variables, x, sow_weights=True, mutable=["intermediates"], **call
        )
        (weights,) = state["intermediates"]["attention_weights"]
        return weights

    def project(self, x):
        return linen_models.project(self.variables["params"], x)

    def output(self, heads):
        return linen_models.output(self.variables["params"]["out"], heads)

    def compiled(self, state):
        self.variables = {**self.variables, "asap": {"attention_fn": {"state": state}}}
        return self


class Nnx:
    """Stock nnx attention around one attention function or module."""

    error = ValueError

    def __init__(self, attention_fn, **settings):
        settings = {"decode": False, "rngs": nnx.Rngs(0), **settings}
        if "dropout_rate" in settings:
            settings["keep_rngs"] = False
        make = lambda **own: nnx.MultiHeadAttention(HEADS, FEATURES, **own, **settings)
        self.layer = nnx_models.shake(np.random.default_rng(2), make(attention_fn=attention_fn))
        self.stock = nnx.to_pure_dict(nnx.state(make(), nnx.Param))

    @property
    def parameters(self):
        params = nnx.to_pure_dict(nnx.state(self.layer, nnx.Param))
        params.pop("attention_fn", None)
        return params

    @property
    def learned(self):
        return nnx.to_pure_dict(nnx.state(self.layer, nnx.Param)).get("attention_fn", {})

    def __call__(self, x, *, rngs=None, **call):
        rngs = None if rngs is None else nnx.Rngs(dropout=rngs)
        return nnx.jit(lambda layer, x, rngs: layer(x, rngs=rngs, **call))(self.layer, x, rngs)

    def sown(self, x, **call):
        sowing = nnx.capture(lambda m, x: m(x, sow_weights=True, **call), nnx.Intermediate)
        _, state = sowing(self.layer, x)
        (weights,) = state["attention_weights"].get_value()
        return weights

    def project(self, x):
        return nnx_models.project(self.layer, x)

    def output(self, heads):
        return nnx_models.output(self.layer, heads)

    def compiled(self, state):
        self.layer.attention_fn.asap = aj.nnx.AsapState(state)
        return self


class Case:
    """One operator as a plain function, and as the library's own module where there is one."""

    def __init__(self, framework, name):
        self.make_layer, self.name = framework, name
        self.operator = OPERATORS[name]
        self.package = aj.linen if framework is Linen else aj.nnx

    def module(self):
        """The library's module for this operator, or None."""
        if self.name in ("sinkhorn", "asap, moments"):
            return self.package.SinkhornAttention(FOUR)
        if self.name == "diff":
            own = {} if self.make_layer is Linen else {"head_dim": DIM, "rngs": nnx.Rngs(3)}
            return self.package.DiffAttention(depth=1, **own)
        if self.name.startswith("esp"):
            return self.package.EspAttention(mode=self.name.removeprefix("esp, "))
        return None

    def layer(self, **settings):
        """Stock attention around the module, or around the function where there is none."""
        layer = self.make_layer(self.module() or self.operator.bind(), **settings)
        if self.name == "asap, moments":
            predictor = moments(jnp.dtype("float32"))
            layer.compiled(aj.CompiledState(predictor, spec=FOUR, closures=1))
        return layer

    def function(self, layer, **settings):
        """The function that the layer is expected to compute, its learned vectors bound."""
        if self.name == "diff":
            learned = {name: problems.array(layer.learned[name]) for name in VECTORS}
            settings |= {"depth": 1, "norm_scale": layer.learned["scale"], **learned}
        return jax.jit(self.operator.bind(**settings))


@pytest.fixture(params=[Linen, Nnx], ids=["linen", "nnx"])
def framework(request):
    return request.param


@pytest.fixture(params=NAMES)
def case(request, framework):
    return Case(framework, request.param)


@pytest.fixture
def x(rng):
    return problems.normal(rng, BATCH, LENGTH, FEATURES)


def test_parameters_are_those_of_stock_attention_beside_the_operators_own(case):
    layer = case.layer()
    chex.assert_trees_all_equal_shapes(layer.parameters, dict(layer.stock))
    own = {name: np.shape(value) for name, value in layer.learned.items()}
    expected = {**dict.fromkeys(VECTORS, (DIM,)), "scale": (2 * DIM,)}
    assert own == (expected if case.name == "diff" else {})


def test_the_output_is_that_of_the_function_on_the_projections(case, x):
    layer = case.layer()
    function = case.function(layer)
    masks = dict(MASKS, none=None)
    if case.name == "esp, hard":
        masks.pop("keys of one example")
    if case.operator.entries:
        mask = problems.random_mask(np.random.default_rng(1), BATCH, HEADS, LENGTH, LENGTH)
        masks["entry by entry"] = problems.array(mask)
    unmasked = layer(x)
    for name, mask in masks.items():
        expected = layer.output(function(*layer.project(x), mask=mask))
        out = layer(x, mask=mask)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5, err_msg=name)
        assert mask is None or np.abs(np.asarray(out - unmasked)).max() > 1e-3


def test_a_plain_function_and_the_module_give_the_same_layer(framework, x):
    for name in ("sinkhorn", "esp, soft"):
        case = Case(framework, name)
        function = framework(case.operator.bind())
        chex.assert_trees_all_close(function(x), case.layer()(x), atol=1e-6)


def test_sown_weights_are_the_returned_ones(case, x):
    layer, mask = case.layer(), MASKS["tokens, float32"]
    sown = layer.sown(x, mask=mask)
    function = case.function(layer, return_weights=True)
    _, weights = function(*layer.project(x), mask=mask)
    chex.assert_trees_all_close(sown, weights, atol=1e-5)
    assert (np.asarray(sown)[1, :, :, 4:] == 0).all()


def test_bfloat16_layers_take_and_give_bfloat16(case, x):
    layer = case.layer(dtype=jnp.bfloat16)
    out = layer(x)
    chex.assert_type(out, jnp.bfloat16)
    if case.name.startswith("esp"):
        return  # projections rounded to bfloat16 may be sorted in another order
    wide = case.layer()
    chex.assert_trees_all_close(out.astype(jnp.float32), wide(x), atol=0.1)


def test_dropout_follows_its_rng_and_is_off_when_deterministic(case, x):
    layer = case.layer(dropout_rate=0.5)
    plain = case.layer()(x)
    chex.assert_trees_all_close(layer(x, deterministic=True), plain, atol=1e-6)
    one, again, other = (
        layer(x, deterministic=False, rngs=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    chex.assert_trees_all_equal(one, again)
    assert float(jnp.abs(one - other).max()) > 1e-3
    assert float(jnp.abs(one - plain).max()) > 1e-3
    with pytest.raises(layer.error, match=r"dropout|rngs"):
        layer(x, deterministic=False)


def test_causal_attention_and_other_einsums_are_refused(case, framework, x):
    layer = case.layer()
    arrays = layer.project(x)
    attend = case.module() or case.operator.bind()
    if framework is Linen and isinstance(attend, nn.Module):
        attend = functools.partial(attend.init_with_output, jax.random.key(0))
    with pytest.raises(ValueError, match="is_causal=True is refused"):
        attend(*arrays, is_causal=True)
    with pytest.raises(ValueError, match="qk_attn_weights_einsum"):
        attend(*arrays, qk_attn_weights_einsum=jnp.einsum)
