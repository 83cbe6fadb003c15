"""Rollout runners: the same results in one process and in many, and failures that say where they happened."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.core.agent.dummy_cartpole_policy import DummyCartPolePolicy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError, WorkerError
from maze.core.rollout.parallel_rollout_runner import EpisodeStatsReport, ParallelRolloutRunner, ParallelRolloutWorker
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.rollout.sequential_rollout_runner import SequentialRolloutRunner
from maze.core.utils.seeding import MazeSeeding
from maze.core.utils.worker_pool import quick_start_method
from maze.core.utils.worker_process import failure_of
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import Wrapper

ENV = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env", "name": "CartPole-v1"}
RANDOM = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
RECORDED = {"record_trajectory": True, "record_event_logs": True}
NOTHING_RECORDED = {"record_trajectory": False, "record_event_logs": False}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def seeded(runner: Any) -> Any:
    runner.maze_seeding = MazeSeeding(1, 2, False)
    return runner


def parallel(n_processes: int = 2, n_episodes: int = 4, **arguments: Any) -> ParallelRolloutRunner:
    settings = {**NOTHING_RECORDED, "max_episode_steps": 60, **arguments}
    return seeded(ParallelRolloutRunner(n_episodes=n_episodes, n_processes=n_processes, **settings))


def sequential(n_episodes: int = 4, **arguments: Any) -> SequentialRolloutRunner:
    settings = {**NOTHING_RECORDED, "max_episode_steps": 60, "render": False, **arguments}
    return seeded(SequentialRolloutRunner(n_episodes=n_episodes, **settings))


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def named_stats(runner: Any) -> dict[str, Any]:
    return {f"{key.event.__qualname__} {key.output_name}": value for key, value in runner.stats.items()}


def env_with_limit_of_a_variable() -> Any:
    return TimeLimitWrapper.wrap(GymMazeEnv("CartPole-v1"), max_episode_steps=int(os.environ["MAZE_TEST_LIMIT"]))


def test_beside_other_threads_a_fork_server_starts_the_workers_and_they_have_the_variables_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forking is unsafe beside threads, and new interpreters would import everything again for each rollout."""
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    try:
        assert quick_start_method() is None
        for limit in (3, 4):
            monkeypatch.setenv("MAZE_TEST_LIMIT", str(limit))
            runner = parallel(n_episodes=2)
            runner.run_with(env_with_limit_of_a_variable, [], RANDOM)
            assert named_stats(runner)["BaseEnvEvents.reward mean_step_count"] == limit
    finally:
        is_over.set()
        other.join()


class Faulty(Wrapper[Any]):
    """Breaks in the second episode that it sees."""

    def __init__(self, env: Any, fault: str) -> None:
        self.fault = fault
        self.n_resets = 0
        super().__init__(env)

    def reset(self) -> Any:
        self.n_resets += 1
        if self.n_resets == 2:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "exit":
                os._exit(3)
            if self.fault == "unpicklable":
                raise type("LocalError", (Exception,), {})("only known here", lambda: None)
            raise ValueError("the simulator broke")
        return self.env.reset()


def faulty(fault: str) -> dict[Any, Any]:
    return {Faulty: {"fault": fault}}


def test_results_do_not_depend_on_the_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for index, runner in enumerate(
        (sequential(5, **RECORDED), parallel(1, 5, **RECORDED), parallel(2, 5, **RECORDED), parallel(9, 5, **RECORDED))
    ):
        directory = tmp_path / str(index)
        directory.mkdir()
        monkeypatch.chdir(directory)
        runner.run_with(env=ENV, wrappers={}, agent=RANDOM)
        written = files(directory)
        assert sum(name.startswith("trajectory_data/") for name in written) == 5
        outcomes.append((named_stats(runner), {name: text for name, text in written.items() if name.endswith("tsv")}))
    assert len(outcomes[0][1]) == 2
    for stats, tables in outcomes[1:]:
        np.testing.assert_equal(stats, outcomes[0][0])
        assert tables == outcomes[0][1]


