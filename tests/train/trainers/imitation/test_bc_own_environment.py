"""Behavioural cloning on what an environment of one's own has recorded, and pages of it, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from maze.maze_cli import main

OWN = ["env=tutorial_cutting_2d_events", "wrappers=tutorial_cutting_2d_events", "model=tutorial_cutting_2d_events"]
SHORT = ["algorithm=bc", "algorithm.n_epochs=1", "algorithm.n_eval_episodes=0", "algorithm.device=cpu"]
ROLLOUT = ["runner=sequential", "runner.n_episodes=2", "runner.max_episode_steps=4", "runner.record_event_logs=false"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded") / "run"
    assert main([*OWN[:2], *ROLLOUT, f"hydra.run.dir={directory}"]) == 0
    return directory / "trajectory_data"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("n_workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_states_of_the_environments_own_package_need_no_permission(recorded: Path, n_workers: int) -> None:
    data = [f"runner.dataset.dir_or_file={recorded}", f"runner.dataset.n_workers={n_workers}"]
    assert main(["-cn", "conf_train", *OWN, *SHORT, *data, "hydra.run.dir=clone"]) == 0
    assert Path("clone/state_dict.pt").is_file()


def test_recorded_states_are_refused_in_another_environment_with_the_option_to_allow_them(
    recorded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = f"runner.dataset.dir_or_file={recorded}"
    assert main(["-cn", "conf_train", "env.name=CartPole-v1", *SHORT, data]) == 1
    error = capfd.readouterr().err
    assert "contains the type `tutorial_maze_env.part01_core_env.env.maze_state.Cutting2DMazeState`" in error
    assert "`+runner.dataset.extra_types=[...]`" in error


def test_an_episode_of_an_own_environment_becomes_a_page(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("maze.core.rollout.recording.has_display", lambda: False)
    tiny = ["algorithm=a2c", "algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=2"]
    short = ["runner.concurrency=2", "algorithm.rollout_evaluator.n_episodes=1", "runner.normalization_samples=5"]
    limit = "wrappers.TimeLimitWrapper.max_episode_steps=4"
    assert main(["-cn", "conf_train", *OWN, *tiny, *short, limit, "hydra.run.dir=trained"]) == 0
    assert main(["--play", "trained", "runner.max_episode_steps=3", "hydra.run.dir=played"]) == 0
    assert "No page of the episode" not in capfd.readouterr().out
    assert list(Path("played/episode_pages").glob("*.html"))


@pytest.mark.parametrize(
    ("loaders", "n_episodes"), [pytest.param("[0]", 50, marks=pytest.mark.long), ("[0,1,0,1]", 25)]
)
def test_sub_steps_of_an_own_environment_are_learned_from_its_heuristic(loaders: str, n_episodes: int) -> None:
    depot = "tests.train.trainers.imitation.depot"
    env = f"env={{_target_: {depot}.DepotEnv}}"
    rollouts = ["runner=sequential", f"runner.n_episodes={n_episodes}", "hydra.run.dir=recorded"]
    own = [env, f"+env.loaders={loaders}"]
    seeds = ["seeding.env_base_seed=1", "seeding.agent_base_seed=1"]
    assert main([*own, *seeds, f"policy={{_target_: {depot}.Heaviest}}", *rollouts]) == 0
    training = ["algorithm=bc", "algorithm.n_eval_episodes=0", "algorithm.device=cpu", "algorithm.n_epochs=12"]
    faster = [*seeds, "algorithm.optimizer.lr=0.01", "algorithm.batch_size=40", "runner.dataset.dir_or_file=recorded"]
    assert main(["-cn", "conf_train", *own, *training, *faster, "hydra.run.dir=clone"]) == 0
    last = pd.read_csv("clone/progress.csv").iloc[-1]
    accuracies = {name: last[name] for name in last.index if "discrete_accuracy" in name}
    assert min(accuracies.values()) > 0.9
