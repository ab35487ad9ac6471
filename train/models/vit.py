"""Vision transformer of the Sinkformer and ESPFormer experiments (paper, Cats and Dogs).

It has pre-LN blocks, exact GELU, a class token and learned positions, and uses Flax's own
multi-head attention.  Only the attention weights differ between families.  The parameter tree is
the same for softmax, Sinkhorn and every replacement, so one set of parameters serves them all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

AttentionFactory = Callable[[int], Callable[..., jax.Array]]
"""Makes the ``attention_fn`` of one layer from the layer's index, counted from 0."""


def patches(images: jax.Array, patch_size: int) -> jax.Array:
    """Cuts images into non-overlapping square patches, row by row.

    Args:
      images: ``(..., height, width, channels)``.
      patch_size: side of a patch in pixels; must divide height and width.

    Returns:
      ``(..., height * width / patch_size², patch_size² * channels)``.

    Raises:
      ValueError: the patch size does not divide the image.
    """
    *batch, height, width, channels = images.shape
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"patch_size {patch_size} does not divide images of {height}x{width} pixels"
        )
    rows, columns = height // patch_size, width // patch_size
    cut = images.reshape(*batch, rows, patch_size, columns, patch_size, channels)
    cut = jnp.moveaxis(cut, -4, -3)
    return cut.reshape(*batch, rows * columns, patch_size * patch_size * channels)


@dataclasses.dataclass(frozen=True)
class ViTSizes:
    """Sizes of a ``VisionTransformer``.

    Attributes:
      patch_size: side of a patch in pixels.
      width: width of a token.
      depth: number of blocks.
      num_heads: heads per block.
      head_dim: width of a head; does not depend on ``width``.
      mlp_dim: hidden width of the feed-forward part; 0 leaves it out (the paper's MNIST layer).
      position_stddev: standard deviation of the positions and the class token at initialisation.
      dropout: rate on the output of every part of a block.
    """

    patch_size: int
    width: int
    depth: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    position_stddev: float = 0.02
    dropout: float = 0.0


class Block(nn.Module):
    """One pre-LN layer: ``x + attention(LN(x))``, then ``x + mlp(LN(x))`` unless ``mlp_dim`` is 0.

    Attributes:
      sizes: sizes of the model.
      attention: builds this layer's own ``attention_fn``.  It is a factory because a module that
        records or holds compiled state must not be shared by two layers.
      layer: index of the layer, from 0; the argument of ``attention``.
      dtype: dtype of the computation; parameters are float32.
    """

    sizes: ViTSizes
    attention: AttentionFactory
    layer: int = 0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        """Maps ``(..., tokens, width)`` to the same shape."""
        sizes, width = self.sizes, x.shape[-1]
        drop = nn.Dropout(sizes.dropout, deterministic=deterministic)
        norm = lambda name: nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, name=name)
        dense = lambda size, name: nn.Dense(size, dtype=self.dtype, name=name)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=sizes.num_heads,
            qkv_features=sizes.num_heads * sizes.head_dim,
            out_features=width,
            attention_fn=self.attention(self.layer),
            dtype=self.dtype,
            name="attention",
        )
        x = x + drop(attention(norm("attention_norm")(x)))
        if sizes.mlp_dim:
            hidden = dense(sizes.mlp_dim, "mlp_in")(norm("mlp_norm")(x))
            hidden = nn.gelu(hidden, approximate=False)
            x = x + drop(dense(width, "mlp_out")(hidden))
        return x


class VisionTransformer(nn.Module):
    """Image classifier: the paper's Cats and Dogs model and smaller variants of it.

    Attributes:
      num_classes: width of the output.
      sizes: sizes of the model.
      attention: builds one ``attention_fn`` per block from its index, for example
        ``lambda layer: aj.linen.SinkhornAttention(spec)``.
      dtype: dtype of the computation; parameters and logits are float32.
    """

    num_classes: int
    sizes: ViTSizes
    attention: AttentionFactory
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, deterministic: bool = True) -> jax.Array:
        """Logits ``(batch, classes)`` of normalised images ``(batch, height, width, channels)``.

        Args:
          images: float32.
          deterministic: True for no dropout; otherwise the random stream ``"dropout"`` is needed.

        Raises:
          ValueError: the patch size does not divide the image.
        """
        sizes = self.sizes
        init = nn.initializers.normal(sizes.position_stddev)
        cut = patches(images, sizes.patch_size)
        tokens = nn.Dense(sizes.width, dtype=self.dtype, name="patch_embedding")(cut)
        batch, count, width = tokens.shape
        cls = jnp.broadcast_to(self.param("cls", init, (1, 1, width)), (batch, 1, width))
        positions = self.param("positions", init, (1, count + 1, width))
        x = (jnp.concatenate([cls, tokens], axis=1) + positions).astype(self.dtype)
        for layer in range(sizes.depth):
            block = Block(sizes, self.attention, layer, self.dtype, name=f"block_{layer}")
            x = block(x, deterministic)
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x[:, 0])
        return nn.Dense(self.num_classes, name="classifier")(x)
