"""Sphinx builds the site from docs/*.md and from docstrings: ``make docs``.

Everything a page needs is in the site: formulas become MathML when it is built, and the theme brings its
own styles and scripts, so that pages look the same without a network.

Why Sphinx: docstrings are written for it (``.. math::``, ``:class:``), untranslated; pages stay plain
Markdown (MyST), so that they read the same in the repository; and a link or a name that leads nowhere is a
warning, which fails the build.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from sources import PROJECT

project = PROJECT["name"]
author = "the authors of comet-moe"
copyright = "the authors of comet-moe"
version = release = PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "letters",
    "mathml",
    "sources",
    "captions",
    "reports",
    "themes",
]
exclude_patterns = ["_build", "_ext"]
highlight_language = "bash"  # of blocks without a language: commands

myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]  # "a, b: shapes of both" is one line
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"comet-moe {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {"navigation_with_keys": False}
