"""`maze-run --new-project`: what it writes, what it refuses, and that the project works where it is."""

from __future__ import annotations

import ast
import csv
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from maze.cli.commands import LOCAL, template_directory
from maze.maze_cli import main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "own_project"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files_of(directory: Path) -> dict[str, str]:
    ignored = (PROJECT / ".gitignore").read_text().split()
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not any(part in ignored for part in path.relative_to(directory).parts)
    }


def run(arguments: list[str], cwd: Path, **environment: str) -> str:
    finished = subprocess.run(
        arguments,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, f"{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
    return finished.stdout


def test_the_example_is_the_template(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert template_directory() == PROJECT
    assert main(["--new-project", "stockroom"]) == 0
    assert files_of(tmp_path / "stockroom") == files_of(PROJECT)
    said = capfd.readouterr().out
    assert "make demo" in said
    local = (tmp_path / "stockroom" / LOCAL).read_text()
    assert f"PYTHON ?= {sys.executable}\n" in local, "this machine's Python, in a file that git ignores"


def test_all_files_of_a_new_project_use_its_name(tmp_path: Path) -> None:
    assert main(["--new-project=corner_shop"]) == 0
    files = files_of(tmp_path / "corner_shop")
    assert "corner_shop/conf/env/corner_shop.yaml" in files
    assert "class CornerShopEnv(" in files["corner_shop/env.py"]
    for name, text in files.items():
        assert "stockroom" not in (name + text).lower(), name
        if name.endswith(".py"):
            ast.parse(text, name)


def test_a_path_may_be_named_and_an_empty_directory_be_there(tmp_path: Path) -> None:
    (tmp_path / "projects" / "corner_shop").mkdir(parents=True)
    assert main(["--new-project", "projects/corner_shop"]) == 0
    assert [path.name for path in (tmp_path / "projects").iterdir()] == ["corner_shop"], "nothing unfinished is left"
    mode = (tmp_path / "projects" / "corner_shop").stat().st_mode
    assert mode == (tmp_path / "projects").stat().st_mode


def test_a_project_may_be_created_in_the_empty_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corner_shop").mkdir()
    monkeypatch.chdir(tmp_path / "corner_shop")
    assert main(["--new-project", "."]) == 0
    assert Path("corner_shop/env.py").is_file(), "the directory is still the one that the shell is in"
    assert [path.name for path in tmp_path.iterdir()] == ["corner_shop"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected one name, found none"),
        (["a", "b"], "expected one name, found a b"),
        (["--help"], "expected one name, found --help"),
        (["Corner-Shop"], "'Corner-Shop' cannot be the name of a package"),
        (["2shops"], "'2shops' cannot be the name of a package"),
        (["lädchen"], "'lädchen' cannot be the name of a package"),
        (["class"], "'class' cannot be the name of a package"),
        (["json"], "json is the name of an existing package"),
        (["numpy"], "numpy is the name of an existing package"),
        (["maze"], "maze is the name of an existing package"),
        (["tests"], "tests is the name of an existing package"),
        (["nowhere/shop"], "must be an empty or a new directory"),
        (["full"], "full must be an empty or a new directory"),
        (["file"], "file must be an empty or a new directory"),
    ],
)
def test_invalid_directories_of_new_projects_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("")
    (tmp_path / "file").write_text("")
    assert main(["--new-project", *arguments]) == 2
    error = capfd.readouterr().err
    assert error.startswith("ConfigError: --new-project: ")
    assert re.search(message, error), error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "kept.txt"]


def test_a_project_that_cannot_be_written_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, *arguments: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["--new-project", "corner_shop"]) == 2
    assert "corner_shop cannot be written: No space left on device" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_tests_of_a_new_project_pass(tmp_path: Path) -> None:
    assert main(["--new-project", "corner_shop"]) == 0
    said = run(["make", "test"], tmp_path / "corner_shop", PYTHONPATH=str(ROOT))
    assert " passed" in said
    assert "failed" not in said


@pytest.mark.long
def test_an_installed_project_is_found_from_everywhere(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="builds the project")
    assert main(["--new-project", "corner_shop"]) == 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "--target", str(tmp_path / "installed"), str(tmp_path / "corner_shop")], tmp_path)
    installed = {path.relative_to(tmp_path / "installed").as_posix() for path in (tmp_path / "installed").rglob("*.*")}
    assert {"corner_shop/conf/env/corner_shop.yaml", "hydra_plugins/corner_shop_search_path.py"} <= installed
    assert "hydra_plugins/__init__.py" not in installed
    (tmp_path / "elsewhere").mkdir()
    lines = (
        "from maze.maze_cli import main",
        "from maze.api.run_context import RunContext",
        "assert main(['-cn', 'conf_check', 'env=corner_shop']) == 0",
        "print(RunContext(experiment='corner_shop_ppo', silent=True).env_factory())",
    )
    paths = os.pathsep.join([str(tmp_path / "installed"), str(ROOT)])
    assert "CornerShopEnv" in run([sys.executable, "-c", "\n".join(lines)], tmp_path / "elsewhere", PYTHONPATH=paths)


@pytest.mark.long
def test_the_wheel_brings_the_template(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="builds the wheel")
    run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", ".", str(ROOT)],
        tmp_path,
    )
    (wheel,) = tmp_path.glob("maze_rl-*.whl")
    prefix = "maze/cli/project_template/"
    with zipfile.ZipFile(wheel) as archive:
        brought = {name.removeprefix(prefix) for name in archive.namelist() if name.startswith(prefix)}
    assert brought == set(files_of(PROJECT))


@pytest.mark.learning
@pytest.mark.timeout(600)
def test_its_demonstration_ends_in_a_service_of_a_policy_that_passed_the_gate(tmp_path: Path) -> None:
    assert main(["--new-project", "corner_shop"]) == 0
    said = run(["make", "demo"], tmp_path / "corner_shop", PYTHONPATH=str(ROOT))
    (demo,) = (tmp_path / "corner_shop" / "outputs" / "demo").iterdir()
    with (demo / "compared" / "comparison.csv").open() as file:
        profit = {row["policy"]: row for row in csv.DictReader(file) if row["measure"] == "profit_per_day"}
    assert list(profit) == ["corner_shop_rule", "random", "trained"]
    assert float(profit["trained"]["difference_low"]) > 0, "of the interval of the difference from the rule"
    assert (demo / "gate" / "gate.md").read_text().startswith("# Gate: passed")
    assert re.search(r"day 7: policy says \d lots of product \d", said)
