"""IMDb: the paper's teachers of the frozen replacement benchmark, S=20 and 512 tokens.

::

  python -m train train imdb --data-dir DIR --accumulate 4
  python -m train train imdb --preset small --data-dir DIR

The paper runs the batch of 32 in parts of 8, which ``--accumulate 4`` repeats.
"""

import dataclasses

from train.data.text import Tokens
from train.recipes.common import PADDED_TEXT, PAPER_ENCODER, SMALL_ENCODER, UNTRIED
from train.recipes.esp import Esp
from train.recipes.presets import Presets, Sources
from train.recipes.schema import Recipe

_SOURCES = Sources(
    paper=(
        "dataset",
        "splits",
        "inputs.length",
        "model.width",
        "model.depth",
        "model.num_heads",
        "spec",
        "batch_size",
        "attention",
    ),
    data=("num_classes", "inputs.features"),
    assumed=(
        "inputs.vocab_size",
        "inputs.unknown",
        "model",
        "epochs",
        "learning_rate",
        "softmax_learning_rate",
        "drops",
        "train_share",
    ),
)

PAPER = Recipe(
    name="imdb",
    summary="6-layer text encoder with S=20 on IMDb, 512 tokens (paper, IMDb replacement)",
    cost=UNTRIED,
    expected="not measured; the paper's IMDb table has the figures of the full set",
    dataset="imdb_reviews",
    num_classes=2,
    inputs=Tokens(features=("text",), vocab_size=16_000, length=512),
    model=PAPER_ENCODER,
    spec=dataclasses.replace(PADDED_TEXT, num_steps=20),
    epochs=15,
    batch_size=32,
    learning_rate=1e-4,
    esp=Esp(inverse_temperature=10.0),
)

SMALL = dataclasses.replace(
    PAPER,
    summary="1-layer text encoder with S=20 on IMDb, 256 tokens",
    cost="7 minutes on 2 CPU cores (25,000 texts: 2,000 steps)",
    expected="0.846, 0.848, 0.849 on 20,000 test texts (seeds 0, 1, 2)",
    inputs=Tokens(("text",), vocab_size=8_000, length=256, unknown=0.15),
    model=dataclasses.replace(SMALL_ENCODER, depth=1),
    epochs=4,
    batch_size=50,
    learning_rate=1e-3,
    drops=(3,),
    preset="small",
)

PRESETS = (Presets(_SOURCES, PAPER, SMALL),)
