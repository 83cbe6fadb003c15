"""Ray's side stays small: what worker processes share with it belongs where both find it (decision 0039)."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

MAZE = Path(__file__).resolve().parents[3] / "maze"
MOST = 1000
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Lines that are neither blank nor comments nor docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_lines_are_counted_by_hand() -> None:
    docstring, function = '"""Doc.\n\nMore."""\n\n', 'def f(\n    x: int,\n) -> str:\n    """Doc."""\n'
    source = f'{docstring}import os  # why\n\n# note\n{function}    return """a\nb"""\n'
    assert lines_of_code(source) == 1 + 3 + 2


def test_rays_side_has_at_most_a_thousand_lines() -> None:
    files = [*MAZE.glob("train/parallelization/on_ray/*.py"), *MAZE.glob("train/trainers/*/**/*_ray_*.py")]
    files.append(MAZE / "cli" / "ray_launcher.py")
    counted = {str(file.relative_to(MAZE)): lines_of_code(file.read_text()) for file in files}
    using = {file for file in MAZE.rglob("*.py") if "import ray\n" in file.read_text() and "rllib" not in file.parts}
    assert using <= set(files)  # nobody else talks to Ray
    assert len(files) >= 8
    assert sum(counted.values()) <= MOST, counted
