"""Everything one runs with asap_jax: recipes, data, models, training, tables and pictures.

It is not part of the installed package: clone the repository, install it with
``pip install '.[train]'`` and run ``python -m train --help`` from the repository root.  It imports
``asap_jax``, never the reverse.
"""
