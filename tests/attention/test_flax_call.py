"""The one declaration of Flax's keywords: every function and module shows the same signature."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import asap_jax as aj
from asap_jax.attention.flax_call import AttentionFunction, Call, attention_function

SPEC = aj.SinkhornSpec(num_steps=4)
NAMES = tuple(inspect.signature(Call).parameters)
FUNCTIONS = {
    "sinkhorn": aj.sinkhorn_attention,
    "asap": aj.asap_attention,
    "softmax": aj.softmax_attention,
    "diff": aj.diff_attention,
    "esp": aj.esp_attention,
}
MODULES = {
    "linen sinkhorn": aj.linen.SinkhornAttention(SPEC),
    "linen diff": aj.linen.DiffAttention(depth=0),
    "linen esp": aj.linen.EspAttention(),
    "nnx sinkhorn": aj.nnx.SinkhornAttention(SPEC),
    "nnx diff": aj.nnx.DiffAttention(4, depth=0, rngs=nnx.Rngs(0)),
    "nnx esp": aj.nnx.EspAttention(),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES])
def test_the_signature_names_every_keyword_of_flax(name):
    parameters = inspect.signature({**FUNCTIONS, **MODULES}[name]).parameters
    assert tuple(parameters)[: len(NAMES)] == NAMES
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_type_checkers_see_the_same_keywords_and_defaults():
    typed = dict(inspect.signature(AttentionFunction.__call__).parameters)
    assert typed.pop("own").kind is inspect.Parameter.VAR_KEYWORD
    typed.pop("self")
    called = inspect.signature(Call).parameters
    assert {n: (p.kind, p.default) for n, p in typed.items()} == {
        n: (p.kind, p.default) for n, p in called.items()
    }


def test_masks_and_dropout_work_through_flax():
    """Linen passes an attention function only the keywords that its signature names."""
    seen = {}

    def spy(call: Call, *, spec):
        seen.update(mask=call.mask, rate=call.dropout_rate, rng=call.dropout_rng)
        return aj.sinkhorn_attention.core(call, spec=spec)

    x, mask = jnp.ones((2, 5, 8)), jnp.ones((2, 1, 1, 5), bool)
    layer = nn.MultiHeadDotProductAttention(
        2,
        attention_fn=functools.partial(attention_function(spy), spec=SPEC),
        dropout_rate=0.5,
        deterministic=False,
    )
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    layer.init_with_output(keys, x, mask=mask)
    assert seen["mask"] is not None
    assert seen["rng"] is not None
    assert seen["rate"] == 0.5


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_and_missing_arguments_name_the_function(name):
    x, needed = jnp.ones((1, 3, 2, 4)), {"spec": SPEC, "predictor": None}
    taken = inspect.signature(FUNCTIONS[name]).parameters
    own = {key: value for key, value in needed.items() if key in taken}
    function = functools.partial(FUNCTIONS[name], **own)
    with pytest.raises(TypeError, match=rf"{name}_attention\(\).*'temprature'"):
        function(x, x, x, temprature=1.0)
    with pytest.raises(TypeError, match=rf"{name}_attention\(\).*'value'"):
        function(x, x)
