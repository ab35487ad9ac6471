"""Models of the paper's experiments, built on Flax's stock attention."""

import asap_jax as aj
from train.models.vit import AttentionFactory, VisionTransformer


def attention(family: str, spec: aj.SinkhornSpec) -> AttentionFactory:
    """What builds one layer's attention weights.

    Args:
      family: ``"sinkhorn"`` (a module that records and can be compiled) or ``"softmax"``.
      spec: the Sinkhorn convention; unused by softmax.
    """
    if family == "softmax":
        return lambda: aj.softmax_attention
    return lambda: aj.linen.SinkhornAttention(spec)


def build(recipe, factory: AttentionFactory | None = None) -> VisionTransformer:
    """The model of a recipe, with its own attention or with that of ``factory``.

    Args:
      recipe: a ``train.recipes.Recipe``.
      factory: replaces the recipe's attention; the parameter tree stays the same.
    """
    sizes = recipe.model
    return VisionTransformer(
        num_classes=recipe.num_classes,
        patch_size=sizes.patch_size,
        width=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        mlp_dim=sizes.mlp_dim,
        position_stddev=sizes.position_stddev,
        attention=factory or attention(recipe.attention, recipe.spec),
    )
