"""The public names of the packages, read from their source: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("maze", "maze_envs")
OPTIONAL = ("httpx", "orjson", "pettingzoo", "ray", "uvicorn")
"""What modules import at once that need not be installed for them to be described."""
LEFT_OUT = ("maze.conf", "maze.test")
"""Configurations have pages of their own; the other one is for the project's own tests."""


@dataclass(frozen=True)
class Name:
    """A public name: where it is found, what kind it is, and where it is defined if that is elsewhere."""

    module: str
    name: str
    kind: str
    """`class`, `function` or `data`."""
    origin: str = ""
    """Full name of what is only passed on here; empty: it is defined here."""
    value: str = ""
    """Of data: its source."""
    docstring: str = ""
    """Of data: what follows it as a text."""
    bases: tuple[str, ...] = ()
    """Of a class: as written."""

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Module:
    """A module and its public names, in the order of its source."""

    name: str
    is_package: bool
    has_docstring: bool
    names: list[Name] = field(default_factory=list)


@cache
def modules() -> tuple[Module, ...]:
    """All public modules, by name."""
    return tuple(sorted((_module(path) for path in _files()), key=lambda module: module.name))


def _files() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            is_private = any(part.startswith("_") and part != "__init__" for part in parts)
            if not is_private and not any(name == out or name.startswith(f"{out}.") for out in LEFT_OUT):
                yield path


def _module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    tree = _tree(path)
    found = Module(name, path.name == "__init__.py", ast.get_docstring(tree) is not None)
    passed_on = _exported(tree)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=False):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = tuple(ast.unparse(base) for base in node.bases)
            found.names.append(Name(name, node.name, "class", bases=bases))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            found.names.append(Name(name, node.name, "function"))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found.names += _data(name, node, following)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                shown = alias.asname or alias.name
                if shown in passed_on and node.module.split(".")[0] in PACKAGES:
                    kind, origin = _defined(node.module, alias.name)
                    found.names.append(Name(name, shown, kind, origin))
    return found


def _data(module: str, node: ast.Assign | ast.AnnAssign, following: ast.stmt | None) -> Iterator[Name]:
    """Names of values: those that the source explains by a text behind them."""
    if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
        return
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            value = "" if node.value is None else ast.unparse(node.value)
            yield Name(module, target.id, "data", value=value, docstring=str(following.value.value))


def _exported(tree: ast.Module) -> set[str]:
    """What `__all__` lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def _defined(module: str, name: str) -> tuple[str, str]:
    """Kind and full name of what can be imported from a module."""
    path = ROOT.joinpath(*module.split("."))
    tree = _tree(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return "class", f"{module}.{name}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return "function", f"{module}.{name}"
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _defined(node.module, alias.name)
    return "data", f"{module}.{name}"


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
