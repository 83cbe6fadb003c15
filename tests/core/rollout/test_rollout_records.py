"""What rollouts leave behind, in one process and in many, once and repeatedly; trained policies and their files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.core.agent.dummy_cartpole_policy import DummyCartPolePolicy
from maze.core.agent.flat_policy import FlatPolicy
from maze.core.agent.replay_recorded_actions_policy import ReplayRecordedActionsPolicy
from maze.core.errors import CheckpointError, ConfigError, EnvironmentContractError
from maze.core.rollout.parallel_rollout_runner import ParallelRolloutRunner
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.rollout.sequential_rollout_runner import SequentialRolloutRunner
from maze.core.trajectory_recording.records.trajectory_record import ActionRecord, load_trajectory
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.trajectory_recording_wrapper import ActionRecordingWrapper
from maze.maze_cli import main

ENV = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env", "name": "CartPole-v1"}
RANDOM = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
STACKED = {"ObservationStackWrapper": {"stack_config": [{"observation": "observation", "stack_steps": 3}]}}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def runner(n_processes: int | None = None, **arguments: Any) -> Any:
    """A seeded runner with everything recorded."""
    settings = {"n_episodes": 3, "max_episode_steps": 25, "record_trajectory": True, "record_event_logs": True}
    settings.update(arguments)
    made: Any
    if n_processes is None:
        made = SequentialRolloutRunner(render=settings.pop("render", False), **settings)
    else:
        made = ParallelRolloutRunner(n_processes=n_processes, **settings)
    made.maze_seeding = MazeSeeding(1, 2, False)
    return made


def tables() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(Path("event_logs").iterdir())}


def trajectories() -> dict[str, list[Any]]:
    """Everything recorded of each step, by episode."""
    episodes = {}
    for path in sorted(Path("trajectory_data").iterdir()):
        steps = load_trajectory(path).step_records
        events = [[repr(event) for event in step.step_event_log.events] for step in steps]
        seen = [(step.maze_state, step.maze_action, step.reward, step.done, step.info) for step in steps]
        episodes[path.stem] = [*seen, events]
    return episodes


def test_trajectories_and_actions_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []
    for n_processes in (None, 1, 3):
        directory = tmp_path / str(n_processes)
        directory.mkdir()
        monkeypatch.chdir(directory)
        runner(n_processes, record_actions=True).run_with(ENV, STACKED, RANDOM)
        actions = {path.name: path.read_text() for path in sorted(Path("action_records").iterdir())}
        recorded.append((trajectories(), tables(), actions))
    assert len(recorded[0][0]) == len(recorded[0][2]) == 3
    for other in recorded[1:]:
        np.testing.assert_equal(other, recorded[0])


def test_rendering_adds_nothing_but_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    outcomes = []
    for render in (False, True):
        (tmp_path / str(render)).mkdir()
        monkeypatch.chdir(tmp_path / str(render))
        runner(n_episodes=2, max_episode_steps=4, render=render).run_with(ENV, {}, RANDOM)
        outcomes.append((trajectories(), tables()))
    np.testing.assert_equal(outcomes[1], outcomes[0])
    assert {page.stem for page in Path("episode_pages").iterdir()} == set(outcomes[0][0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(out of date|deprecated)")
def test_the_documented_listing_with_rendering_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    env = GymMazeEnv("CartPole-v0")
    agent = DummyCartPolePolicy()
    sequential = SequentialRolloutRunner(
        n_episodes=2, max_episode_steps=100, record_trajectory=True, record_event_logs=True, render=True
    )
    sequential.run_with(
        env=env,
        wrappers={"maze.core.wrappers.reward_scaling_wrapper.RewardScalingWrapper": {"scale": 0.1}},
        agent=agent,
    )
    episodes = trajectories()
    assert len(episodes) == 2
    assert {page.stem for page in Path("episode_pages").iterdir()} == set(episodes)


def test_the_same_rollout_again_replaces_its_trajectories(capfd: pytest.CaptureFixture[str]) -> None:
    runner().run_with(ENV, {}, RANDOM)
    once = trajectories()
    runner(2).run_with(ENV, {}, RANDOM)
    np.testing.assert_equal(trajectories(), once)
    assert capfd.readouterr().out.count("total_episode_count") == 2


def test_another_rollout_in_the_same_directory_adds_its_episodes() -> None:
    runner(n_episodes=1).run_with(ENV, {}, RANDOM)
    other = runner(n_episodes=1)
    other.maze_seeding = MazeSeeding(5, 6, False)
    other.run_with(ENV, {}, RANDOM)
    episodes = {line.partition("\t")[0] for line in tables()["BaseEnvEvents.reward.tsv"].splitlines()[1:]}
    assert episodes == set(trajectories())
    assert len(episodes) == 2


def test_an_environment_that_is_rolled_out_repeatedly_gathers_no_listeners() -> None:
    env = GymMazeEnv("CartPole-v1")
    for _ in range(3):
        one = runner(n_episodes=1, record_trajectory=False, record_event_logs=False)
        one.run_with(env, {}, DummyCartPolePolicy())
        assert env.context.event_service.on_clear == []
        counts = [value for key, value in one.stats.items() if key.output_name == "total_episode_count"]
        assert counts == [1]


class AlwaysRight(FlatPolicy):
    """Pushes to the right."""

    def compute_action(self, observation: Any, deterministic: bool) -> Any:
        return {"action": np.int64(1)}

    def compute_top_action_candidates(self, observation: Any, num_candidates: int | None) -> Any:
        return [self.compute_action(observation, True)], [1.0]


def test_flat_policies_are_joined_by_configuration() -> None:
    agent = {"_target_": "maze.core.agent.default_policy.DefaultPolicy", "policies": {0: AlwaysRight()}}
    runner(n_episodes=1).run_with(ENV, {}, agent)
    (episode,) = trajectories().values()
    assert {step[1] for step in episode[:-2]} == {1}


# -- replay ----------------------------------------------------------------------------------------------------------


def recorded_episode(n_steps: int = 6) -> tuple[ActionRecord, list[Any]]:
    env = ActionRecordingWrapper.wrap(GymMazeEnv("Pendulum-v1"))
    env.seed(3)
    observations = [env.reset()]
    env.action_space.seed(1)
    observations += [env.step(env.action_space.sample())[0] for _ in range(n_steps)]
    env.reset()
    (path,) = Path("action_records").iterdir()
    return ActionRecord.load(path), observations


def test_a_record_repeats_an_episode_of_continuous_actions_bit_for_bit() -> None:
    record, observations = recorded_episode()
    env = GymMazeEnv("Pendulum-v1")
    policy = ReplayRecordedActionsPolicy("action_records")
    for _ in range(2):  # as often as one likes
        env.seed(record.seed)
        policy.seed(0)
        observation = env.reset()
        for expected in observations[:-1]:
            np.testing.assert_array_equal(observation["observation"], expected["observation"])
            observation = env.step(policy.compute_action(observation, env=env, actor_id=env.actor_id()))[0]
        np.testing.assert_array_equal(observation["observation"], observations[-1]["observation"])
    with pytest.raises(
        EnvironmentContractError, match=r"action 6 of 6 recorded ones.* the end of the episode was recorded"
    ):
        policy.compute_action(observation, env=env, actor_id=env.actor_id())


def test_only_the_episode_after_seeding_knows_its_seed() -> None:
    env = ActionRecordingWrapper.wrap(GymMazeEnv("CartPole-v1"))
    env.seed(3)
    for _ in range(3):
        env.reset()
        env.step({"action": 0})
    env.reset()
    seeds = [ActionRecord.load(path).seed for path in Path("action_records").iterdir()]
    assert sorted(seeds, key=str) == [3, None, None]


@pytest.mark.parametrize("content", [b"", b"{", b'{"episode_id": 1}', b"\xff\xfe", b"[1, 2]"])
def test_a_damaged_record_is_named(content: bytes) -> None:
    Path("record.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"record\.json is not a valid record of actions"):
        ActionRecord.load("record.json")


def test_a_diverging_replay_reports_the_step() -> None:
    record, _ = recorded_episode()
    env = GymMazeEnv("Pendulum-v1")
    env.seed(record.seed)
    observation = env.reset()
    policy = ReplayRecordedActionsPolicy("action_records")
    with pytest.raises(EnvironmentContractError, match=r"action 0 of \d+ recorded ones: it is the turn of"):
        policy.compute_action(observation, env=env, actor_id=(1, 0))


# -- trained policies ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with estimated normalization statistics."""
    run = tmp_path_factory.mktemp("training") / "run"
    short = ["algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4"]
    short += ["runner.concurrency=2", "algorithm.rollout_evaluator.n_episodes=1", "runner.normalization_samples=50"]
    choices = ["env.name=CartPole-v1", "wrappers=vector_obs", "algorithm=a2c"]
    assert main(["-cn", "conf_train", *choices, *short, f"hydra.run.dir={run}"]) == 0
    return run


