"""Cats and Dogs: the paper's vision transformer, also on 10 % and 25 % of the training images.

::

  python -m train train cats_vs_dogs --data-dir DIR
  python -m train train cats_vs_dogs --preset small --data-dir DIR --train-share 0.1

The data set has one split only; its last fifth is the test set.
"""

import dataclasses

import asap_jax as aj
from train.data.images import Pixels
from train.recipes.common import PAPER_VIT, SMALL_VIT, UNTRIED
from train.recipes.presets import Presets, Sources
from train.recipes.schema import Recipe

_SOURCES = Sources(
    paper=(
        "dataset",
        "inputs.shape",
        "inputs.flip",
        "inputs.crop",
        "model.patch_size",
        "model.width",
        "model.depth",
        "model.num_heads",
        "model.mlp_dim",
        "spec",
        "epochs",
        "batch_size",
        "learning_rate",
        "drops",
        "train_share",
        "attention",
    ),
    data=("num_classes",),
    assumed=("splits", "inputs", "model", "softmax_learning_rate"),
)

PAPER = Recipe(
    name="cats_vs_dogs",
    summary="6-layer ViT with S=10 on Cats and Dogs at 224x224 (paper, Cats and Dogs)",
    cost=UNTRIED,
    expected="not measured; the paper reports 0.811 on the full set",
    dataset="cats_vs_dogs",
    splits=("train[:80%]", "train[80%:]"),
    num_classes=2,
    inputs=Pixels((224, 224, 3), mean=(0.5,) * 3, std=(0.5,) * 3, crop=True, flip=True),
    model=dataclasses.replace(PAPER_VIT, patch_size=16),
    spec=aj.SinkhornSpec(num_steps=10),
    epochs=300,
    batch_size=64,
    learning_rate=3e-5,
    drops=(250,),
)

SMALL = dataclasses.replace(
    PAPER,
    summary="4-layer ViT with S=10 on Cats and Dogs at 64x64, patch 8",
    cost="not measured yet (2,000 images: 3,200 steps)",
    expected="not measured yet",
    inputs=dataclasses.replace(PAPER.inputs, shape=(64, 64, 3)),
    model=dataclasses.replace(SMALL_VIT, patch_size=8),
    epochs=80,
    batch_size=50,
    learning_rate=1e-3,
    drops=(65,),
    preset="small",
)

PRESETS = (Presets(_SOURCES, PAPER, SMALL),)
