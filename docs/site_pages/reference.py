"""Pages of the reference: one for each package, with every public name of its modules."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from pathlib import Path

from site_pages.names import Module, Name, modules
from site_pages.written import write_pages

_DIRECTIVES = {"class": "autoclass", "function": "autofunction"}
_ROLES = {"class": "class", "function": "func", "data": "data"}


def write_reference(directory: Path) -> None:
    """Writes the pages.

    :param directory: Where to; other files in it are removed.
    """
    packages: dict[str, list[Module]] = defaultdict(list)
    for module in modules():
        if module.names or module.has_docstring:
            packages[module.name if module.is_package else module.name.rpartition(".")[0]].append(module)
    pages = {f"{package}.rst": _page(package, members) for package, members in packages.items() if _names(members)}
    write_pages(directory, pages)


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
