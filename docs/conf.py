"""Sphinx: `make docs` builds the pages of this folder into build/docs, and takes a warning for an error."""

import rope_ext

project = "rope_ext"
release = version = rope_ext.__version__
html_title = f"rope_ext {version}"
html_theme = "furo"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
highlight_language = "none"
default_role = "code"  # docstrings write code between single backticks too
smartquotes = False  # messages and code are quoted as they are

# References are checked (-n) within the package: those to torch and Python would need the network, private types are
# not documented.
nitpick_ignore_regex = [("py:.*", r"(?!rope_ext\.).*|.*\._\w+")]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
