"""Writing generated pages so that those that stay the same are not read again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_pages(directory: Path, pages: Mapping[str, str | bytes]) -> None:
    """Make a directory hold these files and no others; files that hold what they should are left alone.

    :param directory: The directory.
    :param pages: Contents by file name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.is_file() and path.name not in pages:
            path.unlink()
    for name, content in pages.items():
        data = content.encode() if isinstance(content, str) else content
        path = directory / name
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
