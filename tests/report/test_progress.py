"""The table of statistics that reports come from."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import MazeError
from maze.core.log_events.monitoring_events import ActionEvents, DiscreteActionEvents
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.log_stats.stats_format import columns_of
from maze.report.progress import PROGRESS_FILE, Progress, read_progress

MEAN = LogStatsKey(BaseEnvEvents.reward, "mean", None)
HOSTILE = 'waste, "in" %\n</script><img src=x onerror=alert(1)>'
KPI = LogStatsKey(BaseEnvEvents.kpi, "mean", (HOSTILE,))


def progress_of_two_epochs() -> Progress:
    progress = Progress()
    progress.add("eval", 1, 0.5, 0, {MEAN: 1.25})
    progress.add("train", 1, 1.0, 100, {MEAN: 1e-7})
    progress.add("train", 1, 1.0, 100, {KPI: 0.1 + 0.2})
    progress.finish_step()
    progress.add("train", 2, 2.0, 200, {MEAN: math.inf, LogStatsKey(BaseEnvEvents.reward, "min", None): 3})
    progress.finish_step()
    return progress


def test_a_row_for_each_prefix_of_a_log_step(tmp_path: Path) -> None:
    progress_of_two_epochs().write(tmp_path)
    with (tmp_path / PROGRESS_FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["path"], row["env_steps"]) for row in rows] == [
        ("1", "eval", "0"),
        ("1", "train", "100"),
        ("2", "train", "200"),
    ]
    assert [row["BaseEnvEvents/reward/mean"] for row in rows] == ["1.25", "1e-07", "inf"]
    assert [row["BaseEnvEvents/reward/min"] for row in rows] == ["", "", "3"]
    assert rows[1][f"BaseEnvEvents/kpi/mean/{HOSTILE}"] == "0.30000000000000004"


def test_progress_read_equals_progress_written(tmp_path: Path) -> None:
    written = progress_of_two_epochs()
    written.write(tmp_path)
    read = read_progress(tmp_path)
    assert list(read.rows()) == list(written.rows())
    assert read.text() == written.text()


def test_a_file_cut_off_by_a_kill_is_read_up_to_the_cut(tmp_path: Path) -> None:
    progress_of_two_epochs().write(tmp_path)
    file = tmp_path / PROGRESS_FILE
    file.write_bytes(file.read_bytes()[:-30] + b"\xff\0")
    assert [row[:2] for row in read_progress(tmp_path).rows()][:2] == [("eval", 1), ("train", 1)]


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n", "<html>"])
def test_files_without_a_progress_table_are_reported(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / PROGRESS_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(MazeError, match=PROGRESS_FILE):
        read_progress(tmp_path)


@pytest.mark.parametrize(
    ("step", "path", "kept"),
    [
        (2, "train", [("eval", 1), ("train", 1)]),
        (1, "train", [("eval", 1)]),  # it was evaluated before the training that is done again
        (1, "eval", []),
    ],
)
def test_a_resumed_run_starts_with_the_rows_of_the_earlier_run(
    step: int, path: str, kept: list[tuple[str, int]]
) -> None:
    progress = Progress()
    assert progress.take_over(progress_of_two_epochs(), step, path) == {0: 0.0, 1: 0.5, 2: 1.0}[len(kept)]
    progress.add(path, step, 3.0, 200, {MEAN: 5.0})
    progress.finish_step()
    assert [(each, number) for each, number, *_ in progress.rows()] == [*kept, (path, step)]


def test_categories_become_shares_and_vectors_become_quantiles_of_components() -> None:
    assert columns_of("a", [0, 1, 1, 3]) == {"a/share_0": 0.25, "a/share_1": 0.5, "a/share_2": 0, "a/share_3": 0.25}
    assert columns_of("a", ([2, 2], 4)) == {"a/share_0": 0, "a/share_1": 0, "a/share_2": 1, "a/share_3": 0}
    assert columns_of("a", [(1, 3), (1, 3)]) == {"a/share_0": 0, "a/share_1": 1, "a/share_2": 0}
    vectors = columns_of("a", [np.array([0.0, 10.0]), np.array([1.0, 10.0]), np.array([2.0, 10.0])])
    assert (vectors["a/0/p50"], vectors["a/1/p05"], vectors["a/1/p95"]) == (1.0, 10.0, 10.0)
    assert columns_of("a", [0.0, math.nan, 2.0])["a/p50"] == 1.0
    assert columns_of("a", "text") == columns_of("a", [math.nan]) == columns_of("a", []) == {}


def test_actions_of_environments_are_distributions() -> None:
    progress = Progress()
    key = LogStatsKey(DiscreteActionEvents.action, None, ("substep_0", "cut"))
    bounded = LogStatsKey(ActionEvents.discrete_action, None, ("0", "agent_0", "cut"))
    progress.add("train", 1, 0.0, None, {key: [0, 1], bounded: [(0, 2), (0, 2)]})
    progress.finish_step()
    header, row = progress.text().splitlines()
    assert header.split(",")[4:] == [
        "DiscreteActionEvents/action/substep_0/cut/share_0",
        "DiscreteActionEvents/action/substep_0/cut/share_1",
        "ActionEvents/discrete_action/0/agent_0/cut/share_0",
        "ActionEvents/discrete_action/0/agent_0/cut/share_1",
    ]
    assert row == "1,train,0,,0.5,0.5,1,0"


def test_unreadable_table_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / PROGRESS_FILE).write_text("step,path,seconds,env_steps\n" + "1" * 200_000, encoding="utf-8")
    with pytest.raises(MazeError, match=r"progress\.csv is not the table of a training run: field larger"):
        read_progress(tmp_path)
