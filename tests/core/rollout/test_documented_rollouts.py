"""The command lines with which the documentation shows rollouts, and what they leave behind."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from maze.core.trajectory_recording.records.trajectory_record import load_trajectory
from maze.maze_cli import main

COMMANDS = {
    "env=gym_env env.name=CartPole-v0": 50,
    "env=gym_env env.name=CartPole-v0 runner=sequential runner.n_episodes=1 runner.render=true": 1,
    "env=gym_env env.name=CartPole-v0 runner=sequential": 50,
    "env=gym_env env.name=CartPole-v0 runner.n_processes=3 runner.n_episodes=100 runner.max_episode_steps=10": 100,
}
EVENTS = {"BaseEnvEvents.reward.tsv", "DiscreteActionEvents.action.tsv"}


@pytest.fixture(autouse=True)
def _in_an_empty_directory_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.filterwarnings("ignore:.*(out of date|deprecated)")
@pytest.mark.parametrize(("command", "n_episodes"), COMMANDS.items(), ids=list(COMMANDS))
def test_the_documented_command_runs_as_it_is(
    command: str, n_episodes: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([*shlex.split(command), f"hydra.run.dir={run}"]) == 0
    table = next(line for line in capfd.readouterr().out.splitlines() if "total_episode_count" in line)
    assert float(table.rpartition("|")[2]) == n_episodes
    trajectories = sorted((run / "trajectory_data").glob("*.pkl"))
    assert len(trajectories) == n_episodes
    assert {path.name for path in (run / "event_logs").iterdir()} == EVENTS
    assert {"hydra_config.yaml", "command.txt", "versions.json"} <= {path.name for path in run.iterdir()}
    if "render=true" in command:
        pages = {page.stem for page in (run / "episode_pages").glob("*.html")}
        assert pages == {trajectory.stem for trajectory in trajectories}


def rows(run: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in sorted((run / "event_logs").iterdir())}


@pytest.mark.filterwarnings("ignore:.*(out of date|deprecated)")
def test_recorded_actions_replay_the_same_episodes_on_the_command_line(tmp_path: Path) -> None:
    short = ["runner.n_episodes=3", "runner.n_processes=2", "runner.max_episode_steps=15", "seeding.env_base_seed=7"]
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    assert main([*short, "runner.record_actions=true", f"hydra.run.dir={recorded}"]) == 0
    assert len(list((recorded / "action_records").iterdir())) == 3
    assert main([*short, "policy=replay_actions", f"input_dir={recorded}", f"hydra.run.dir={replayed}"]) == 0
    assert rows(replayed) == rows(recorded)
    names = sorted(path.name for path in (recorded / "trajectory_data").iterdir())
    assert names == sorted(path.name for path in (replayed / "trajectory_data").iterdir())
    for name in names:
        first, second = (load_trajectory(run / "trajectory_data" / name) for run in (recorded, replayed))
        np.testing.assert_equal(
            [step.maze_state for step in first.step_records], [step.maze_state for step in second.step_records]
        )


def test_a_replay_of_other_episodes_reports_the_required_seed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = ["env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=1", "runner.max_episode_steps=5"]
    recorded = tmp_path / "recorded"
    assert main([*short, "runner.record_actions=true", "seeding.env_base_seed=1", f"hydra.run.dir={recorded}"]) == 0
    assert main([*short, "policy=replay_actions", f"input_dir={recorded}", "seeding.env_base_seed=2"]) == 1
    assert "is not among the records" in capfd.readouterr().err
    assert main([*short, "policy=replay_actions", "seeding.env_base_seed=1"]) == 1
    assert "runner.record_actions=true" in capfd.readouterr().err


def test_the_greedy_cutting_policy_is_rolled_out_by_its_configuration(tmp_path: Path) -> None:
    command = "env=tutorial_cutting_2d_flat policy=tutorial_cutting_2d_greedy_policy runner.n_episodes=2"
    run = tmp_path / "run"
    assert main([*shlex.split(command), "runner.n_processes=2", f"hydra.run.dir={run}"]) == 0
    assert len(list((run / "trajectory_data").iterdir())) == 2
    assert "CuttingEvents.valid_cut.tsv" in {path.name for path in (run / "event_logs").iterdir()}
