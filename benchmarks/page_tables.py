"""Tables of a documentation page that commands write: between `<!-- results: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    :param header: Names of the columns.
    :param rows: Their cells.
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def rows_of(page: Path, name: str) -> dict[str, list[str]]:
    """The cells of a table's rows by what stands first in them; none where there is no table yet."""
    found = re.search(f"{re.escape(_begin(name))}\n(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = found[1].strip().splitlines()[2:] if found else []
    rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]
    return {row[0]: row for row in rows}


def write_table(page: Path, name: str, table: str) -> None:
    """Replaces a table of a page.

    :param page: The page.
    :param name: Name of the table.
    :param table: What stands there afterwards.
    :raises SystemExit: The page has no such table.
    """
    begin = _begin(name)
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    pattern = re.compile(f"{re.escape(begin)}\n.*?<!-- end -->", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page}: expected the lines `{begin}` and `<!-- end -->`, found none.")
    page.write_text(pattern.sub(lambda _: f"{begin}\n\n{table}\n\n<!-- end -->", text, count=1), encoding="utf-8")


def _begin(name: str) -> str:
    return f"<!-- results: {name} -->"
