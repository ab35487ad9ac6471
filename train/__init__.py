"""Programs that use asap_jax: recipes, data, models, training, tables and pictures.

They are not part of the installed package.  Clone the repository, install it with
``pip install '.[train]'`` and run ``python -m train --help`` from the repository root.  ``train``
imports ``asap_jax``, and ``asap_jax`` never imports ``train``.
"""
