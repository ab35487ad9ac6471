"""DBpedia-14: topics of encyclopaedia abstracts (paper, text classification).

::

  python -m train train dbpedia --data-dir DIR
  python -m train train dbpedia --preset small --data-dir DIR

The catalogue of TFDS has no DBpedia-14: ``dbpedia_14`` must be a folder of the same form in DIR,
with the features ``title``, ``content`` and ``label``. The small preset reads a sample of 5,000
training and 5,000 test abstracts without titles, ``dbpedia_14_sample``.
"""

import dataclasses

from train.data.text import Tokens
from train.recipes import ag_news
from train.recipes.common import SMALL_ENCODER, TEXT_ASSUMED, TEXT_DATA, TEXT_PAPER
from train.recipes.presets import Presets, Sources

PAPER = dataclasses.replace(
    ag_news.PAPER,
    name="dbpedia",
    summary="6-layer text encoder with S=10 on DBpedia-14, 128 tokens (paper, text classification)",
    expected="not measured; the paper reports 0.983 with 560,000 texts",
    dataset="dbpedia_14",
    num_classes=14,
    inputs=dataclasses.replace(ag_news.PAPER.inputs, features=("title", "content")),
)

SMALL = dataclasses.replace(
    PAPER,
    summary="2-layer text encoder with S=10 on a sample of DBpedia-14, 64 tokens",
    cost="4 minutes on a shared CPU core (4,999 texts, a tenth held out: 1,068 steps)",
    expected="0.882 on 5,000 test texts (seed 0)",
    dataset="dbpedia_14_sample",
    inputs=Tokens(("content",), vocab_size=8_000, length=64, unknown=0.15),
    model=SMALL_ENCODER,
    epochs=12,
    batch_size=50,
    learning_rate=1e-3,
    drops=(9,),
    preset="small",
)

PRESETS = (Presets(Sources(TEXT_PAPER, TEXT_DATA, TEXT_ASSUMED), PAPER, SMALL),)
