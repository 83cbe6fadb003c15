"""The documentation site builds without warnings, has every public name and option, and needs nothing else."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.report.browser import NARROW, WIDE, accessibility_faults, cut_off, opened, running_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("sphinx")
sys.path.append(str(ROOT / "docs"))

from site_pages import configurations, names  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it, with less data in executed tutorials."""
    pytest.importorskip("furo")
    directory = tmp_path_factory.mktemp("site")
    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "-b", "html", str(ROOT / "docs"), str(directory)]
    extensions = "myst_nb,sphinx.ext.autodoc,site_pages.extension,tests.docs.brief_pages"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    built = subprocess.run(
        [sys.executable, *command, "-D", f"extensions={extensions}"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert built.returncode == 0, built.stderr[-5000:]
    return directory


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, uri: uri)
    found = {name for kind, members in inventory.items() if kind.startswith("py:") for name in members}
    wanted = {name.full for module in names.modules() for name in module.names}
    assert sorted(wanted - found) == []
    assert len(wanted) > 900


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_option_and_the_tutorials_plots_are_there(site: Path) -> None:
    pages = "".join(page.read_text("utf-8") for page in (site / "generated" / "configurations").glob("*.html"))
    text = re.sub(r"<[^>]*>", "", pages)
    missing = [option for option in configurations.options() if f"{option.group}={option.name}".lstrip("=") not in text]
    assert missing == []
    for tutorial in ("cutting_environment", "cutting_structure", "plain_python", "truck_docks", "log_to_policy"):
        page = (site / "tutorials" / f"{tutorial}.html").read_text("utf-8")
        drawn = re.findall(r'class="cell_output.*?<img[^>]* src="\.\./(_images/[^"]+\.png)"', page, re.DOTALL)
        assert drawn, f"{tutorial} has no figure in the output of a cell"
        assert all((site / figure).is_file() for figure in drawn)


def test_cells_that_the_site_executes_put_their_figures_into_the_page() -> None:
    script = f"""
import runpy
runpy.run_path({str(ROOT / "docs" / "conf.py")!r})
import nbclient, nbformat
cell = nbformat.v4.new_code_cell("import matplotlib.pyplot as plt; plt.plot([1, 2]);")
executed = nbclient.execute(nbformat.v4.new_notebook(cells=[cell]))
print([sorted(output.get("data", ())) for output in executed.cells[0].outputs])
"""
    pytest.importorskip("nbclient")
    environment = {**os.environ, "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert "image/png" in done.stdout, done.stderr[-3000:]


def test_names_most_imported_by_guides_come_first_in_the_reference(tmp_path: Path) -> None:
    from site_pages.reference import write_reference

    write_reference(tmp_path)
    page = (tmp_path / "maze.api.rst").read_text("utf-8")
    entries = re.findall(r"^\.\. auto(?:class|function):: (\S+)", page, re.MULTILINE)
    assert entries[0] == "maze.api.run_context.RunContext"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, where there is one."""
    with running_browser() as started:
        yield started


SHOWN = [
    *("index", "concepts", "benchmarks/speed", "coming_from/stable_baselines3", "generated/api/index"),
    *("generated/gallery/environments", "generated/configurations/02-algorithm"),
]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", SHOWN)
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_pages_load_no_external_resources_and_fit_the_window(
    site: Path, browser: Browser, page: str, width: int, scheme: str
) -> None:
    errors: list[str] = []
    shown = opened(browser, site / f"{page}.html", errors, width=width, scheme=scheme)
    assert cut_off(shown) == []
    assert accessibility_faults(shown) == []
    # What a browser refuses to preload from files is nothing from elsewhere.
    assert [error for error in errors if error.startswith("asks for")] == []
    shown.context.close()


@pytest.mark.slow
def test_names_read_from_the_source_are_those_that_importing_finds() -> None:
    differences = []
    for module in names.modules():
        try:
            found = importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in names.OPTIONAL:
                raise
            continue
        own = {
            name
            for name, value in vars(found).items()
            if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__ == module.name
            and value.__qualname__ == name
        }
        read = {name.name for name in module.names if name.kind != "data" and not name.origin}
        if missing := own - read:
            differences.append(f"{module.name}: {sorted(missing)}")
    assert differences == []


def test_fields_of_an_option_have_their_defaults_and_meanings() -> None:
    (ppo,) = (option for option in configurations.options() if (option.group, option.name) == ("algorithm", "ppo"))
    fields = {field.key: field for field in configurations.fields(ppo)}
    assert fields["clip_range"].default == "0.2"
    assert "policy ratio" in fields["clip_range"].meaning
    assert fields["rollout_evaluator.n_episodes"].default == "8"
    assert [key for key, field in fields.items() if not field.meaning] == []


def test_a_key_without_a_docstring_is_described_by_the_comment_above_it() -> None:
    text = "# @package env\n\n# What it is for\na: 1\n# both of them\nb: [1, 2]\nc: {d: ~}\n\ne: 1\n"
    found = configurations.fields(configurations.Option("env", "mine", text))
    assert found == [
        ("a", "1", "What it is for"),
        ("b", "[1, 2]", "both of them"),
        ("c.d", "null", ""),
        ("e", "1", ""),
    ]
