"""Sinkhorn half-steps: in the log domain, by matrix scaling, and in tiles; and plans of them."""
