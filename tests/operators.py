"""Every attention operator with its implementations: what the shared contracts run over."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import problems

import asap_jax as aj
from asap_jax.baselines.diff import diff_attention
from asap_jax.baselines.esp import esp_attention

BATCH, LENGTH, HEADS, DIM = 2, 7, 4, 4


@dataclasses.dataclass(frozen=True)
class Operator:
    """An attention function, and what it can do.

    Attributes:
      function: the function, its settings bound.
      implementations: the names it takes besides ``"auto"``; the first is the reference.
      predictor: makes the predictor in a given dtype, or None.
      pairs: heads come in pairs, and a norm follows the product with the values.
      entries: it takes any bias and any mask, not only masks that leave out whole tokens.
      rectangular: the numbers of queries and keys may differ.
      smooth: the gradient reaches queries and keys.
    """

    function: Callable
    implementations: tuple[str, ...] = ("log", "scaling", "streaming")
    predictor: Callable | None = None
    pairs: bool = False
    entries: bool = True
    rectangular: bool = True
    smooth: bool = True

    def bind(self, *, predictor_dtype="float32", **settings):
        """The function of (query, key, value, bias, mask)."""
        if self.predictor is not None:
            settings["predictor"] = self.predictor(jnp.dtype(predictor_dtype))
        return functools.partial(self.function, **settings)

    def inputs(self, rng, **settings):
        """Queries, keys and values; fewer keys than queries where the operator allows it."""
        keys = LENGTH - 2 if self.rectangular else LENGTH
        return self.square(rng, **{"keys": keys, **settings})

    def square(self, rng, **settings):
        """As many queries as keys."""
        shape = {"queries": LENGTH, "keys": LENGTH, "dim": DIM, "batch": BATCH, "heads": HEADS}
        return problems.attention_inputs(rng, **{**shape, **settings})

    def bias_and_mask(self, rng, keys):
        """A bias and a mask of the most general kind the operator takes."""
        if not self.entries:
            return None, tokens([LENGTH, 4], keys) if keys == LENGTH else None
        mask = problems.random_mask(rng, BATCH, 1, LENGTH, keys)
        mask[0, 0, 3] = False
        mask[1, 0, :, 2] = False
        return problems.normal(rng, 1, HEADS, LENGTH, keys), problems.array(mask)


def tokens(lengths, size=LENGTH):
    """The mask of padded sequences, padded queries and padded keys left out."""
    return problems.array(problems.token_padding(lengths, size))


def sliced(dtype, side="query"):
    """A predictor from slices, the paper's, with random coefficients."""
    w = problems.normal(np.random.default_rng(5), 6, dtype=dtype, size=0.3)
    directions = aj.slice_directions(0, 6, DIM).astype(dtype)
    return aj.Predictor(directions=directions, coefficients=w, side=side)


def moments(dtype):
    """A predictor from moments with one random head of coefficients per attention head."""
    family = aj.Moments()
    rng = np.random.default_rng(6)
    w = problems.normal(rng, HEADS, family.num_features(DIM), dtype=dtype, size=0.05)
    return aj.Predictor((family,), coefficients=w)


FOUR, FIVE = aj.SinkhornSpec(num_steps=4), aj.SinkhornSpec(num_steps=5)
_sinkhorn, _asap = aj.sinkhorn_attention, aj.asap_attention

OPERATORS = {
    "softmax": Operator(aj.softmax_attention),
    "sinkhorn": Operator(functools.partial(_sinkhorn, spec=FOUR)),
    "sinkhorn, ends on rows": Operator(functools.partial(_sinkhorn, spec=FIVE)),
    "asap, three closures": Operator(functools.partial(_asap, spec=FOUR), predictor=sliced),
    "asap, ends on rows": Operator(
        functools.partial(_asap, spec=FIVE, closures=2), predictor=sliced
    ),
    "asap, moments": Operator(functools.partial(_asap, spec=FOUR, closures=1), predictor=moments),
    "asap, row ending": Operator(
        functools.partial(_asap, spec=FOUR, closures=1, ending="row"),
        predictor=functools.partial(sliced, side="key"),
    ),
    "diff": Operator(diff_attention, ("log",), pairs=True),
    "esp, soft": Operator(esp_attention, ("dense", "streaming"), entries=False),
    "esp, hard released": Operator(
        functools.partial(esp_attention, mode="hard_released"),
        ("dense", "streaming"), entries=False, smooth=False,
    ),
    "esp, hard": Operator(
        functools.partial(esp_attention, mode="hard"),
        ("dense", "streaming"), entries=False, rectangular=False, smooth=False,
    ),
}  # fmt: skip
# Every operator as it is by default (row endings differ in the last step alone), and the other
# implementations of some.
ONCE = [(name, "auto") for name in OPERATORS if not name.endswith("ends on rows")]
CASES = [
    *ONCE,
    ("sinkhorn", "log"),
    ("sinkhorn", "streaming"),
    ("asap, moments", "log"),
    ("asap, moments", "streaming"),
    ("esp, soft", "dense"),
]
