"""The supervised refresh after replacement (paper, shallow MNIST protocol), and its control.

A one-layer model is compiled with a residual log-sum-exp fit of the dual. Then the ASAP
coefficients, the token bias, the attention's output projection, the layer norms and the classifier
head are trained for a few epochs. The control trains the Sinkhorn teacher for the same number of
epochs.
"""

import dataclasses
from collections.abc import Callable

import jax
import optax

import asap_jax as aj
from train.data.examples import Batches, Examples
from train.recipes.schema import Recipe
from train.reporting import progress
from train.training import factory
from train.training.step import loss_and_accuracy
from train.training.teacher import Teacher, accuracy, predict

EPOCHS = 5
LEARNING_RATE = 2e-4
TRAINED = {"out", "attention_norm", "mlp_norm", "norm", "classifier", "coefficients", "token_bias"}
"""A leaf is trained when a part of its path has one of these names."""


@dataclasses.dataclass(frozen=True)
class Accuracies:
    """Test accuracies before and after the same number of extra epochs.

    Attributes:
      replaced, refreshed: the compiled model, right after replacement and after the refresh.
      teacher, continued: the Sinkhorn teacher, before and after the extra epochs.
    """

    replaced: float
    refreshed: float
    teacher: float
    continued: float


def freeze_features(variables: dict, frozen: bool) -> dict:
    """Compiled variables with sliced features that are frozen (pass no gradient), or not."""

    def set_frozen(family):
        return family.replace(frozen=frozen) if isinstance(family, aj.SlicedPotentials) else family

    is_family = lambda x: isinstance(x, aj.SlicedPotentials)
    return {**variables, "asap": jax.tree.map(set_frozen, variables["asap"], is_leaf=is_family)}


def trained_leaves(variables: dict) -> dict:
    """``"train"`` or ``"keep"`` for every leaf, by its path."""

    def label(path, _):
        names = {str(getattr(part, "key", getattr(part, "name", part))) for part in path}
        return "train" if names & TRAINED else "keep"

    return jax.tree_util.tree_map_with_path(label, variables)


def continue_training(
    recipe: Recipe,
    variables: dict,
    examples: Examples,
    labels: Callable[[dict], dict],
    *,
    seed: int,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    title: str,
) -> dict:
    """Trains some leaves of a model's variables for a few more epochs.

    Args:
      recipe: recipe of the teacher; gives the model and the batches.
      variables: linen variables, compiled or not.
      examples: the training split.
      labels: from variables to ``"train"`` or ``"keep"`` for every leaf.
      seed: fixes the order of the data.
      epochs: number of epochs.
      learning_rate: constant learning rate of Adam.
      title: title of the progress bar.

    Returns:
      The trained variables.
    """
    model = factory.build(recipe)
    tx = optax.multi_transform(
        {"train": optax.adam(learning_rate), "keep": optax.set_to_zero()}, labels(variables)
    )

    @jax.jit
    def take_step(variables, state, images, targets):
        def objective(variables):
            return loss_and_accuracy(model.apply(variables, images), targets)

        (loss, _), gradient = jax.value_and_grad(objective, has_aux=True)(variables)
        updates, state = tx.update(gradient, state, variables)
        return optax.apply_updates(variables, updates), state, loss

    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed)
    state, total = tx.init(variables), epochs * batches.steps_per_epoch
    with progress.bar(title, total) as report:
        for count in range(total):
            variables, state, loss = take_step(variables, state, *batches.at(count))
            if (count + 1) % 20 == 0 or count + 1 == total:
                report(count + 1, f"loss {float(loss):.3f}")
    return variables


def run(
    teacher: Teacher,
    compiled: dict,
    train: Examples,
    test: Examples,
    *,
    frozen: bool = False,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
) -> Accuracies:
    """Runs the refresh of a compiled teacher, and its control.

    Args:
      teacher: the Sinkhorn teacher.
      compiled: its compiled variables.
      train, test: the splits.
      frozen: freeze the features; otherwise gradients pass through their sorts.
      epochs, learning_rate: settings of both trainings.
    """
    recipe = teacher.recipe
    settings = dict(seed=teacher.seed, epochs=epochs, learning_rate=learning_rate)
    refreshed = continue_training(
        recipe,
        freeze_features(compiled, frozen),
        train,
        trained_leaves,
        title="refresh compiled",
        **settings,
    )
    continued = continue_training(
        recipe,
        teacher.variables,
        train,
        lambda variables: jax.tree.map(lambda _: "train", variables),
        title="continue teacher",
        **settings,
    )
    apply = jax.jit(factory.build(recipe).apply)
    images = recipe.inputs.prepare(test)
    score = lambda variables: accuracy(predict(apply, variables, images), test.labels)
    return Accuracies(
        replaced=score(compiled),
        refreshed=score(refreshed),
        teacher=score(teacher.variables),
        continued=score(continued),
    )
