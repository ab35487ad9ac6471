"""Everything one runs with asap_jax: recipes, data, models, training, tables and pictures.

Run as ``python -m train --help`` from the repository root.  It imports ``asap_jax``, never the
reverse, and is not part of the package.
"""
