"""Fashion-MNIST: the demo on packaged images, and a small vision transformer.

::

  python -m train demo
  python -m train train fashion_mnist --data-dir DIR
"""

import asap_jax as aj
from train.data.images import Pixels
from train.models.vit import ViTSizes
from train.recipes.common import SMALL_VIT
from train.recipes.presets import Presets, Sources
from train.recipes.schema import Recipe

_INPUTS = Pixels((28, 28, 1), mean=(0.2860,), std=(0.3530,), shift=1, flip=True)
_SOURCES = Sources(
    data=("dataset", "num_classes", "splits", "inputs.shape", "inputs.mean", "inputs.std"),
    assumed=(
        "inputs",
        "model",
        "spec",
        "epochs",
        "batch_size",
        "learning_rate",
        "softmax_learning_rate",
        "drops",
        "train_share",
        "attention",
    ),
)

DEMO = Recipe(
    name="demo",
    summary="2-layer ViT with S=10 on the packaged 2,000 Fashion-MNIST images",
    cost="3 to 5 minutes on 2 CPU cores, table and picture included",
    expected="0.80 on the packaged 500 test images (0.798, 0.800, 0.802 for seeds 0, 1, 2)",
    dataset="fashion_mnist",
    num_classes=10,
    inputs=_INPUTS,
    model=ViTSizes(
        patch_size=4, width=64, depth=2, num_heads=4, head_dim=8, mlp_dim=256, position_stddev=0.5
    ),
    spec=aj.SinkhornSpec(num_steps=10),
    epochs=50,
    batch_size=50,
    learning_rate=7e-4,
    drops=(38,),
    packaged=True,
    preset="small",
)

SMALL = Recipe(
    name="fashion_mnist",
    summary="4-layer ViT with S=10 on Fashion-MNIST",
    cost="5 minutes on 2 CPU cores (12,000 images: 3,600 steps)",
    expected="0.858, 0.862, 0.858 on 10,000 test images (seeds 0, 1, 2)",
    dataset="fashion_mnist",
    num_classes=10,
    inputs=_INPUTS,
    model=SMALL_VIT,
    spec=aj.SinkhornSpec(num_steps=10),
    epochs=15,
    batch_size=50,
    learning_rate=1e-3,
    drops=(11,),
    preset="small",
)

PRESETS = (Presets(_SOURCES, small=DEMO), Presets(_SOURCES, small=SMALL))
