"""One short run on an accelerator: correctness, gradients, times, and how far from the floor.

It needs only JAX, Flax, optax, chex and NumPy, and downloads nothing.
"""

from train.bench.gpu.script import run as run
