"""The pure training step: cross entropy, Adam, a learning rate that drops by steps."""

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from train.recipes import Recipe


@flax.struct.dataclass
class TrainState:
    """All that changes while training.

    Attributes:
      step: steps taken, a 0-d int32 array; with the seed it also fixes the next batch.
      params: the model's parameters.
      opt_state: the optimiser's state.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def optimizer(recipe: Recipe, steps_per_epoch: int) -> optax.GradientTransformation:
    """Adam whose learning rate is divided by ten after each of ``recipe.drops`` epochs."""
    drops = {epoch * steps_per_epoch: 0.1 for epoch in recipe.drops}
    return optax.adam(optax.piecewise_constant_schedule(recipe.learning_rate, drops))


def create(
    model: nn.Module, tx: optax.GradientTransformation, images: jax.Array, seed: int
) -> TrainState:
    """A fresh state; ``images`` is a batch that only lends its shape."""
    params = jax.jit(model.init)(jax.random.key(seed), images)["params"]
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=tx.init(params))


def loss_and_accuracy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross entropy in nats and share of right answers.

    Args:
      logits: ``(batch, classes)``.
      labels: ``(batch,)`` integers.
    """
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


def train_step(
    state: TrainState,
    images: jax.Array,
    labels: jax.Array,
    *,
    model: nn.Module,
    tx: optax.GradientTransformation,
    axis_name: str | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step, a pure function.

    Args:
      state: before the step.
      images: ``(batch, height, width, channels)``, normalised.
      labels: ``(batch,)`` integers.
      model: the linen module; hashable, so it may be a static argument.
      tx: the optimiser of ``state``.
      axis_name: average gradients and metrics over this mapped axis (``jax.pmap``).

    Returns:
      ``(state, {"loss", "accuracy"})`` after the step; the metrics are of the batch before it.
    """

    def objective(params):
        return loss_and_accuracy(model.apply({"params": params}, images), labels)

    (loss, accuracy), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
    metrics = {"loss": loss, "accuracy": accuracy}
    if axis_name is not None:
        gradient, metrics = jax.lax.pmean((gradient, metrics), axis_name)
    updates, opt_state = tx.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics


def jitted_step(model: nn.Module, tx: optax.GradientTransformation):
    """``train_step`` compiled for one model and optimiser; the old state's buffers are reused."""
    return jax.jit(functools.partial(train_step, model=model, tx=tx), donate_argnums=0)