def test_the_best_of_several_plays_is_what_is_recorded() -> None:
    def returns(runner: Any) -> dict[str, float]:
        runner.run_with(env=ENV, wrappers={}, agent=RANDOM)
        return {key.output_name: value for key, value in runner.stats.items() if key.event is BaseEnvEvents.reward}

    env, agent = GymMazeEnv("CartPole-v1"), RandomPolicy(GymMazeEnv("CartPole-v1").action_spaces_dict)
    ((env_seed, agent_seed),) = sequential(1).draw_episode_seeds()
    played: list[float] = []
    others = np.random.SeedSequence(agent_seed).generate_state(7).tolist()
    seeds = [(env_seed, seed) for seed in (agent_seed, *others)]
    RolloutRunner.run_interaction_loop(env, agent, 8, episode_seeds=seeds, returns=played)
    assert len(set(played)) > 1
    assert returns(sequential(1, best_of=8, max_episode_steps=0))["mean"] == max(played)

    once, best = returns(sequential(4)), returns(sequential(4, best_of=8))
    assert best["min"] >= once["min"]
    assert best["mean"] > once["mean"]
    assert best["total_episode_count"] == 4
    assert returns(parallel(3, 4, best_of=8)) == best


def test_best_of_sampling_is_refused_in_stochastic_environments() -> None:
    env = {"_target_": "maze_envs.inventory.lost_sales.LostSalesEnv", "max_episode_steps": 5}
    agent = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    with pytest.raises(ConfigError, match="chosen with hindsight"):
        sequential(1, best_of=3).run_with(env, {}, agent)
    sequential(1, best_of=3, clairvoyant=True).run_with(env, {}, agent)


def test_best_of_sampling_requires_a_number_of_samples() -> None:
    with pytest.raises(ConfigError, match=r"runner.best_of=4 chooses among samples .* runner.deterministic=true"):
        sequential(1, best_of=4, deterministic=True)


def test_every_episode_is_run_exactly_once_for_every_distribution_to_workers() -> None:
    runner = parallel(3, 7)
    runner.run_with(env=ENV, wrappers={}, agent=RANDOM)
    assert runner.stats is not None
    counts = {key.output_name: value for key, value in runner.stats.items() if key.event is BaseEnvEvents.reward}
    assert counts["total_episode_count"] == 7


def test_statistics_are_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    parallel().run_with(env=ENV, wrappers={}, agent=RANDOM)
    assert capfd.readouterr().out.count("total_episode_count") == 1


@pytest.mark.parametrize("make", [sequential, parallel])
def test_rollouts_go_on_without_event_logs_that_cannot_be_written(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "event_logs").touch()  # a file in place of the directory
    runner = make(n_episodes=3, record_event_logs=True)
    runner.run_with(env=ENV, wrappers={}, agent=RANDOM)
    counts = {key.output_name: value for key, value in runner.stats.items() if key.event is BaseEnvEvents.reward}
    assert counts["total_episode_count"] == 3
    assert caplog.text.count("LogEventsWriterTSV cannot write") == 1


def test_the_documented_python_example_runs(tmp_path: Path) -> None:
    env = GymMazeEnv("CartPole-v1")
    runner = SequentialRolloutRunner(
        n_episodes=2, max_episode_steps=10, record_trajectory=True, record_event_logs=True, render=False
    )
    runner.run_with(
        env=env,
        wrappers={"maze.core.wrappers.reward_scaling_wrapper.RewardScalingWrapper": {"scale": 0.1}},
        agent=DummyCartPolePolicy(),
    )
    assert runner.stats is not None
    rewards = {key.output_name: value for key, value in runner.stats.items() if key.event is BaseEnvEvents.reward}
    assert rewards["max"] == pytest.approx(1.0)  # ten steps of 0.1
    assert len(list((tmp_path / "trajectory_data").iterdir())) == 2


def test_objects_can_be_rolled_out_in_parallel_too() -> None:
    env = GymMazeEnv("CartPole-v1")
    runner = parallel(2, 4)
    runner.run_with(env=env, wrappers={}, agent=RandomPolicy(env.action_spaces_dict))
    expected = sequential(4)
    expected.run_with(env=ENV, wrappers={}, agent=RANDOM)
    np.testing.assert_equal(named_stats(runner), named_stats(expected))


