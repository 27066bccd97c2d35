"""Build the documentation site: `sphinx-build -W -c doc . build/site`, from the top of a checkout.

The source folder is the top, so that links from pages to examples and scripts work as in the repository.
"""

from __future__ import annotations

project = "deepmd_muon"
author = "The deepmd_muon maintainers"
copyright = "The deepmd_muon maintainers, Apache-2.0"
root_doc = "doc/index"
html_extra_path = ["root"]  # index.html at the top of the site, which leads to doc/index.html
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
smartquotes = False  # values in quotation marks can be pasted
html_title = "deepmd_muon"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["doc/**", "examples/*/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
myst_heading_anchors = 3
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_ivar = True
