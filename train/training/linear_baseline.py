"""The linear baseline of a recipe: logistic regression on pixels or on a bag of tokens.

It is fitted to the same training examples, prepared as for the model. A teacher's accuracy can be
compared with it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.data.examples import Examples
from train.data.text import PAD
from train.recipes.schema import Recipe
from train.training.splits import Split
from train.training.teacher import accuracy

DECAYS = (1e-4, 1e-3, 1e-2)
STEPS = 150


def features(recipe: Recipe, examples: Examples) -> np.ndarray:
    """Float32 ``(examples, features)``: normalised pixels, or which tokens are in a text.

    The row of a text has unit norm, so that long texts weigh as much as short ones.
    """
    inputs = recipe.inputs.prepare(examples)
    if not recipe.is_text:
        return inputs.reshape(len(inputs), -1)
    present = np.zeros((len(inputs), recipe.inputs.vocab_size), np.float32)
    present[np.arange(len(inputs))[:, None], inputs] = 1
    present[:, PAD] = 0
    return present / np.maximum(np.linalg.norm(present, axis=1, keepdims=True), 1)


def fit(
    x: np.ndarray, labels: np.ndarray, num_classes: int, decay: float
) -> tuple[jax.Array, jax.Array]:
    """Weights ``(features, classes)`` and biases ``(classes,)`` of the fit, by L-BFGS.

    The loss is the mean cross entropy in nats plus ``decay`` times the sum of squared weights.

    Args:
      x: ``(examples, features)``.
      labels: ``(examples,)`` integers.
      num_classes: number of classes.
      decay: weight of the penalty.
    """
    x, labels = jnp.asarray(x), jnp.asarray(labels)

    def loss(params):
        logits = x @ params[0] + params[1]
        fitted = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return fitted + decay * jnp.sum(jnp.square(params[0]))

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        params, state = carry
        value, gradient = value_and_grad(params, state=state)
        updates, state = solver.update(
            gradient, state, params, value=value, grad=gradient, value_fn=loss
        )
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params):
        return jax.lax.scan(step, (params, solver.init(params)), length=STEPS)[0][0]

    return run((jnp.zeros((x.shape[1], num_classes)), jnp.zeros(num_classes)))


def run(recipe: Recipe, split: Split) -> tuple[float, float]:
    """Test accuracy and decay; the decay is chosen on the last tenth of the training split."""
    x, labels = features(recipe, split.train), split.train.labels
    num_fitted = len(labels) - len(labels) // 10

    def score(params, x, labels):
        return accuracy(x @ np.asarray(params[0]) + np.asarray(params[1]), labels)

    held_out = {}
    for decay in DECAYS:
        params = fit(x[:num_fitted], labels[:num_fitted], recipe.num_classes, decay)
        held_out[decay] = score(params, x[num_fitted:], labels[num_fitted:])
    best = max(held_out, key=held_out.get)
    params = fit(x, labels, recipe.num_classes, best)
    return score(params, features(recipe, split.test), split.test.labels), best