def test_episodes_without_a_limit_run_until_they_end() -> None:
    runner = sequential(1, max_episode_steps=0)
    runner.run_with(env=ENV, wrappers={}, agent=DummyCartPolePolicy())
    lengths = {key.output_name: value for key, value in runner.stats.items() if key.event is BaseEnvEvents.reward}
    assert lengths["max"] > 60


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", r"worker \d \(pid \d+\) was killed by signal 9 \(SIGKILL\) during `play_slice` of episodes"),
        ("exit", r"worker \d \(pid \d+\) exited with code 3 during `play_slice` of episodes"),
        ("raise", r"worker \d .* raised ValueError: the simulator broke .*seeded with \d+.* of episodes \d to"),
        ("unpicklable", r"worker \d .* raised LocalError.* of episodes \d to"),
    ],
)
def test_a_worker_that_fails_is_named(fault: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        parallel(2, 6).run_with(env=ENV, wrappers=faulty(fault), agent=RANDOM)
    assert time.monotonic() - start < 5


def test_a_maze_error_passes_through_unchanged() -> None:
    with pytest.raises(ConfigError, match="CartPole-v99"):
        parallel().run_with(env={**ENV, "name": "CartPole-v99"}, wrappers={}, agent=RANDOM)


class ClosedEnv(GymMazeEnv):
    """Count how often its objects are closed."""

    n_closed = 0

    def close(self) -> None:
        ClosedEnv.n_closed += 1
        super().close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_sequential_rollout_closes_the_environment_that_it_built(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClosedEnv, "n_closed", 0)
    agent = {"_target_": "maze.core.agent.dummy_cartpole_policy.DummyCartPolePolicy"}
    name = "MountainCar-v0" if fails else "CartPole-v1"  # the policy expects four numbers
    with pytest.raises(ValueError, match="mismatch") if fails else nullcontext():
        sequential(1).run_with(env={"_target_": ClosedEnv, "env": name}, wrappers={}, agent=agent)
    assert ClosedEnv.n_closed == 1
    sequential(1).run_with(env=ClosedEnv("CartPole-v1"), wrappers={}, agent=agent)
    assert ClosedEnv.n_closed == 1, "an object is the caller's"


@pytest.mark.parametrize("value", [0, -1, 1.5, "three", True, None])
def test_an_invalid_number_of_episodes_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"runner\.n_episodes: expected a whole number of at least 1"):
        sequential(value)


def test_the_loop_calls_back_once_per_episode_after_its_records_are_complete() -> None:
    env, agent = RolloutRunner.init_env_and_agent(ENV, {}, 5, RANDOM, "", 1, 2)
    n_calls = 0

    def count() -> None:
        nonlocal n_calls
        n_calls += 1

    RolloutRunner.run_interaction_loop(env, agent, n_episodes=3, episode_end_callback=count)
    assert n_calls == 3


def test_the_worker_reports_each_episode_to_any_queue() -> None:
    reports: list[Any] = []
    queue = type("Queue", (), {"put": reports.append})
    ParallelRolloutWorker.run(ENV, {}, RANDOM, 2, 5, False, "", queue, 1, 2)  # type: ignore[arg-type]
    assert [type(report) for report in reports] == [EpisodeStatsReport] * 2
    assert reports[0].event_log is not None
    pickle.dumps(reports)


def test_a_failure_without_a_picklable_exception_keeps_its_text() -> None:
    error = type("LocalError", (Exception,), {})("text")
    failure = pickle.loads(pickle.dumps(failure_of(error)))
    assert "LocalError: text" in failure.traceback
    assert failure.original is None


def test_workers_leave_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "rollout.py"
    script.write_text(
        "import os, time\n"
        "from maze.core.rollout.parallel_rollout_runner import ParallelRolloutRunner\n"
        "from maze.core.wrappers.wrapper import Wrapper\n"
        "class Slow(Wrapper):\n"
        "    def reset(self):\n"
        "        open(f'pid_{os.getpid()}', 'w').close()\n"
        "        time.sleep(60)\n"
        f"ParallelRolloutRunner(2, 5, 2, False, False).run_with({ENV!r}, {{Slow: {{}}}}, {RANDOM!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 20
    while len(pids := [int(path.name[4:]) for path in tmp_path.glob("pid_*")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_rendering_without_a_display_is_reported_and_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    sequential(1, max_episode_steps=2, render=True).run_with(env=ENV, wrappers={}, agent=RANDOM)
    assert "No display or drawing library was found" in capfd.readouterr().out