ROLLOUT = ["env.name=CartPole-v1", "policy=torch_policy", "runner.n_episodes=2"]


def test_a_trained_policy_acts_the_same_in_one_process_and_in_many(trained: Path, tmp_path: Path) -> None:
    seeds = ["seeding.env_base_seed=3", "seeding.agent_base_seed=4", "wrappers=vector_obs", f"input_dir={trained}"]
    outcomes = []
    for how in ("runner=sequential", "runner.n_processes=2"):
        directory = tmp_path / how
        assert main([*ROLLOUT, *seeds, how, f"hydra.run.dir='{directory}'"]) == 0
        os.chdir(directory)
        outcomes.append((tables(), trajectories()))
    assert len(outcomes[0][1]) == 2
    np.testing.assert_equal(outcomes[1], outcomes[0])


def damaged(trained: Path, run: Path, name: str, content: bytes | None) -> Path:
    shutil.copytree(trained, run)
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    return run


@pytest.mark.parametrize("how", ["runner=sequential", "runner.n_processes=2"])
def test_a_read_only_run_is_all_that_a_rollout_needs(trained: Path, tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    for path in [run, *run.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert main([*ROLLOUT, how, "wrappers=vector_obs", f"input_dir={run}", "hydra.run.dir=out"]) == 0
    finally:
        for path in [run, *run.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before
    assert len(list(Path("out/trajectory_data").iterdir())) == 2


FAULTS = [
    ("statistics.pkl", None, "runner=sequential"),
    ("statistics.pkl", None, "runner.n_processes=2"),
    ("statistics.pkl", b"", "runner=sequential"),
    ("state_dict.pt", None, "runner=sequential"),
    ("state_dict.pt", b"<html>", "runner.n_processes=2"),
    ("spaces_config.pkl", None, "runner.n_processes=2"),
    ("spaces_config.pkl", b"\x80\x04garbage", "runner=sequential"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content", "how"), FAULTS, ids=lambda value: str(value)[:20])
def test_a_run_that_lacks_a_file_is_named_with_it(
    trained: Path, tmp_path: Path, name: str, content: bytes | None, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = damaged(trained, tmp_path / "run", name, content)
    assert main([*ROLLOUT, how, "wrappers=vector_obs", f"input_dir={run}"]) > 0
    error = capfd.readouterr().err
    assert name in error
    assert str(run) in error
    assert "Traceback" not in error


def test_a_missing_run_is_named_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"input_dir: there is no directory nowhere"):
        RolloutRunner.init_env_and_agent(ENV, {}, 5, RANDOM, "nowhere")
    assert Path.cwd() == Path(os.getcwd())


def test_normalization_statistics_without_their_wrapper_are_noticed(trained: Path) -> None:
    runs: Any = SequentialRolloutRunner(1, 5, False, False, render=False)
    runs.input_dir = str(trained)
    with pytest.warns(UserWarning, match="holds normalization statistics"):
        runs.run_with(ENV, {}, RANDOM)
