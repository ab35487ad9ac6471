"""Text encoder of the Sinkformer experiments (paper, IMDb and text classification).

It has post-LN blocks with a ReLU feed-forward part, sinusoidal positions and max-pooling, and uses
Flax's own multi-head attention.  Only the key columns of pads are masked, so padded queries stay in
the sequence (paper, padded-text convention).  As in the vision transformer, only the attention
weights differ between families.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from train.data.text import PAD
from train.models.vit import AttentionFactory


def sinusoids(length: int, width: int) -> np.ndarray:
    """The table of sines (even columns) and cosines (odd columns), ``(length, width)`` float32."""
    column = np.arange(width)
    angle = np.arange(length)[:, None] / np.power(10000.0, 2 * (column // 2) / width)
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)


def positions(valid: jax.Array) -> jax.Array:
    """Positions counted from 1, with 0 at pads: ``(batch, length)`` int32, like ``valid``."""
    return jnp.where(valid, jnp.arange(1, valid.shape[-1] + 1, dtype=jnp.int32), 0)


@dataclasses.dataclass(frozen=True)
class EncoderSizes:
    """Sizes and options of a ``TextEncoder``.

    Attributes:
      width: width of a token.
      depth: number of blocks.
      num_heads: heads per block; they share the width of a token.
      mlp_dim: hidden width of the feed-forward part.
      dropout: rate on the output of every sub-layer.
      embedding_stddev: standard deviation of the embeddings at initialisation.
      random_positions: as in the released model, the frozen table of positions holds standard
        normal noise instead of sines.
      double_softmax: as in the released model, the output goes through a softmax before the loss
        applies its own.
      pool_pads: as in the released model, pads take part in the max-pooling.
    """

    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    dropout: float = 0.1
    embedding_stddev: float = 1.0
    random_positions: bool = False
    double_softmax: bool = False
    pool_pads: bool = False

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.width // self.num_heads


class TextBlock(nn.Module):
    """One post-LN layer: ``x = LN(x + attention(x))``, then ``LN(x + feed_forward(x))``.

    Attributes:
      sizes: sizes of the model.
      attention: builds the layer's own ``attention_fn`` from its index.
      layer: index of the layer, from 0.
      dtype: dtype of the computation; parameters are float32.
    """

    sizes: EncoderSizes
    attention: AttentionFactory
    layer: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
        """Maps ``(batch, length, width)`` to the same shape; ``mask`` is ``(batch, 1, 1, M)``."""
        drop = nn.Dropout(self.sizes.dropout, deterministic=deterministic)
        attended = nn.MultiHeadDotProductAttention(
            num_heads=self.sizes.num_heads,
            attention_fn=self.attention(self.layer),
            dtype=self.dtype,
            name="attention",
        )(x, mask=mask)
        norm = lambda name: nn.LayerNorm(epsilon=1e-6, dtype=self.dtype, name=name)
        x = norm("attention_norm")(x + drop(attended))
        hidden = nn.relu(nn.Dense(self.sizes.mlp_dim, dtype=self.dtype, name="mlp_in")(x))
        hidden = nn.Dense(x.shape[-1], dtype=self.dtype, name="mlp_out")(hidden)
        return norm("mlp_norm")(x + drop(hidden))


class TextEncoder(nn.Module):
    """Text classifier of the paper and of the released Sinkformer text model.

    Attributes:
      num_classes: width of the output.
      vocab_size: number of tokens; token 0 is the pad.
      sizes: sizes and options of the model.
      attention: builds one ``attention_fn`` per block from its index.
      dtype: dtype of the computation; parameters and logits are float32.
    """

    num_classes: int
    vocab_size: int
    sizes: EncoderSizes
    attention: AttentionFactory
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        """Logits ``(batch, classes)`` of token numbers ``(batch, length)``, 0 where padded.

        Args:
          tokens: int32.
          deterministic: True for no dropout; otherwise the random stream ``"dropout"`` is needed.
        """
        sizes, valid = self.sizes, tokens != PAD
        embedding = nn.Embed(
            self.vocab_size,
            sizes.width,
            embedding_init=nn.initializers.normal(sizes.embedding_stddev),
            dtype=self.dtype,
            name="embedding",
        )
        table = jnp.asarray(self._table(tokens.shape[-1] + 1), self.dtype)
        x = embedding(tokens) + table[positions(valid)]
        for layer in range(sizes.depth):
            block = TextBlock(sizes, self.attention, layer, self.dtype, name=f"block_{layer}")
            x = block(x, valid[:, None, None, :], deterministic)
        pooled = x.max(-2) if sizes.pool_pads else _max_over(x, valid)
        logits = nn.Dense(self.num_classes, dtype=jnp.float32, name="classifier")(pooled)
        return nn.softmax(logits) if sizes.double_softmax else logits

    def _table(self, length: int) -> np.ndarray:
        """The frozen positions ``(length, width)``; a short table starts like a long one."""
        if not self.sizes.random_positions:
            return sinusoids(length, self.sizes.width)
        noise = np.random.default_rng(0).standard_normal((length, self.sizes.width))
        return noise.astype(np.float32)


def _max_over(x: jax.Array, valid: jax.Array) -> jax.Array:
    """Maximum over valid tokens, 0 where there is none: ``(batch, width)``."""
    highest = jnp.where(valid[..., None], x, -jnp.inf).max(-2)
    return jnp.where(valid.any(-1, keepdims=True), highest, jnp.zeros_like(highest))
