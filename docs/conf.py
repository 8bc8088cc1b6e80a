"""The documentation site: Sphinx with MyST. `make docs` builds it; every broken link or anchor is an error.

Sphinx and not MkDocs: it has been maintained for 18 years, checks anchors strictly, and takes signatures and type hints
from the code that it imports. MyST lets pages stay Markdown, which GitHub shows as well.
"""

from __future__ import annotations

import logging

from sphinx.application import Sphinx

import sidestream

# No lines of progress from the imports of this page.
logging.getLogger("sidestream").addHandler(logging.NullHandler())
logging.getLogger("sidestream").propagate = False
project = "Sidestream"
copyright = "the Sidestream authors, Apache-2.0"  # noqa: A001
release = version = sidestream.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Sidestream {version}"
html_show_sourcelink = False
myst_heading_anchors = 4
myst_links_external_new_tab = False
# Pages are Markdown; docstrings are plain text with `code` in single backquotes.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "both"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True


def _docstring_to_rst(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make an indented table of a docstring a literal block, and escape characters that only reStructuredText reads."""
    indented, converted = False, []
    for line in lines:
        if line.startswith(" "):
            converted += [line] if indented else ["", "::", "", line]
            indented = True
        else:
            escaped = line.replace("\\", "\\\\").replace("*", "\\*").replace("|", "\\|")
            converted += ["", escaped] if indented and line else [escaped]
            indented = indented and not line
    lines[:] = converted


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _docstring_to_rst)
    if unlisted := set(sidestream.__all__) - set((app.srcdir / "reference.md").read_text(encoding="utf-8").split()):
        raise ValueError(f"docs/reference.md lacks {', '.join(sorted(unlisted))}")
