"""The key dual without a gradient: the same plan, and the gradient of the released text code."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from flax import nnx

import asap_jax as aj

SHAPES = dict(queries=6, keys=6, batch=1, heads=2, dtype="float64")


def released(q, k, v, mask, num_steps):
    """The loop as released for text: every key dual is detached as soon as it is computed."""
    s = jnp.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(q.shape[-1])
    s = jnp.where(mask, s, -jnp.inf)
    f, g = jnp.zeros(s.shape[:-1]), jnp.zeros(s.shape[:-2] + s.shape[-1:])
    for step in range(num_steps):
        if step % 2 == 0:
            f = -jax.nn.logsumexp(s + g[..., None, :], axis=-1)
        else:
            g = -jax.nn.logsumexp(s + f[..., :, None], axis=-2)
            g = jax.lax.stop_gradient(jnp.where(jnp.isfinite(g), g, 0.0))
    weights = jnp.exp(s + f[..., :, None] + g[..., None, :])
    return jnp.einsum("bhnm,bmhd->bnhd", weights, v)


@pytest.mark.parametrize("num_steps", [2, 5, 6])
def test_the_gradient_is_that_of_the_released_loop_and_the_plan_stays(rng, x64, num_steps):
    q, k, v = problems.attention_inputs(rng, **SHAPES)
    mask = problems.key_padding([4], 6)
    spec = aj.SinkhornSpec(num_steps=num_steps, key_mass="unit")

    def ours(detach):
        function = lambda q, k, v: aj.sinkhorn_attention(
            q, k, v, mask=mask, spec=spec, detach_key_dual=detach
        )
        return jax.jit(lambda *x: _value_and_gradient(function, *x))

    theirs = jax.jit(
        lambda *x: _value_and_gradient(lambda q, k, v: released(q, k, v, mask, num_steps), *x)
    )
    value, gradient = ours(True)(q, k, v)
    same, true = ours(False)(q, k, v)
    expected_value, expected = theirs(q, k, v)
    np.testing.assert_allclose(value, same, rtol=1e-12)
    np.testing.assert_allclose(value, expected_value, rtol=1e-12)
    chex.assert_trees_all_close(gradient, expected, atol=1e-11)
    assert np.abs(np.asarray(gradient[1]) - np.asarray(true[1])).max() > 1e-3


def _value_and_gradient(function, q, k, v):
    factors = np.arange(1.0, 1 + v.shape[-1]).reshape(1, 1, 1, -1)
    loss = lambda q, k, v: jnp.sum(jnp.sin(function(q, k, v)) * factors)
    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


def test_options_without_a_key_dual_are_refused(rng):
    q, k, v = problems.attention_inputs(rng)
    call = lambda steps, **settings: aj.sinkhorn_attention(
        q, k, v, spec=aj.SinkhornSpec(num_steps=steps), detach_key_dual=True, **settings
    )
    with pytest.raises(ValueError, match="needs num_steps >= 2: row softmax has no key dual"):
        call(1)
    with pytest.raises(ValueError, match=r"log domain: implementation .* got 'streaming'"):
        call(4, implementation="streaming")
    with pytest.raises(TypeError, match="detach_key_dual"):
        aj.sinkhorn_attention(q, k, v, spec=aj.SinkhornSpec(num_steps=4), detach_key_dual=1)


def test_the_modules_pass_the_option_on(rng):
    x = problems.normal(rng, 1, 4, 8)
    spec = aj.SinkhornSpec(num_steps=1)  # refused by the function, so the option has arrived
    linen = nn.MultiHeadDotProductAttention(
        2, attention_fn=aj.linen.SinkhornAttention(spec, detach_key_dual=True)
    )
    with pytest.raises(ValueError, match="has no key dual"):
        jax.eval_shape(linen.init, jax.random.key(0), x)
    attention = aj.nnx.SinkhornAttention(spec, detach_key_dual=True)
    model = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attention, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="has no key dual"):
        nnx.eval_shape(lambda model, x: model(x), model, x)
