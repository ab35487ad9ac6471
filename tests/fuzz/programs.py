"""The menu of the fuzz: attention calls with everything fixed that is compiled.

A case takes one program and draws values for it, so thousands of cases need a few dozen programs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from fuzz import predictors

import asap_jax as aj
from asap_jax.problem import make_problem
from asap_jax.solvers.closures import Closures
from asap_jax.solvers.flash import loop
from asap_jax.solvers.flash import reference as plain_kernel

SHAPES = [  # batch, queries, keys, heads, key heads, head_dim, value_dim
    (2, 7, 7, 2, 2, 4, 4),
    (2, 7, 5, 4, 2, 4, 3),
    (1, 1, 1, 1, 1, 1, 1),
    (1, 1, 6, 2, 1, 8, 2),
    (2, 6, 1, 2, 2, 3, 2),
    (1, 13, 13, 1, 1, 64, 5),
    (2, 5, 9, 2, 2, 2, 1),
]
BIASES = ("none", "none", "full", "heads", "keys", "queries", "masked", "minus infinity")
MASKS = ("none", "none", "bool", "int", "float", "keys", "queries", "tokens")
IMPLEMENTATIONS = ("auto", "log", "scaling", "streaming", "seam")
DTYPES = ("float32",) * 5 + ("float16", "bfloat16", "float64")
STEPS = (1, 2, 3, 4, 5, 10, 20, 40)


@dataclasses.dataclass(frozen=True)
class Program:
    """What one compiled program computes.

    Attributes:
      family: of the features, or None for the teacher.
      side: of the predicted dual; closures: their number.
      ending: see ``asap_attention``.
      shape: see ``SHAPES``; bias, mask: how they are spelt.
    """

    spec: aj.SinkhornSpec
    family: str | None
    side: str
    closures: int
    ending: str
    implementation: str
    dtype: str
    shape: tuple
    bias: str
    mask: str

    @property
    def x64(self):
        """Whether 64-bit types are enabled."""
        return self.dtype == "float64"

    def __call__(self, *arrays):
        """The output for query, key, value, bias and mask, and for the arrays of the predictor."""
        with jax.enable_x64(self.x64):
            return np.asarray(_compiled(self)(*arrays).astype(np.float64 if self.x64 else "f"))


def menu(count, seed=0):
    """``count`` programs; the first ones are the same for every count."""
    return [draw(np.random.default_rng((seed, i)), i) for i in range(count)]


def draw(rng, index=0):
    """A random program. ``index`` steps through families, implementations and shapes evenly."""
    pick = lambda options: options[rng.integers(len(options))]
    families = (None, "slices", "moments", None, "codebook", "slices of one call")
    family = families[index % len(families)]
    implementation = IMPLEMENTATIONS[index % len(IMPLEMENTATIONS)]
    shape = SHAPES[index % len(SHAPES)] if index % 2 else pick(SHAPES)
    spec = aj.SinkhornSpec(
        num_steps=pick(STEPS) if family is None else pick(STEPS[1:]),
        epsilon=pick((1.0, 1.0, 0.5, 0.1)),
        key_mass=pick(("balanced", "balanced", "unit")),
        padding=pick(("self", "none")),
        scale=pick((None, None, 0.5)),
    )
    side, closures, ending = "query", 1 + (spec.num_steps % 2), "teacher"
    if family == "slices of one call":
        family, side, closures, ending = "slices", "key", 1, "row"
        spec = dataclasses.replace(spec, key_mass="balanced")
    elif family is not None and rng.random() < 0.4:
        closures += 2
    bias, mask = pick(BIASES), pick(MASKS)
    if mask == "tokens" and shape[1] != shape[2]:
        mask = "keys"
    if implementation == "seam":  # fused kernels take duals only
        bias = "keys" if bias != "none" else bias
        mask = {"none": "none", "tokens": "tokens"}.get(mask, "keys")
    settings = spec, family, side, closures, ending, implementation
    return Program(*settings, pick(DTYPES), shape, bias, mask)


@functools.cache
def _compiled(program):
    if program.implementation == "seam":
        return jax.jit(functools.partial(_by_seam, program))
    settings = dict(spec=program.spec, implementation=program.implementation)
    if program.family is None:
        return jax.jit(lambda q, k, v, b, m, _: aj.sinkhorn_attention(q, k, v, b, m, **settings))
    settings |= dict(closures=program.closures, ending=program.ending)

    def compiled(q, k, v, bias, mask, arrays):
        predictor = predictors.build(program.family, program.side, arrays)
        return aj.asap_attention(q, k, v, bias, mask, predictor=predictor, **settings)

    return jax.jit(compiled)


def _by_seam(program, q, k, v, bias, mask, arrays):
    """The call by the seam of fused kernels, with the kernel in plain JAX."""
    from asap_jax.predictor.starting_dual import DeferredStart

    spec = program.spec
    p = make_problem(q, k, v, bias, mask, scale=spec.scale)
    if program.family is None:
        closures = Closures("key", spec.num_steps, spec.epsilon)
        start = jnp.zeros_like(p.k[..., 0])
    else:
        closures = Closures(program.side, program.closures, spec.epsilon)
        predictor = predictors.build(program.family, program.side, arrays)
        start = DeferredStart.of(predictor, spec, program.closures)(p)
    kernel = plain_kernel.kernel(precision="highest", block=4)
    p = p.without_key_offset() if closures.side == "key" else p
    out = loop.apply(kernel, p, start, p.log_key_target(spec.key_mass), closures)
    return jnp.swapaxes(out, -2, -3).astype(p.dtype)
