"""Where the time of an update goes: parts that do not overlap and sum up to all of it."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from maze.core.utils import update_profile
from maze.core.utils.update_profile import COLLECTING, LEARNING, TRANSFER, WAITING, UpdateProfile, timed
from maze.maze_cli import main


@timed(WAITING)
def wait(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@timed(COLLECTING)
def collect(seconds: float) -> None:
    time.sleep(seconds)
    wait(2 * seconds)


def rows_of(text: str) -> dict[str, tuple[float, float]]:
    """Milliseconds and percent of each part."""
    found = re.findall(r"^(\w+) +([\d.,]+) ms +([\d.]+)%", text, re.M)
    return {name: (float(ms.replace(",", "")), float(percent)) for name, ms, percent in found}


def test_inner_parts_are_taken_out_of_outer_ones_and_all_sum_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    profile = UpdateProfile(tmp_path / "profile.txt")
    for number in range(1, 3):
        assert not profile.is_done
        with profile.one_update(number):
            collect(0.01)
            time.sleep(0.005)
    assert profile.is_done
    text = (tmp_path / "profile.txt").read_text()
    rows = rows_of(text)
    total = float(re.search(r"update 2 .*: ([\d.,]+) ms", text)[1].replace(",", ""))
    assert total == sum(ms for ms, _ in rows.values()) == 35
    assert sum(percent for _, percent in rows.values()) == pytest.approx(100, abs=0.3)
    assert (rows[COLLECTING][0], rows[WAITING][0], rows[LEARNING][0]) == (10, 20, 5)
    assert rows[TRANSFER][0] == 0


def test_other_threads_and_times_without_a_profile_do_not_count(tmp_path: Path) -> None:
    assert wait(0.0) == 0.0
    assert update_profile._running is None
    profile = UpdateProfile(tmp_path / "profile.txt")
    for number in range(1, 3):
        with profile.one_update(number):
            beside = threading.Thread(target=wait, args=(0.01,))
            beside.start()
            beside.join()
    assert rows_of((tmp_path / "profile.txt").read_text())[WAITING][0] == 0


def test_an_update_that_fails_ends_the_profile(tmp_path: Path) -> None:
    profile = UpdateProfile(tmp_path / "profile.txt")
    with profile.one_update(1):
        pass
    with pytest.raises(KeyError), profile.one_update(2):
        raise KeyError
    assert update_profile._running is None
    assert "Time of update 1 in" in (tmp_path / "profile.txt").read_text()


def test_parts_not_profiled_in_short_runs_are_reported(tmp_path: Path) -> None:
    profile, texts = UpdateProfile(tmp_path / "profile.txt"), []
    for number in range(1, 3):
        with profile.one_update(number):
            wait(0.001)
        texts.append((tmp_path / "profile.txt").read_text())
    measured = [re.search(r"Time of update (\d) in", text)[1] for text in texts]
    assert measured == ["1", "2"]
    assert rows_of(texts[0])[WAITING][0] >= 1
    assert ["includes set-up" in text for text in texts] == [True, False]


def parts_of_a_run(directory: Path, *runner: str) -> set[str]:
    """Parts that take time in the profile of a run; `tests/train/parallelization/test_on_ray.py` has that on Ray."""
    command = ["-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", "algorithm.rollout_evaluator=null"]
    sizes = ["algorithm.n_epochs=1", "algorithm.epoch_length=3", "runner.concurrency=2", f"hydra.run.dir={directory}"]
    assert main([*command, *sizes, *runner, "runner.profile=true", "verbose=0"]) == 0
    return {name for name, (ms, _) in rows_of((directory / "profile.txt").read_text()).items() if ms > 0}


@pytest.mark.parametrize(
    ("runner", "parts"),
    [
        ("dev", {COLLECTING, LEARNING}),
        pytest.param("local", {COLLECTING, WAITING, TRANSFER, LEARNING}, marks=pytest.mark.slow),
    ],
)
def test_a_run_writes_its_update_profile(runner: str, parts: set[str], tmp_path: Path) -> None:
    assert parts_of_a_run(tmp_path / "run", f"runner={runner}") >= parts
