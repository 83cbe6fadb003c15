"""Run directories are exclusive, sort by time, and disappear when nothing was achieved in them."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from maze.cli.run_directory import claim_directory
from maze.core.errors import ConfigError


def test_a_claimed_directory_is_never_given_out_again(tmp_path: Path) -> None:
    requested = tmp_path / "outputs" / "name" / "2026-01-01_00-00-00"
    names = [claim_directory(requested).path.name for _ in range(3)]
    assert names == ["2026-01-01_00-00-00", "2026-01-01_00-00-00_02", "2026-01-01_00-00-00_03"]
    assert [*names, "2026-01-01_00-00-01"] == sorted([*names, "2026-01-01_00-00-01"])


def test_runs_that_start_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    requested = tmp_path / "outputs" / "2026-01-01_00-00-00"
    with ThreadPoolExecutor(16) as pool:
        paths = list(pool.map(lambda _: claim_directory(requested).path, range(16)))
    assert len(set(paths)) == 16


def _claim(requested: Path) -> str:
    return str(claim_directory(requested).path)


def test_processes_that_start_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    with multiprocessing.get_context("forkserver").Pool(4) as pool:
        paths = pool.map(_claim, [tmp_path / "run"] * 12)
    assert len(set(paths)) == 12


def test_an_existing_directory_without_a_run_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert claim_directory(tmp_path / "mine").path == tmp_path / "mine"


def test_the_current_directory_takes_one_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert claim_directory(Path()).path == tmp_path
    with pytest.raises(ConfigError, match="holds an earlier run"):
        claim_directory(Path())


def test_a_file_at_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file"):
        claim_directory(tmp_path / "file")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="log_base_dir"):
        claim_directory(tmp_path / "file" / "run")


def test_a_run_without_results_leaves_no_directory(tmp_path: Path) -> None:
    claimed = claim_directory(tmp_path / "outputs" / "name" / "time")
    for name in (".hydra/config.yaml", "command.txt", "versions.json", "hydra_config.yaml", "events.out.tfevents.1"):
        (claimed.path / name).write_text("x")
    (claimed.path / "trajectory_data").mkdir()
    assert claimed.remove_if_worthless()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("achieved", ["state_dict.pt", "latest.pt", "trajectory_data/a.pkl", "event_logs/b.tsv"])
def test_a_run_with_results_is_kept(tmp_path: Path, achieved: str) -> None:
    claimed = claim_directory(tmp_path / "run")
    (claimed.path / achieved).parent.mkdir(exist_ok=True)
    (claimed.path / achieved).write_text("x")
    (claimed.path / "command.txt").write_text("x")
    assert not claimed.remove_if_worthless()
    assert (claimed.path / "command.txt").exists()
    assert (claimed.path / achieved).exists()


def test_a_directory_that_existed_before_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "paper.pdf").write_text("x")
    claimed = claim_directory(tmp_path / "mine")
    (claimed.path / "command.txt").write_text("x")
    assert not claimed.remove_if_worthless()
    assert (tmp_path / "mine" / "paper.pdf").exists()
