"""A two-layer linen model, its random teacher and batches: what compiling is tested on."""

import dataclasses
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
AUTO = aj.AutoFit(candidates=SMALL, ladder=(), time_limit=None)
PAPER = aj.PaperFit(num_slices=SLICES)
OPTIONS = {field.name for field in dataclasses.fields(aj.Options)} | {"apply_kwargs", "forward"}


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


def paper(**settings):
    """Keywords of a compile: settings of the paper's fit, with few slices, and others."""
    options = {name: settings.pop(name) for name in set(settings) & OPTIONS}
    return {"fit": dataclasses.replace(PAPER, **settings), **options}


def compile_model(batches, model=None, variables=None, **settings):
    """The paper's fit with few slices; other settings of the fit or of the compile."""
    if model is None:
        model, variables = teacher()
    return aj.linen.compile(model, variables, batches, **paper(**settings))


def compile_fit(batches, fit, model=None, variables=None, **settings):
    """Any fit."""
    model, variables = teacher() if model is None else (model, variables)
    return aj.linen.compile(model, variables, batches, fit=fit, **settings)


def compile_auto(batches, model=None, variables=None, *, closures=None, **settings):
    """The automatic choice of three quick candidates with neither ladder nor clock."""
    fit = dataclasses.replace(AUTO, **settings)
    return compile_fit(batches, fit, model, variables, closures=closures)
