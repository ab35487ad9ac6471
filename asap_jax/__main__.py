"""``python -m asap_jax``: the version, and where the programs are."""

import jax

import asap_jax

print(
    f"asap_jax {asap_jax.__version__}, JAX {jax.__version__}\n"
    f"This is the library. The programs (python -m train: recipes, tables, export, benchmarks) are "
    f"not installed with it: run them in a clone of the repository, or in the unpacked source "
    f"archive, after pip install '.[train]'."
)
