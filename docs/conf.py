"""Sphinx configuration. Builds without a network: no inventories of other projects are fetched."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "te_ops"
author = "the te_ops contributors"
version = release = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "te_ops" / "__init__.py").read_text(), re.MULTILINE
)[1]
project_copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = f"te_ops {version}"
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]

# One page a module, written anew at each build, so that a module that is gone leaves none. Backends
# are left out: their modules import a vendor's library, and nobody calls them by name.
shutil.rmtree(ROOT / "docs" / "api" / "modules", ignore_errors=True)
apidoc_modules = [
    {
        "path": "../te_ops",
        "destination": "api/modules",
        "separate_modules": True,
        "module_first": True,
        "exclude_patterns": ["../te_ops/backends", "../te_ops/__main__.py", "../te_ops/jax"],
        "automodule_options": {"members", "show-inheritance"},
    }
]
exclude_patterns = ["api/modules/modules.rst"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# A name is described once, where it is defined, and not again where `__all__` repeats it.
autodoc_default_options = {"ignore-module-all": True, "exclude-members": "forward"}


def paragraphs(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText. Ours are plain text: `code`, >>> examples, indented blocks.

    Blocks between blank lines are taken one by one: an example stays, anything laid out by hand
    (indented, or a list) is shown as it is, and prose is escaped but for its `code`.
    """
    result: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        rows = block.split("\n")
        if rows[0].lstrip().startswith(">>>"):
            result += rows
        elif any(row[:1] in (" ", "*", "-", "|") for row in rows):
            result += ["::", "", *(f"    {row}" for row in rows)]
        else:
            parts = re.split(r"(`+[^`\n]+`+)", block.replace("\\", "\\\\"))
            parts[::2] = [re.sub(r"([*|`_])", r"\\\1", prose) for prose in parts[::2]]
            parts[1::2] = [f"``{code.strip('`')}``\\ " for code in parts[1::2]]
            result += "".join(parts).split("\n")
        result.append("")
    return result


def process_docstring(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = paragraphs(lines)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", process_docstring)
