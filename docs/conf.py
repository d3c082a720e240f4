"""Sphinx makes the documentation's site from these pages: `uv run --group site sphinx-build -W docs site`."""

from importlib.metadata import version as version_of

import fedmutual

vars(fedmutual).update({name: getattr(fedmutual, name) for name in fedmutual.__all__})  # names are imported on demand

project = "fedmutual"
author = "The fedmutual developers"
release = version = version_of("fedmutual")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
default_role = "code"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "fedmutual"
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
