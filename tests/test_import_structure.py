"""No import cycle, and a layer for every package; the directions themselves are checked by ``lint-imports``."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_IN_A_LAYER = 7


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("maze", exclude_type_checking_imports=True)


@pytest.fixture(scope="module")
def layers() -> list[list[str]]:
    """The members of each layer of each contract, with their full names."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    found = []
    for section in contracts.values():
        containers = section.get("containers", "").split() or [""]
        for line in section.get("layers", "").split("\n"):
            members = [name.strip(" ()") for name in re.split(r"[|:]", line) if name.strip()]
            found += [[f"{container}.{name}".lstrip(".") for name in members] for container in containers if members]
    return found


def cycle(imported: dict[str, set[str]]) -> list[str]:
    """A chain of modules each of which imports the next, and the last the first; empty where there is none."""
    is_done: dict[str, bool] = {}

    def visit(module: str, path: list[str]) -> list[str]:
        if module in is_done:
            return [] if is_done[module] else path[path.index(module) :]
        is_done[module] = False
        for other in sorted(imported[module]):
            if found := visit(other, [*path, module]):
                return found
        is_done[module] = True
        return []

    return next((found for module in sorted(imported) if (found := visit(module, []))), [])


def test_a_cycle_is_found_where_there_is_one() -> None:
    assert cycle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_through_others(graph: grimp.ImportGraph) -> None:
    assert cycle({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


def test_every_package_has_a_layer(graph: grimp.ImportGraph, layers: list[list[str]]) -> None:
    listed = {member for layer in layers for member in layer}
    packages = {module for module in graph.modules if graph.find_children(module)} - {"maze"}

    def has_layer(package: str) -> bool:
        ancestors = {package.rsplit(".", n)[0] for n in range(1, package.count(".") + 1)}
        return bool(listed & {package, *ancestors}) or any(name.startswith(f"{package}.") for name in listed)

    assert [package for package in sorted(packages) if not has_layer(package)] == []


def test_no_layer_has_more_than_the_allowed_number_of_packages(layers: list[list[str]]) -> None:
    assert [layer for layer in layers if len(layer) > MOST_IN_A_LAYER] == []
