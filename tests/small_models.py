"""A two-layer linen model, its random teacher and batches: what compiling is tested on."""

import functools

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import problems

import asap_jax as aj

SPEC = aj.SinkhornSpec(num_steps=4)
BATCH, LENGTH, FEATURES, HEADS, SLICES = 3, 6, 8, 2, 3
FIRST, SECOND = "SinkhornAttention_0", "SinkhornAttention_1"
SMALL = (
    aj.Candidate("moments"),
    aj.Candidate("chain", chain=True),
    aj.Candidate("codebook", rounds=1, num_centres=4),
)
AUTO = dict(recipe="auto", candidates=SMALL, ladder=(), time_limit=None)


class Model(nn.Module):
    """Residual attention layers with dropout, one for each spec."""

    specs: tuple = (SPEC, SPEC)
    rate: float = 0.0
    attention_settings: flax.core.FrozenDict = flax.core.FrozenDict()

    @nn.compact
    def __call__(self, x, mask=None, *, train=True):
        for i, spec in enumerate(self.specs):
            x = nn.Dropout(self.rate, deterministic=not train)(x)
            layer = nn.MultiHeadDotProductAttention(
                HEADS,
                attention_fn=aj.linen.SinkhornAttention(spec),
                dropout_rate=self.rate,
                deterministic=not train,
                name=f"layer_{i}",
                **self.attention_settings,
            )
            x = x + layer(x, mask=mask)
        return x


def variables_of(model, rng):
    """Random variables, with no zero among them."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 2, FEATURES)))
    return jax.tree.map(lambda p: problems.normal(rng, *p.shape, size=0.4), shapes)


def data(rng, count=3, *, batch=BATCH, length=LENGTH):
    return [problems.normal(rng, batch, length, FEATURES) for _ in range(count)]


@functools.cache
def teacher(specs=(SPEC, SPEC)):
    model = Model(specs)
    return model, variables_of(model, np.random.default_rng(1))


def compile_model(batches, model=None, variables=None, **settings):
    if model is None:
        model, variables = teacher()
    settings = {"num_slices": SLICES, **settings}
    return aj.linen.compile(model, variables, batches, **settings)


def compile_auto(batches, model=None, variables=None, **settings):
    """The automatic recipe with three quick candidates and neither ladder nor clock."""
    model, variables = teacher() if model is None else (model, variables)
    return aj.linen.compile(model, variables, batches, **{**AUTO, **settings})
