"""Linen models of Sinkhorn layers: one after another, under scans, side by side."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import problems

import asap_jax as aj

SPEC = aj.SinkhornSpec(num_steps=4)
BATCH, LENGTH, FEATURES, HEADS, DEPTH, SLICES = 3, 6, 8, 2, 3, 3
PAPER = aj.PaperFit(num_slices=SLICES)
COLLECTIONS = {"asap": 0, "asap_capture": 0}
REMEDY = r"variable_axes=.*'asap': 0, 'asap_capture': 0"


def attention(attention_fn=None, **settings):
    attention_fn = attention_fn or aj.linen.SinkhornAttention(SPEC)
    return nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, **settings)


def data(rng, count=3):
    return [problems.normal(rng, BATCH, LENGTH, FEATURES) for _ in range(count)]


def initial(rng, model, *inputs):
    """Random variables of the model, with no zero among them, so that a forgotten bias shows."""
    inputs = inputs or (jnp.ones((BATCH, LENGTH, FEATURES)),)
    shapes = jax.eval_shape(functools.partial(model.init, jax.random.key(0)), *inputs)
    return jax.tree.map(lambda p: problems.normal(rng, *p.shape, size=0.4), shapes)


def project(params, x):
    """The head projections of stock attention, by hand."""

    def dense(name, norm):
        p = params[name]
        y = jnp.einsum("bnf,fhd->bnhd", x, p["kernel"]) + p["bias"][None, None]
        if norm in params:
            y = nn.LayerNorm(use_bias=False).apply({"params": params[norm]}, y)
        return y

    return dense("query", "query_ln"), dense("key", "key_ln"), dense("value", "")


def output(params, heads):
    return jnp.einsum("bnhd,hdf->bnf", heads, params["kernel"]) + params["bias"][None, None]


class Block(nn.Module):
    """A residual attention layer in the calling convention of `nn.scan`."""

    @nn.compact
    def __call__(self, x, mask=None):
        return x + attention(name="attention")(x, mask=mask), None


class Loop(nn.Module):
    """Layers one after another, each under its own name."""

    block: type[nn.Module] = Block
    depth: int = DEPTH

    @nn.compact
    def __call__(self, x, mask=None):
        for i in range(self.depth):
            x, _ = self.block(name=f"layer_{i}")(x, mask)
        return x


class Scan(nn.Module):
    """The same layers under `nn.scan`, after `outside` layers that are not."""

    axes: tuple = tuple(COLLECTIONS.items())
    block: type[nn.Module] = Block
    outside: int = 0

    @nn.compact
    def __call__(self, x, mask=None):
        for i in range(self.outside):
            x, _ = Block(name=f"layer_{i}")(x, mask)
        layers = nn.scan(
            self.block,
            variable_axes={"params": 0, **dict(self.axes)},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=DEPTH,
        )
        return layers(name="layers")(x, mask)[0]


class Ensemble(nn.Module):
    """Layers side by side under `nn.vmap`, each with its own parameters."""

    axes: tuple = tuple(COLLECTIONS.items())

    @nn.compact
    def __call__(self, x, mask=None):
        layers = nn.vmap(
            Block,
            variable_axes={"params": 0, **dict(self.axes)},
            split_rngs={"params": True},
            in_axes=(0, None),
        )
        x = jnp.stack([x, 2 * x, 3 * x])
        return layers(name="layers")(x, mask)[0].sum(0)


class Unrolled(nn.Module):
    """`Ensemble` without `nn.vmap`."""

    @nn.compact
    def __call__(self, x, mask=None):
        outs = [Block(name=f"layer_{i}")((i + 1) * x, mask)[0] for i in range(DEPTH)]
        return functools.reduce(jnp.add, outs)


STACKS = {
    "scan": (Scan(), Loop()),
    "remat and scan": (Scan(block=nn.remat(Block, prevent_cse=False)), Loop()),
    "vmap": (Ensemble(), Unrolled()),
}


def stacked(rng, kind):
    """(stack, its variables, the same layers unrolled, their variables)."""
    stack, loop = STACKS[kind]
    params = initial(rng, stack)["params"]
    layers = {f"layer_{i}": jax.tree.map(lambda p, i=i: p[i], params["layers"]) for i in range(3)}
    return stack, {"params": params}, loop, {"params": layers}


def compile_model(model, variables, batches, **settings):
    return aj.linen.compile(model, variables, batches, fit=PAPER, **settings)
