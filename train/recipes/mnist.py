"""MNIST: the paper's shallow model, for the table of patch sizes 2, 4, 7 and 14.

::

  python -m train train mnist --data-dir DIR --patch-size 2
  python -m train train mnist --preset small --data-dir DIR

With ``--attention softmax`` or ``diff`` the learning rate is 1e-3 (paper, "Shallow MNIST Layer
Replacement Protocol").
"""

import dataclasses

import asap_jax as aj
from train.data.images import Pixels
from train.models.vit import ViTSizes
from train.recipes.presets import Presets, Sources
from train.recipes.schema import Recipe

_SOURCES = Sources(
    paper=(
        "dataset",
        "splits",
        "model",
        "spec",
        "epochs",
        "batch_size",
        "learning_rate",
        "softmax_learning_rate",
        "drops",
        "attention",
    ),
    data=("num_classes", "inputs.shape", "inputs.mean", "inputs.std"),
    assumed=(
        "inputs",
        "model.width",
        "model.head_dim",
        "model.position_stddev",
        "model.dropout",
        "train_share",
    ),
)

PAPER = Recipe(
    name="mnist",
    summary="one layer, one head, attention and residual only, S=5 (paper, shallow MNIST layer)",
    cost="not measured yet (20,000 images: 9,000 steps)",
    expected="not measured yet; the paper reports 0.96 with 60,000 images",
    dataset="mnist",
    num_classes=10,
    inputs=Pixels((28, 28, 1), mean=(0.1307,), std=(0.3081,)),
    model=ViTSizes(
        patch_size=7, width=128, depth=1, num_heads=1, head_dim=64, mlp_dim=0, position_stddev=1.0
    ),
    spec=aj.SinkhornSpec(num_steps=5),
    epochs=45,
    batch_size=100,
    learning_rate=2e-3,
    softmax_learning_rate=1e-3,
    drops=(35, 41),
)

SMALL = dataclasses.replace(
    PAPER,
    summary="one layer, one head, attention and residual only, S=5, images moved by a pixel",
    cost="2 minutes on 2 CPU cores (20,000 images: 16,000 steps)",
    expected="0.956, 0.968, 0.967 on 10,000 test images (seeds 0, 1, 2)",
    inputs=dataclasses.replace(PAPER.inputs, shift=1),
    epochs=80,
    drops=(60, 72),
    preset="small",
)

PRESETS = (Presets(_SOURCES, PAPER, SMALL),)
