"""Nnx models of Sinkhorn layers: one after another, under scans, side by side."""

import functools

import jax
import jax.numpy as jnp
import problems
from flax import nnx

import asap_jax as aj

SPEC = aj.SinkhornSpec(num_steps=4)
BATCH, LENGTH, FEATURES, HEADS, DEPTH, SLICES = 3, 6, 8, 2, 3, 3
PAPER = aj.PaperFit(num_slices=SLICES)
State, Capture = aj.nnx.AsapState, aj.nnx.AsapCapture


def attention(attention_fn=None, *, seed=0, **settings):
    attention_fn = attention_fn or aj.nnx.SinkhornAttention(SPEC)
    settings = {"decode": False, "rngs": nnx.Rngs(seed), **settings}
    return nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=attention_fn, **settings)


def data(rng, count=3):
    return [problems.normal(rng, BATCH, LENGTH, FEATURES) for _ in range(count)]


def shake(rng, model):
    """The model with no parameter left at zero, so that a forgotten bias shows."""
    shaken = jax.tree.map(
        lambda p: p + problems.normal(rng, *p.shape, size=0.3), nnx.state(model, nnx.Param)
    )
    nnx.update(model, shaken)
    return model


def project(layer, x):
    """The head projections of stock attention, by hand."""

    def dense(p, norm):
        y = jnp.einsum("bnf,fhd->bnhd", x, p.kernel.get_value()) + p.bias.get_value()[None, None]
        return y if norm is None else norm(y)

    return (
        dense(layer.query, layer.query_ln), dense(layer.key, layer.key_ln), dense(layer.value, None)
    )  # fmt: skip


def output(layer, heads):
    kernel, bias = layer.out.kernel.get_value(), layer.out.bias.get_value()
    return jnp.einsum("bnhd,hdf->bnf", heads, kernel) + bias[None, None]


class Block(nnx.Module):
    """A residual attention layer."""

    def __init__(self, seed=0, **settings):
        self.attention = attention(seed=seed, **settings)

    def __call__(self, x, mask=None):
        return x + self.attention(x, mask=mask)


class Loop(nnx.Module):
    """Layers one after another."""

    def __init__(self, depth=DEPTH, **settings):
        self.layers = nnx.List([Block(i, **settings) for i in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Transformed(nnx.Module):
    """One layer called inside `transform`."""

    def __init__(self, transform):
        self.layer = Block()
        self.transform = transform

    def __call__(self, x):
        return self.transform(lambda layer, x: layer(x))(self.layer, x)


def stack_layers(layers):
    """The layers as one module whose variables have a leading axis."""
    graph, _ = nnx.split(layers[0])
    states = [nnx.split(layer)[1] for layer in layers]
    return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


class Scan(nnx.Module):
    """The layers of a loop under `nnx.scan`, after one layer that is not if `outside`."""

    def __init__(self, loop, axes=0, *, remat=False, outside=False):
        self.layers = stack_layers(loop.layers)
        self.axes, self.remat = axes, remat
        self.first = Block(7) if outside else nnx.data(None)

    def __call__(self, x):
        if self.first is not None:
            x = self.first(x)
        body = lambda layer, x: layer(x)
        body = nnx.remat(body) if self.remat else body
        scan = nnx.scan(body, in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x)


class Ensemble(nnx.Module):
    """The layers of a loop side by side under `nnx.vmap`."""

    def __init__(self, loop):
        self.layers = stack_layers(loop.layers)

    def __call__(self, x):
        x = jnp.stack([x, 2 * x, 3 * x])
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, 0), out_axes=0)(self.layers, x).sum(
            0
        )


class Unrolled(nnx.Module):
    """`Ensemble` without `nnx.vmap`."""

    def __init__(self, loop):
        self.layers = nnx.List(loop.layers)

    def __call__(self, x):
        outs = [layer((i + 1) * x) for i, layer in enumerate(self.layers)]
        return functools.reduce(jnp.add, outs)


AXES = nnx.StateAxes({nnx.Param: 0, State: 0, Capture: 0, ...: None})
STACKS = {
    "scan": (Scan, lambda loop: loop),
    "scan of named types": (functools.partial(Scan, axes=AXES), lambda loop: loop),
    "remat and scan": (functools.partial(Scan, remat=True), lambda loop: loop),
    "vmap": (Ensemble, Unrolled),
}


def record(model, x):
    _, captured = nnx.capture(lambda model, x: model(x), Capture)(model, x)
    flat = nnx.to_flat_state(captured)
    return {"/".join(map(str, path[:-1])): leaf.get_value() for path, leaf in flat}


def compile_model(model, batches, **settings):
    return aj.nnx.compile(model, batches, fit=PAPER, **settings)


def stacked(rng, kind):
    loop = shake(rng, Loop())
    make, unroll = STACKS[kind]
    return make(loop), unroll(loop)
