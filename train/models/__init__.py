"""Models of the paper's experiments, built on Flax's stock attention."""
