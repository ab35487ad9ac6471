"""Model sizes and specs that several recipes share."""

import asap_jax as aj
from train.models.text_encoder import EncoderSizes
from train.models.vit import ViTSizes

PAPER_VIT = ViTSizes(patch_size=4, width=128, depth=6, num_heads=8, head_dim=64, mlp_dim=128)
SMALL_VIT = ViTSizes(
    patch_size=4, width=64, depth=4, num_heads=4, head_dim=16, mlp_dim=128, position_stddev=0.5
)
PAPER_ENCODER = EncoderSizes(width=256, depth=6, num_heads=8, mlp_dim=1024)
SMALL_ENCODER = EncoderSizes(
    width=64, depth=2, num_heads=4, mlp_dim=128, dropout=0.2, embedding_stddev=0.3
)
PADDED_TEXT = aj.SinkhornSpec(num_steps=10, key_mass="unit", padding="self")
UNTRIED = "not measured (the paper's size: for accelerators)"

TEXT_PAPER = (
    "model.width",
    "model.depth",
    "model.num_heads",
    "spec",
    "epochs",
    "batch_size",
    "learning_rate",
    "attention",
    "inputs.length",
    "dataset",
    "splits",
    "evaluate.keep",
)
"""What the paper states of its text classification."""
TEXT_DATA = ("num_classes", "inputs.features")
TEXT_ASSUMED = (
    "model",
    "inputs.vocab_size",
    "inputs.unknown",
    "drops",
    "train_share",
    "softmax_learning_rate",
)
