"""The small image model that notebooks 2, 4 and 5 train: a few seconds on one CPU core."""

import functools
import itertools
import sys

sys.path.insert(0, "../..")  # `train` is run from the repository, not installed

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import asap_jax as aj
from train.recipes.catalogue import DEMO
from train.training.splits import load_data

BATCH, CHUNK = 32, 25  # images in a batch, batches in a call of `train`
split = load_data(DEMO)  # packaged Fashion-MNIST images
images, test_images = (DEMO.inputs.prepare(part) for part in (split.train, split.test))
labels, test_labels = split.train.labels, split.test.labels
adam = optax.scale_by_adam()


class Classifier(nn.Module):
    """One attention layer over the 49 patches of an image; Flax but for ``attention_fn``."""

    spec: aj.SinkhornSpec  # num_steps=1 is softmax

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (4, 4), strides=(4, 4))(images)
        x = x.reshape(x.shape[0], -1, 32)
        x = x + self.param("positions", nn.initializers.normal(0.5), (1, x.shape[1], 32))
        attention = aj.linen.SinkhornAttention(self.spec)  # one instance per layer
        heads = nn.MultiHeadDotProductAttention(4, qkv_features=64, attention_fn=attention)
        x = x + heads(nn.LayerNorm()(x))
        return nn.Dense(10)(nn.LayerNorm()(x).max(axis=1))


def begin(seed=0):
    """Fresh variables, and the order of the images as an endless random stream of chunks."""
    init = jax.jit(Classifier(aj.SinkhornSpec(1)).init)
    draw = np.random.default_rng(seed)
    chunks = (draw.integers(0, len(images), (CHUNK, BATCH)) for _ in itertools.count())
    return init(jax.random.key(seed), images[:2]), chunks


@functools.partial(jax.jit, static_argnames="spec")
def _train(variables, state, batches, rate, spec):
    def loss(variables, images, labels):
        logits = Classifier(spec).apply(variables, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(carry, batch):
        variables, state = carry
        updates, state = adam.update(jax.grad(loss)(variables, *batch), state)
        updates = jax.tree.map(lambda update: -rate * update, updates)
        return (optax.apply_updates(variables, updates), state), None

    return jax.lax.scan(step, (variables, state), batches)[0]


def train(variables, chunk, *, num_steps, rate=3e-3, state=None):
    """Trains on the images of one chunk by Adam; returns variables and state of the optimiser."""
    state = adam.init(variables) if state is None else state
    batches = images[chunk], jnp.asarray(labels)[chunk]
    return _train(variables, state, batches, rate, aj.SinkhornSpec(num_steps))


@functools.partial(jax.jit, static_argnames="num_steps")
def logits(variables, num_steps):
    """Logits of the test images; compiled variables run their compiled layer."""
    return Classifier(aj.SinkhornSpec(num_steps)).apply(variables, test_images)


def accuracy(logits):
    """Share of the test images that are classified correctly."""
    return float((logits.argmax(-1) == test_labels).mean())
