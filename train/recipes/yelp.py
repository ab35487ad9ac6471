"""Yelp Review Full: the stars of a review, 1 to 5 (paper, text classification).

::

  python -m train train yelp --data-dir DIR
  python -m train train yelp --preset small --data-dir DIR

The catalogue of TFDS has no Yelp Review Full: ``yelp_review_full`` must be a folder of the same
form in DIR, with the features ``text`` and ``label``. The small preset reads a stand-in,
``yelp_stars_sample``: 5,000 training and 5,000 test reviews, whose stars are not balanced.
"""

import dataclasses

from train.data.text import Tokens
from train.recipes import ag_news
from train.recipes.common import SMALL_ENCODER, TEXT_ASSUMED, TEXT_DATA, TEXT_PAPER
from train.recipes.presets import Presets, Sources

PAPER = dataclasses.replace(
    ag_news.PAPER,
    name="yelp",
    summary="6-layer text encoder with S=10 on Yelp Review Full, 128 tokens (paper, text "
    "classification)",
    expected="not measured; the paper reports 0.545 with 650,000 texts",
    dataset="yelp_review_full",
    num_classes=5,
    inputs=dataclasses.replace(ag_news.PAPER.inputs, features=("text",)),
)

SMALL = dataclasses.replace(
    PAPER,
    summary="2-layer text encoder with S=10 on 5,000 other Yelp reviews with stars, 128 tokens",
    cost="about 4 minutes on one CPU core (5,000 texts, a tenth held out: 720 steps)",
    expected="0.558 on 5,000 test texts (seed 0)",
    dataset="yelp_stars_sample",
    inputs=Tokens(("text",), vocab_size=8_000, length=128, unknown=0.15),
    model=SMALL_ENCODER,
    epochs=8,
    batch_size=50,
    learning_rate=1e-3,
    drops=(6,),
    preset="small",
)

PRESETS = (Presets(Sources(TEXT_PAPER, TEXT_DATA, TEXT_ASSUMED), PAPER, SMALL),)
