"""Settings of Sphinx for the site that `make docs` builds."""

import inspect
import sys
from typing import Any

import burst_attention
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_annotation, stringify_signature

project = "BurstAttention for JAX"
release = burst_attention.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
# A heading has the same anchor here and on a git host, so links work in both places.
myst_heading_anchors = 3
# A name in single backticks links to its docstring.
default_role = "py:obj"
napoleon_numpy_docstring = False
maximum_signature_line_length = 80
# Otherwise Sphinx shows the overloads of a function, which hide most options.
autodoc_typehints = "none"
autodoc_member_order = "bysource"


def annotated_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Returns the signature of a function or class, with the annotations of its source."""
    if what not in ("function", "class"):
        return None
    found = inspect.signature(obj)
    returned = "" if what == "class" else stringify_annotation(found.return_annotation)
    shown = stringify_signature(found, show_return_annotation=False, unqualified_typehints=True)
    return shown, returned


def variable_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Prepares the docstring of a constant or field for napoleon."""
    if what == "data":
        # Sphinx knows the docstring of a constant only in the module that defines it.
        attribute = ("", name.rpartition(".")[2])
        for module in [module for module in sys.modules if module.startswith("burst_attention.")]:
            docstrings = ModuleAnalyzer.for_module(module).find_attr_docs()
            lines[:] = docstrings.get(attribute, lines)
    if what in ("data", "attribute"):
        # Napoleon takes words before a colon for a type, but only in the first line.
        lines[:0] = ["..", ""]


def setup(app: Sphinx) -> None:
    """Connects the functions above to Sphinx."""
    app.connect("autodoc-process-signature", annotated_signature)
    app.connect("autodoc-process-docstring", variable_docstring, priority=400)
