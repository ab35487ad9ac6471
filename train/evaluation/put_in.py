"""What a trained model does when true Sinkhorn attention is put in the place of its own."""

import dataclasses

import asap_jax as aj
from train.data.examples import Examples
from train.evaluation.fidelity import BATCH_SIZE, jitted
from train.training import factory
from train.training.teacher import Teacher, accuracy, predict


@dataclasses.dataclass(frozen=True)
class PutIn:
    """The two models on the same test examples.

    Attributes:
      own: accuracy with the attention that the model trained through.
      sinkhorn: accuracy with true Sinkhorn in its place; the parameters are the same.
      agreement: share of the examples on which both predict the same class.
      examples: number of test examples.
    """

    own: float
    sinkhorn: float
    agreement: float
    examples: int


def measure(trained: Teacher, test: Examples, spec: aj.SinkhornSpec | None = None) -> PutIn:
    """Accuracies of a model with its own attention and with true Sinkhorn, and their agreement.

    Args:
      trained: a model with any attention that has no parameters.
      test: examples with labels.
      spec: of the Sinkhorn attention to put in; None for that of the recipe.
    """
    recipe = trained.recipe
    spec = recipe.spec if spec is None else spec
    inputs = recipe.inputs.prepare(test)
    models = (
        (factory.build(recipe), trained.compiled or trained.variables),
        (factory.build(recipe, factory.attention("sinkhorn", spec)), trained.variables),
    )
    own, sinkhorn = (
        predict(jitted(model), variables, inputs, batch_size=BATCH_SIZE)
        for model, variables in models
    )
    return PutIn(
        accuracy(own, test.labels),
        accuracy(sinkhorn, test.labels),
        float(aj.metrics.agreement(own, sinkhorn)),
        len(test),
    )
