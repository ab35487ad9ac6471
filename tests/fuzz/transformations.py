"""Cases of transformations: each gives what the plain call gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from fuzz.values import PREDICTED
from jax.sharding import AxisType, PartitionSpec

import asap_jax as aj

BATCH, LENGTH, HEADS, DIM = 2, 6, 2, 4
PREDICTOR = aj.Predictor(
    (aj.Moments(),),
    coefficients=0.05 * np.random.default_rng(0).normal(size=(HEADS, DIM + 8)).astype("f"),
)
OPERATORS = {
    "sinkhorn, 4 steps": functools.partial(aj.sinkhorn_attention, spec=aj.SinkhornSpec(4)),
    "sinkhorn, tiles": functools.partial(
        aj.sinkhorn_attention, spec=aj.SinkhornSpec(5), implementation="streaming"
    ),
    "compiled": functools.partial(
        aj.asap_attention, predictor=PREDICTOR, spec=aj.SinkhornSpec(5), closures=2
    ),
}
TRANSFORMATIONS = {}


def transformation(function):
    """Registers ``function(operator) -> (transformed, plain)``, two functions of q, k and v."""
    TRANSFORMATIONS[function.__name__] = function
    return function


@transformation
def vmap_over_queries(f):
    transformed = jax.vmap(f, in_axes=(0, None, None))
    return lambda q, k, v: transformed(q[:, None], k[:1], v[:1]), lambda q, k, v: jnp.stack(
        [f(x[None], k[:1], v[:1]) for x in q]
    )


@transformation
def nested_vmap(f):
    deep = jax.vmap(jax.vmap(f, in_axes=(None, 0, 0)), in_axes=(0, None, None))
    return lambda q, k, v: deep(q, k, v), lambda q, k, v: jnp.stack(
        [jnp.stack([f(x, *y) for y in zip(k, v, strict=True)]) for x in q]
    )


@transformation
def vmap_over_masks(f):
    masks = np.random.default_rng(1).random((3, 1, 1, LENGTH, LENGTH)) < 0.7
    masked = jax.vmap(lambda m, *x: f(*x, mask=m), in_axes=(0, None, None, None))
    return lambda *x: masked(masks, *x), lambda *x: jnp.stack([f(*x, mask=m) for m in masks])


@transformation
def gradient(f):
    """Reverse mode against forward mode, along the values of the tokens themselves."""
    loss = lambda *x: jnp.sum(jnp.sin(f(*x)))
    pulled = lambda *x: sum(
        jnp.sum(g * y) for g, y in zip(jax.grad(loss, (0, 1, 2))(*x), x, strict=True)
    )
    return pulled, lambda *x: jax.jvp(loss, x, x)[1]


@transformation
def jacobian(f):
    first = lambda q, k, v: f(q, k, v)[0, 0, 0]
    return lambda *x: jax.jacrev(first)(*x), lambda *x: jax.jacfwd(first)(*x)


@transformation
def remat(f):
    loss = lambda f: jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))))
    return loss(jax.checkpoint(f)), loss(f)


@transformation
def scan(f):
    def layers(q, k, v):
        return jax.lax.scan(lambda x, _: (x + f(x, k, v), None), q, None, length=2)[0]

    def loop(q, k, v):
        q = q + f(q, k, v)
        return q + f(q, k, v)

    return layers, loop


@transformation
def pmap(f):
    mapped = jax.pmap(f)
    apart = lambda x: x.reshape(2, BATCH // 2, *x.shape[1:])
    return lambda *x: mapped(*map(apart, x)).reshape(x[0].shape), f


@transformation
def shard_map(f):
    spec = PartitionSpec("x")
    mapped = jax.shard_map(f, mesh=_mesh(AxisType.Auto), in_specs=spec, out_specs=spec)
    return mapped, f


@transformation
def explicit_mesh(f):
    mesh = _mesh(AxisType.Explicit)

    def sharded(*x):
        with jax.set_mesh(mesh):
            placed = [jax.device_put(y, PartitionSpec("x")) for y in x]
            return np.asarray(jax.jit(f)(*placed))

    return sharded, f


def _mesh(kind):
    return jax.make_mesh((2,), ("x",), axis_types=(kind,))


@functools.cache
def _pair(name, operator):
    transformed, plain = TRANSFORMATIONS[name](OPERATORS[operator])
    jitted = transformed if name in ("pmap", "explicit_mesh") else jax.jit(transformed)
    return jitted, jax.jit(plain)


def check(rng, _):
    """One case: a transformation of an operator, at random values."""
    pick = lambda options: list(options)[rng.integers(len(options))]
    name, operator = pick(TRANSFORMATIONS), pick(OPERATORS)
    size, offset = pick((0.3, 1.0, 3.0)), pick((0.0, 0.0, 100.0))
    if operator == "compiled":
        offset = min(offset, PREDICTED)
    q, k, v = (size * rng.normal(size=(BATCH, LENGTH, HEADS, DIM)) for _ in range(3))
    arrays = [x.astype("f") for x in (q + offset, k + offset, v)]
    if offset and name in ("gradient", "scan"):  # they use the offset itself
        arrays = [x.astype("f") for x in (q, k, v)]
    transformed, plain = _pair(name, operator)
    out, expected = np.asarray(transformed(*arrays)), np.asarray(plain(*arrays))
    assert np.isfinite(out).all(), f"{name} of {operator} is not finite"
    scale = max(1.0, np.abs(expected).max())
    error = np.abs(out - expected).max() / scale
    assert error < 2e-4 * max(1.0, size**2), f"{name} of {operator}: error {error:.3g}"
