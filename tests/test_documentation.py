"""The code of the documentation runs: every ``python`` block of the README and of ``docs/``, file by file."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
    if BLOCK.search(page.read_text(encoding="utf-8")) and page.name != "first_hour.md"  # has tests of its own
]


NEEDS = {"data.md": ("duckdb", "minari", "pyarrow")}
"""What `make test` does not install, by page."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [PAGES[0], *(pytest.param(page, marks=pytest.mark.long) for page in PAGES[1:])],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    for package in NEEDS.get(page.name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    script = tmp_path / "page.py"
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    # Worker processes import the main module: without the guard they would run the page again.
    body = "\n".join(blocks).replace("\n", "\n    ")
    body = body.replace("n_steps=20_000", "n_steps=1_000")  # training to a return has tests of its own
    script.write_text(f'if __name__ == "__main__":\n    {body}\n', encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "examples" / "own_algorithm")}  # one page is about it
    environment["MINARI_DATASETS_PATH"] = str(tmp_path / "minari")
    finished = run_script(script, tmp_path, environment)
    assert finished.returncode == 0, f"{page.name}:\n{finished.stdout[-1500:]}\n{finished.stderr[-3000:]}"


def test_no_page_links_to_a_file_that_is_not_there() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_and_modules_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    files = re.findall(r"`((?:maze|tests|docs|benchmarks)/[\w./]+)`", text)
    modules = [name.replace(".", "/") for name in re.findall(r"`(maze(?:\.[a-z_0-9]+)+)", text)]
    assert len(files) > 3
    missing = [name for name in files if not (ROOT / name).exists()]
    for module in modules:
        path = ROOT / module
        # the last part may be a function
        if not any(found.exists() for found in (path, path.with_suffix(".py"), path.parent.with_suffix(".py"))):
            missing.append(module)
    assert missing == []
