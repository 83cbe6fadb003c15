"""The first page of the guide: its lines, from an empty directory, and the commands below them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.test_documentation import BLOCK, ROOT

PAGE = ROOT / "docs" / "guide" / "first_hour.md"
CODE = "\n\n".join(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
STEPS = "n_steps=100_000"
SIZES, SMALL = "WAITING, N_ORDERS, CHANGEOVER = 5, 40, 3", "WAITING, N_ORDERS, CHANGEOVER = 5, 8, 3"
MAZE_RUN = [sys.executable, "-c", "import sys; from maze.maze_cli import main; sys.exit(main())"]


def in_directory(directory: Path, *command: str) -> str:
    """What a command prints that is started in a directory, without a display."""
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in displays}
    finished = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert finished.returncode == 0, f"{finished.stdout[-1500:]}\n{finished.stderr[-3000:]}"
    return finished.stdout


def run_directory(directory: Path) -> Path:
    (found,) = (directory / "outputs").glob("WorkshopEnv-*/*")
    return found


@pytest.mark.long
def test_the_first_page_runs_from_an_empty_directory_and_its_result_is_picked_up_again(tmp_path: Path) -> None:
    short = '"algorithm.epoch_length": 1, "runner.concurrency": 2'
    code = CODE.replace(STEPS, "n_steps=400)\n    rc.train(n_steps=200").replace('"algorithm.lr": 0.001', short)
    assert SIZES in code
    code = code.replace(SIZES, SMALL)
    (tmp_path / "workshop.py").write_text(code, encoding="utf-8")
    printed = in_directory(tmp_path, sys.executable, "workshop.py")

    run = run_directory(tmp_path)
    table = pd.read_csv(run / "comparison" / "comparison.csv")
    assert table["policy"].unique().tolist() == ["earliest due date", "random", "trained"]
    assert set(table["measure"]) == {"return", "steps", "late_share", "changeovers_per_order"}
    (page,) = (run / "rollout" / "episode_pages").glob("*.html")
    assert str(page) in printed
    assert '"picture": 0' in page.read_text(encoding="utf-8")
    assert yaml.safe_load((run / "hydra_config.yaml").read_text())["env"] == {"_target_": "workshop.WorkshopEnv"}

    printed = in_directory(tmp_path, *MAZE_RUN, "--play", str(run), "--trust", "workshop")
    page = Path(re.search(r"Open the episode in a browser: (.*\.html)", printed)[1])
    assert "WorkshopEnv, episode 1" in page.read_text(encoding="utf-8")


@pytest.mark.learning
def test_the_first_page_reaches_more_than_its_heuristic(tmp_path: Path) -> None:
    (tmp_path / "workshop.py").write_text(CODE, encoding="utf-8")
    in_directory(tmp_path, sys.executable, "workshop.py")
    table = pd.read_csv(run_directory(tmp_path) / "comparison" / "comparison.csv").set_index(["measure", "policy"])
    assert table.loc[("return", "trained"), "difference_low"] > 0  # of the interval of the difference
