"""Pages of the reference: one for each package, with every public name of its modules."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from site_pages.names import ROOT, Module, Name, modules
from site_pages.written import write_pages

_DIRECTIVES = {"class": "autoclass", "function": "autofunction"}
_ROLES = {"class": "class", "function": "func", "data": "data"}
_IMPORT = re.compile(r"^ *from (maze[\w.]*) import", re.MULTILINE)


def write_reference(directory: Path) -> None:
    """Write the pages. The modules of a package that guides import most often come first.

    :param directory: Where to; other files in it are removed.
    """
    packages: dict[str, list[Module]] = defaultdict(list)
    for module in modules():
        if module.names or module.has_docstring:
            packages[module.name if module.is_package else module.name.rpartition(".")[0]].append(module)
    for members in packages.values():
        members.sort(key=lambda module: (not module.is_package, -_n_imports()[module.name], module.name))
    pages = {f"{package}.rst": _page(package, members) for package, members in packages.items() if _names(members)}
    write_pages(directory, pages)


@cache
def _n_imports() -> Counter[str]:
    """How many listings of README, guides and tutorials import from a module."""
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    return Counter(name for page in pages for name in _IMPORT.findall(page.read_text(encoding="utf-8")))


def _names(members: list[Module]) -> int:
    return sum(len(module.names) for module in members)


def _page(package: str, members: list[Module]) -> str:
    parts = [_heading(package, "=")]
    for module in members:
        if module.name != package and module.names:
            parts.append(_heading(module.name.removeprefix(f"{package}."), "-"))
        if module.has_docstring:
            parts.append(f".. automodule:: {module.name}\n")
        else:
            parts.append(f".. py:module:: {module.name}\n")
        parts += [_entry(name) for name in module.names]
    return "\n".join(parts)


def _heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def _entry(name: Name) -> str:
    if name.origin:
        directive = "class" if name.kind == "class" else "function" if name.kind == "function" else "data"
        return f".. py:{directive}:: {name.name}\n\n   Short for :{_ROLES[name.kind]}:`{name.origin}`.\n"
    if name.kind == "data":
        value = " ".join(name.value.split())
        shown = f"   :value: {value}\n" if len(value) <= 120 else ""
        text = textwrap.indent(textwrap.dedent(name.docstring), "   ")
        return f".. py:data:: {name.name}\n{shown}\n{text}\n"
    options = ""
    if name.kind == "class":
        options = "   :members:\n   :undoc-members:\n   :show-inheritance:\n"
    return f".. {_DIRECTIVES[name.kind]}:: {name.full}\n{options}"
