"""What the docstrings of public functions have to say, counted: shapes of tensors, and errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "maze"

_ARRAYS = re.compile(r"\b(Tensor|ndarray)\b")
_SHAPE = re.compile(r"\[[^\]]*\]|\([^)]*,[^)]*\)|\bscalars?\b|\bshapes?\b|\bflat vector\b|\bany shape\b")


class PublicFunction(NamedTuple):
    """A function or method that users may call, and that no interface describes already."""

    place: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    docstring: str

    def has_arrays(self) -> bool:
        arguments = self.node.args
        annotations = [a.annotation for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return any(_ARRAYS.search(ast.unparse(found)) for found in (*annotations, self.node.returns) if found)

    def raises(self) -> bool:
        """Whether it raises anything of its own; a bare ``NotImplementedError`` stands for what subclasses do."""
        raised = [inner.exc for inner in _own_nodes(self.node) if isinstance(inner, ast.Raise) and inner.exc]
        return any(not (isinstance(exc, ast.Name) and exc.id == "NotImplementedError") for exc in raised)

    def states_shapes(self) -> bool:
        return _SHAPE.search(self.docstring) is not None

    def states_errors(self) -> bool:
        return ":raises" in self.docstring or re.search(r"\b[Rr]aises?\b", self.docstring) is not None


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Everything inside a function, without the functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def public_functions(path: Path) -> Iterator[PublicFunction]:
    """Those of a module. A constructor is described by its class; what overrides an interface by the interface."""

    def visit(node: ast.AST, prefix: str, class_docstring: str | None) -> Iterator[PublicFunction]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from visit(child, f"{prefix}{child.name}.", ast.get_docstring(child) or "")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                is_constructor = child.name == "__init__" and class_docstring is not None
                decorators = [ast.unparse(decorator) for decorator in child.decorator_list]
                if (child.name.startswith("_") and not is_constructor) or any("override" in d for d in decorators):
                    continue
                docstring = ast.get_docstring(child) or ""
                if is_constructor:
                    docstring = f"{class_docstring}\n{docstring}"
                yield PublicFunction(
                    f"{path.relative_to(PACKAGE)}:{child.lineno} {prefix}{child.name}", child, docstring
                )

    return visit(ast.parse(path.read_text(encoding="utf-8")), "", None)


def all_public_functions() -> list[PublicFunction]:
    return [function for path in sorted(PACKAGE.rglob("*.py")) for function in public_functions(path)]


def shares() -> dict[str, tuple[float, list[str]]]:
    """Share of functions that say what they have to, and the places of those that do not."""
    functions = all_public_functions()
    found = {}
    for name, concerned, says in (
        ("shapes of tensors", PublicFunction.has_arrays, PublicFunction.states_shapes),
        ("errors", PublicFunction.raises, PublicFunction.states_errors),
    ):
        counted = [function for function in functions if concerned(function)]
        silent = [function.place for function in counted if not says(function)]
        found[name] = (1.0 - len(silent) / len(counted), silent)
    return found


@pytest.mark.parametrize("subject", ["shapes of tensors", "errors"])
def test_nine_of_ten_public_functions_say_what_they_have_to(subject: str) -> None:
    share, silent = shares()[subject]
    assert share >= 0.9, f"{subject}: add them to the docstrings of {silent}"


if __name__ == "__main__":
    for subject, (share, silent) in shares().items():
        print(f"{subject}: stated by {share:.1%}; not by")
        print(*(f"  {place}" for place in silent), sep="\n")
