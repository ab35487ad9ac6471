"""The documentation site: ``make docs`` writes it to docs/_build/html."""

import inspect
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
# The pages and the notebooks show this checkout.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

project = "asap_jax"
author = "asap_jax authors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

html_theme = "furo"
html_title = "asap_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

# Pages link to files and headings as on a code host, and every such link is checked.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
suppress_warnings = [
    "myst.header",  # result tables of one heading begin below it
]

# Notebooks are stored without outputs and run at every build. They share compiled programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / "docs" / "_build" / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_ipywidgets_js: dict = {}  # no widgets, and nothing from the network
nb_execution_show_tb = True
# `compile` shows its progress in an open notebook as one line, and removes it at the end.
nb_output_stderr = "remove"

# Types are in the signatures; the docstrings have shapes and units.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = False  # so that one entry may describe several arguments
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False


def _skip_fields(app, what, name, member, skip, options):
    """Fields are described under Attributes, so only methods and properties are members."""
    if inspect.isroutine(member) or isinstance(member, property | classmethod | staticmethod):
        return None
    return True


def setup(app):
    """Registers the filter of members."""
    app.connect("autodoc-skip-member", _skip_fields)
