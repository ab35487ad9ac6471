"""Turns texts into padded token numbers, with a tokenizer trained on the training split.

A text is cut into byte-pair pieces of words.  The first ``length`` pieces are used, and shorter
texts are padded at the end.  The tokenizer is stored in the run folder, beside the checkpoints.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.data.examples import Examples
from train.runtime import devices
from train.runtime.errors import UserError, need

PAD, UNKNOWN = 0, 1
SPECIAL = ("[PAD]", "[UNK]")  # their numbers are PAD and UNKNOWN
FILE = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Turns texts into inputs of the model.

    Attributes:
      features: names of the data set's features that make up the text, joined by a space.
      vocab_size: largest number of pieces of the tokenizer, including ``[PAD]`` and ``[UNK]``.
      length: number of tokens of an input; later tokens of a text are dropped.
      unknown: share of the tokens of a training batch that are replaced by ``[UNK]``.
    """

    features: tuple[str, ...]
    vocab_size: int
    length: int
    unknown: float = 0.0
    unit = "texts"

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length {self.length} must be at least 1")
        if self.vocab_size <= len(SPECIAL):
            raise ValueError(f"vocab_size {self.vocab_size} must be above {len(SPECIAL)}")
        if not 0 <= self.unknown < 1:
            raise ValueError(f"unknown {self.unknown} must be in [0, 1)")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return (self.length,)

    @property
    def dtype(self) -> type:
        """Dtype of an input."""
        return np.int32

    def prepare(self, examples: Examples) -> np.ndarray:
        """The model's inputs ``(examples, length)`` int32, unchanged."""
        return examples.values

    def training(self, examples: Examples, rng: np.random.Generator) -> np.ndarray:
        """As ``prepare``, with random tokens replaced by ``[UNK]``."""
        if not self.unknown:
            return examples.values
        hidden = rng.random(examples.values.shape) < self.unknown
        return np.where(hidden & (examples.values != PAD), np.int32(UNKNOWN), examples.values)

    def join(self, example: dict) -> str:
        """The text of one example from TFDS, whose features are UTF-8 bytes."""
        return " ".join(example[name].decode("utf-8", "replace") for name in self.features)

    def load(
        self, splits: dict[str, list[dict]], run: str | os.PathLike | None
    ) -> dict[str, np.ndarray]:
        """The tokens of each split, for ``Examples.values``.

        Args:
          splits: the examples of each split from TFDS; must have ``"train"``.
          run: the run folder that stores the tokenizer, or None.

        Raises:
          UserError: a feature is not in the data set, or the stored tokenizer cannot be used.
        """
        for examples in splits.values():
            if missing := [name for name in self.features if name not in examples[0]]:
                raise UserError(
                    f"the data set has no feature {missing[0]!r}, only {', '.join(examples[0])}"
                )
        texts = {
            name: [self.join(example) for example in examples] for name, examples in splits.items()
        }
        tokenizer = tokenizer_for(texts["train"], self, run)
        return {name: encode(tokenizer, rows, self.length) for name, rows in texts.items()}


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A lower-casing byte-pair tokenizer of at most ``vocab_size`` pieces.

    Byte pairs, because the same texts then always give the same pieces with the same numbers. The
    library's word-piece trainer numbers its pieces differently each time.

    Args:
      texts: the training split, and nothing else.
      vocab_size: largest number of pieces, including the special ones.

    Returns:
      A ``tokenizers.Tokenizer``.
    """
    lib = need("tokenizers")
    tokenizer = lib.Tokenizer(lib.models.BPE(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = lib.normalizers.BertNormalizer(lowercase=True)
    words = [lib.pre_tokenizers.BertPreTokenizer(), lib.pre_tokenizers.Metaspace()]
    tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence(words)
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_for(texts: Sequence[str], tokens: Tokens, run: str | os.PathLike | None) -> Any:
    """Loads the tokenizer of a run; if there is none, trains it on ``texts`` and stores it.

    On several hosts, every host trains the same tokenizer and the first host stores it.

    Args:
      texts: the training split.
      tokens: gives the size of the vocabulary.
      run: the run folder, or None to store nothing.

    Raises:
      UserError: the stored tokenizer is damaged, or has more pieces than ``tokens`` allows.
    """
    path = None if run is None else pathlib.Path(run) / FILE
    if path is not None and path.exists():
        return _stored(path, tokens)
    tokenizer = train_tokenizer(texts, tokens.vocab_size)
    if path is not None and devices.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        tokenizer.save(str(draft))
        draft.replace(path)
    return tokenizer


def _stored(path: pathlib.Path, tokens: Tokens):
    try:
        tokenizer = need("tokenizers").Tokenizer.from_file(str(path))
    except Exception as fault:  # the library raises bare Exception
        raise UserError(
            f"the tokenizer {path} is damaged ({fault}): put the file back, or train again in "
            f"another folder"
        ) from fault
    if tokenizer.get_vocab_size() > tokens.vocab_size:
        raise UserError(
            f"the tokenizer {path} has {tokenizer.get_vocab_size()} pieces, the recipe allows "
            f"{tokens.vocab_size}: name another folder with --run"
        )
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str], length: int) -> np.ndarray:
    """Padded token numbers ``(texts, length)`` int32; an empty text is one unknown token."""
    rows = np.full((len(texts), length), PAD, np.int32)
    for row, encoded in zip(rows, tokenizer.encode_batch_fast(list(texts)), strict=True):
        numbers = encoded.ids[:length] or [UNKNOWN]
        row[: len(numbers)] = numbers
    return rows
