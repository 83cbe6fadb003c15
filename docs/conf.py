"""The documentation site: `make docs` builds it, warnings are errors."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))

from site_pages.names import OPTIONAL  # noqa: E402

gc.set_threshold(150_000)  # documents stay in memory; looking for garbage among them takes a tenth of the time
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.pop("MPLBACKEND", None)  # notebook kernels inherit it, and choose their own, which puts figures into pages

project = "Maze"
version = release = re.findall(r'^version = "(.*)"', (DOCS.parent / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[
    0
]
author = "the authors of Maze"
copyright = "the authors of Maze, Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "site_pages.extension",
]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["site_pages", "**/.ipynb_checkpoints"]
highlight_language = "text"

# --- pages in Markdown, and those that are notebooks: executed while the site is built -------------------------------
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "auto"
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # seconds of a cell, on a busy machine
nb_execution_in_temp = True
nb_execution_show_tb = True
nb_merge_streams = True
smartquotes = False

# --- the reference, from docstrings ----------------------------------------------------------------------------------
default_role = "name_or_code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_warningiserror = True
autodoc_mock_imports = [*OPTIONAL]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
warnings.filterwarnings("ignore", category=DeprecationWarning)

# --- appearance ------------------------------------------------------------------------------------------------------
html_theme = "furo"
html_title = f"Maze {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}


def repository() -> str:
    """Return the web address of the repository: `MAZE_REPOSITORY_URL`, or the git remote; empty without either."""
    git = ["git", "-C", str(DOCS), "remote", "get-url", "origin"]
    remote = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    found = os.environ.get("MAZE_REPOSITORY_URL") or remote
    return found.removesuffix(".git") if found.startswith("https://") else ""


if repository():
    html_theme_options |= {
        "source_repository": f"{repository()}/",
        "source_branch": "main",
        "source_directory": "docs/",
        "announcement": f'<a href="{repository()}">Source repository</a>',
    }
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1)"]
