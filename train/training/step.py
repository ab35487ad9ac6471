"""The pure training step: cross entropy, and Adam with a learning rate that drops in steps."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

import asap_jax as aj
from train.recipes.schema import Recipe


@flax.struct.dataclass
class TrainState:
    """Everything that changes in training.

    Attributes:
      step: number of steps taken, a 0-d int32 array.
      params: the model's parameters.
      opt_state: the optimiser's state.
      rng: data of the run's random key, ``(2,)`` uint32; dropout depends on it and on the step.
      amortized: the ``aj.AmortizedState`` of a run that trains through compiled layers, or None.
      best: the best parameters so far, see ``first_best``; None in runs that keep the last ones,
        and while the steps run.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    rng: jax.Array
    amortized: Any = None
    best: dict[str, Any] | None = None


def optimizer(recipe: Recipe, steps_per_epoch: int) -> optax.GradientTransformation:
    """Adam whose learning rate is divided by ten after each of ``recipe.drops`` epochs."""
    drops = {epoch * steps_per_epoch: 0.1 for epoch in recipe.drops}
    return optax.adam(optax.piecewise_constant_schedule(recipe.learning_rate, drops))


def create(
    model: nn.Module,
    tx: optax.GradientTransformation,
    inputs: jax.Array,
    key: jax.Array,
    amortized: aj.linen.AmortizedTraining | None = None,
    *,
    keep_best: bool = False,
) -> TrainState:
    """The state before the first step.

    Args:
      model: the model to train.
      tx: the optimiser.
      inputs: a batch; only its shape and dtype are used.
      key: random key of the run.
      amortized: trains through compiled layers; they predict 0 until the first refresh.
      keep_best: whether the run keeps the parameters of its best evaluation.
    """
    params = model.init(key, inputs)["params"]
    layers = None if amortized is None else amortized.empty({"params": params}, inputs)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(params),
        rng=jax.random.key_data(jax.random.fold_in(key, 1)),
        amortized=layers,
        best=first_best(params, layers) if keep_best else None,
    )


def first_best(params: dict, layers: Any) -> dict[str, Any]:
    """The best parameters before any evaluation, with the structure of all later ones.

    ``step`` is the number of steps taken, ``correct`` the number of held-out examples classified
    correctly (-1 before an evaluation), ``params`` the parameters, and ``amortized`` the compiled
    layers, if the run trains through them.
    """
    best = {"step": jnp.zeros((), jnp.int32), "correct": -jnp.ones((), jnp.int32), "params": params}
    return best if layers is None else {**best, "amortized": layers}


def loss_and_accuracy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross entropy in nats and share of correct predictions.

    Args:
      logits: ``(batch, classes)``.
      labels: ``(batch,)`` integers.
    """
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


def train_step(
    state: TrainState,
    inputs: jax.Array,
    labels: jax.Array,
    *,
    model_at: Callable[[jax.Array], nn.Module],
    tx: optax.GradientTransformation,
    axis_name: str | None = None,
    accumulate: int = 1,
    amortized: aj.linen.AmortizedTraining | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step, a pure function.

    Args:
      state: before the step.
      inputs: ``(batch, ...)``, normalised images or tokens.
      labels: ``(batch,)`` integers.
      model_at: from the step to the linen module, see ``train.training.factory.training``.
      tx: the optimiser of ``state``.
      axis_name: average gradients and metrics over this mapped axis (``jax.pmap``).
      accumulate: number of equal parts of the batch that go through the model one after the other.
      amortized: runs the model with the compiled layers of ``state.amortized``; None for its own.

    Returns:
      The state after the step, and ``{"loss", "accuracy"}`` of the batch before the update.
    """
    model = model_at(state.step)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    if axis_name is not None:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))

    def objective(params, inputs, labels, key):
        rngs = {"dropout": key}
        variables = {"params": params}
        if amortized is not None:
            variables = amortized.variables(state.amortized, variables)
        logits = model.apply(variables, inputs, deterministic=False, rngs=rngs)
        return loss_and_accuracy(logits, labels)

    both = jax.value_and_grad(objective, has_aux=True)
    if accumulate == 1:
        result = both(state.params, inputs, labels, key)
    else:
        result = _mean_over_parts(
            functools.partial(both, state.params), inputs, labels, key, accumulate
        )
    (loss, accuracy), gradient = result
    metrics = {"loss": loss, "accuracy": accuracy}
    if axis_name is not None:
        gradient, metrics = jax.lax.pmean((gradient, metrics), axis_name)
    updates, opt_state = tx.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, metrics


def _mean_over_parts(function, inputs, labels, key, parts: int):
    """Mean of ``function(inputs, labels, key)`` over equal parts of the batch, one at a time."""
    # Each part takes every parts-th row, so that rows stay on their devices.
    cut = lambda x: jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
    part = (cut(inputs), cut(labels), jax.random.split(key, parts))
    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], part))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = lambda total, part: (jax.tree.map(jnp.add, total, function(*part)), None)
    total, _ = jax.lax.scan(add, zero, part)
    return jax.tree.map(lambda x: x / parts, total)
