"""Sphinx extension: generated pages, and the role of single backticks."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole
from sphinx.environment import BuildEnvironment

from site_pages.configurations import write_configurations
from site_pages.gallery import write_gallery
from site_pages.names import PACKAGES, modules
from site_pages.reference import write_reference

_NAME = re.compile(r"~?[A-Za-z]\w*(\.\w+)*(\(\))?")


def _name_or_code(
    name: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: Inliner,
    options: Mapping[str, Any] | None = None,
    content: Sequence[str] = (),
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Return a link if the text names an object of the reference, otherwise code."""
    if _NAME.fullmatch(text):
        return PyXRefRole()("py:obj", rawtext, text, lineno, inliner, dict(options or {}), list(content))
    return [nodes.literal(rawtext, text.replace("\x00", ""))], []


def _without_foreign_docstrings(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Leave out docstrings of other packages, which a method inherits or an attribute brings along."""
    if what in ("function", "method", "attribute", "data", "property") and not _is_ours(_author(name, obj)):
        lines.clear()


def _author(name: str, obj: Any) -> str:
    """Return the module of the docstring of a documented object."""
    owner, _, member = name.rpartition(".")
    if not getattr(obj, "__doc__", None):
        module, _, class_name = owner.rpartition(".")
        for base in getattr(getattr(sys.modules.get(module), class_name, None), "__mro__", ()):
            if getattr(vars(base).get(member), "__doc__", None):
                return str(base.__module__)
    return str(getattr(obj, "__module__", None) or owner)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in (*PACKAGES, "builtins", "typing")


def _name_targets(app: Sphinx, doctree: nodes.document) -> None:
    """Resolve types without module in signatures and fields to the only object of that name.

    Sphinx would look through all names for each of them, which takes minutes, and take any where there are several.
    """
    for node in doctree.findall(addnodes.pending_xref):
        if node.get("refdomain") == "py" and node.hasattr("refspecific"):
            del node["refspecific"]
            node["reftarget"] = _full_names().get(node["reftarget"], node["reftarget"])


@cache
def _full_names() -> Mapping[str, str]:
    """Return full names by short names that only one module defines."""
    found: dict[str, list[str]] = {}
    for module in modules():
        for name in module.names:
            if not name.origin:
                found.setdefault(name.name, []).append(name.full)
    return {name: full[0] for name, full in found.items() if len(full) == 1}


def _navigate_by_titles(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the navigation of a page copy the titles of all pages, not the names of 3,000 objects below them.

    The theme requests titles only; Sphinx copies everything first, half a second for each page.
    """
    complete = context.get("toctree")

    def toctree(**options: Any) -> Any:
        tocs = app.env.tocs
        app.env.tocs = _titles(app.env) if options.get("titles_only") else tocs
        try:
            return complete(**options)
        finally:
            app.env.tocs = tocs

    if complete is not None:
        context["toctree"] = toctree


@cache
def _titles(env: BuildEnvironment) -> dict[str, nodes.bullet_list]:
    """Return the tables of contents of all pages, reduced to titles and nested toctrees."""
    found = {}
    for name, toc in env.tocs.items():
        found[name] = toc.copy()
        for item in toc.children:
            title = item.copy()
            title += item.children[0].deepcopy()
            if nested := [node.copy() for node in item.findall(addnodes.toctree)]:
                title += nodes.bullet_list("", *nested)
            found[name] += title
    return found


def _write_pages(app: Sphinx) -> None:
    generated = Path(app.srcdir) / "generated"
    write_reference(generated / "api")
    write_configurations(generated / "configurations")
    write_gallery(generated / "gallery")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register it."""
    app.add_role("name_or_code", _name_or_code)
    app.connect("builder-inited", _write_pages)
    app.connect("autodoc-process-docstring", _without_foreign_docstrings)
    app.connect("doctree-read", _name_targets)
    app.connect("html-page-context", _navigate_by_titles, priority=400)  # before the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}
