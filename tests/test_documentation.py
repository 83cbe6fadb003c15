"""The code of the documentation runs: every ``python`` block of ``docs/``, file by file.

``tests/test_readme.py`` runs those of the README. Notebooks (``{code-cell}`` blocks) are executed when the site is
built, see ``tests/docs``.
"""

from __future__ import annotations

import os
import re
import shlex
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from tests.scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if BLOCK.search(page.read_text(encoding="utf-8"))
    and page.name not in ("first_hour.md", "contracts.md")  # has tests of its own; outlines of classes
    and "generated" not in page.parts
]


NEEDS = {"data.md": ("duckdb", "minari", "pyarrow"), "coming_from/rllib.md": ("ray",)}
"""What `make test` does not install, by page."""


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    for package in next((packages for name, packages in NEEDS.items() if page.as_posix().endswith(f"/{name}")), ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    script = tmp_path / "page.py"
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    # Worker processes import the main module: without the guard they would run the page again.
    body = "\n".join(blocks).replace("\n", "\n    ")
    # Training to a return and the use of a budget have tests of their own.
    body = body.replace("n_steps=20_000", "n_steps=1_000").replace("budget_s=20", "budget_s=6")
    script.write_text(f'if __name__ == "__main__":\n    {body}\n', encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "examples" / "own_algorithm")}  # one page is about it
    environment["MINARI_DATASETS_PATH"] = str(tmp_path / "minari")
    finished = run_script(script, tmp_path, environment)
    assert finished.returncode == 0, f"{page.name}:\n{finished.stdout[-1500:]}\n{finished.stderr[-3000:]}"


UNSAFE_COMMAND = re.compile(r"""pip\s+install\s[^`;&|]{0,60}?\\?['" ]?maze-rl(\[[\w,-]*\])?(?![\w>\[-])""")
UNSAFE_DEPENDENCY = re.compile(r"""["']maze-rl(\[[\w,-]*\])?["']""")


def test_no_command_installs_the_other_project_of_this_name() -> None:
    """The public index has a `maze-rl` with versions up to 0.2.0."""
    for text in ("pip install maze-rl", 'pip install "maze-rl[serve]"', "pip install -c x\n'maze-rl[a,b]'"):
        assert UNSAFE_COMMAND.search(text)
    assert not UNSAFE_COMMAND.search('pip install "maze-rl[serve]>=1"')
    places = ("maze", "maze_envs", "hydra_plugins", "docs", "examples", "tutorials", "evaluation", "benchmarks")
    files = [ROOT / "README.md", *(path for place in places for path in (ROOT / place).rglob("*"))]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".ipynb", ".html") and "generated" not in path.parts
        for pattern in (UNSAFE_COMMAND, *([UNSAFE_DEPENDENCY] if path.suffix == ".toml" else ()))
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_no_page_links_to_a_file_that_is_not_there() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
        if "generated" not in page.parts
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists() and "generated/" not in target  # which the site's build writes
    ]
    assert not broken


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/contracts.md"])
def test_files_and_modules_named_by_a_page_exist(page: str) -> None:
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


TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def listed_in(page: Path, all_pages: set[str]) -> set[str]:
    """The pages that the tables of contents of a page list, by their paths below `docs`, without suffix."""
    docs = ROOT / "docs"
    found: set[str] = set()
    for block in TOCTREE.findall(page.read_text(encoding="utf-8")):
        for entry in (line.strip() for line in block.splitlines()):
            if entry and not entry.startswith(":"):
                path = Path(os.path.normpath(page.parent / entry)).relative_to(docs).as_posix()
                found |= {name for name in all_pages if fnmatch(name, path) and name.count("/") == path.count("/")}
    return found


def test_every_page_is_found_from_the_first_one_by_tables_of_contents() -> None:
    docs = ROOT / "docs"
    pages = {
        page.relative_to(docs).with_suffix("").as_posix()
        for page in docs.rglob("*.md")
        if "generated" not in page.parts
    }
    reached, waiting = {"index"}, ["index"]
    while waiting:
        new = listed_in(docs / f"{waiting.pop()}.md", pages) - reached
        reached |= new
        waiting += new
    assert sorted(pages - reached) == [], "these pages are in no toctree; docs/guide/index.md says in which order"


FIRST_PAGES = ["index.md", "getting_started.md", *(f"coming_from/{name}.md" for name in ("rllib", "maze"))]


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_commands_of_the_first_pages_name_what_there_is(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^\$ maze-run (.*)$", text, re.MULTILINE):
        command = shlex.split(line, comments=True)
        if not command[0].startswith("--"):
            root = command[command.index("-cn") + 1] if "-cn" in command else "conf_rollout"
            with initialize_config_module("maze.conf", version_base="1.3"):
                compose(root, [word for word in command if word not in ("-cn", root)])
