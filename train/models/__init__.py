"""Models of the paper's experiments, built on Flax's own multi-head attention."""
