"""Replay buffers filled by environments of uneven speed: each step once and in order, failures, exploration, resume."""

from __future__ import annotations

import contextlib
import csv
import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import WorkerError
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import FirstFragmentWorkers
from maze.train.parallelization.placement import Processes
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from tests.train.parallelization.placements import trained
from tests.train.parallelization.toy_envs import (
    Observe,
    PassOn,
    SlowThirdCoreEnv,
    cause_fault,
    counting_env,
    slow_third_env,
    two_step_env,
)
from tests.train.parallelization.toy_policies import make_policy

N_STEPS = 5


def workers_of(placement: Processes, make_env: Any, seeds: list[int], n_rollouts: int = 0) -> Any:
    return placement.workers(
        env_factory=make_env,
        worker_policy=make_policy(make_env),
        n_rollout_steps=N_STEPS,
        n_workers=len(seeds),
        batch_size=1,
        rollouts_per_iteration=n_rollouts or len(seeds),
        split_rollouts_into_transitions=True,
        env_instance_seeds=seeds,
        replay_buffer=UniformReplayBuffer(100_000, seed=0),
    )


class NumberedStepsCoreEnv(SlowThirdCoreEnv):
    """Observes its seed and the number of all steps taken; episodes of seven (terminated) and four steps (truncated).

    :param marker: File without which the process of the environment with seed 1 is killed in its second fragment.
    """

    def __init__(self, marker: Path | None) -> None:
        super().__init__()
        self.endings = ((7, "terminated"), (4, "truncated"))
        self.marker = marker

    def step(self, maze_action: Any) -> Any:
        if self.marker is not None and not self.marker.exists() and len(self.received) == N_STEPS and self.number == 1:
            self.marker.touch()
            cause_fault("kill")
        return super().step(maze_action)

    def get_maze_state(self) -> Any:
        return {"count": [self.number, len(self.received)]}


def numbered_steps_env(marker: Path | None = None) -> MazeEnv[Any]:
    observation = spaces.Dict({"count": spaces.Box(0, 100_000, (2,), np.float32)})
    move = PassOn(spaces.Dict({"move": spaces.Discrete(5)}))
    return MazeEnv(NumberedStepsCoreEnv(marker), {0: move}, {0: Observe(observation)})


def test_every_step_is_stored_once_and_in_order_however_slow_its_environment() -> None:
    workers = workers_of(Processes(wait_for=0.6), numbered_steps_env, [0, 1, 3])
    assert isinstance(workers, FirstFragmentWorkers)
    n_steps = []
    with contextlib.ExitStack() as stack:
        stack.callback(workers.stop)
        n_slow = 0
        while len(n_steps) < 40 or not n_slow:
            workers.collect_rollouts()
            n_steps.append(workers.n_env_steps)
            columns = workers.replay_buffer.columns
            n_slow = (columns.observations[0]["count"][: columns.n_added, 0] == 3).sum()
        workers.write_epoch_stats()
    assert sum(n_steps) == columns.n_added
    assert set(n_steps) <= {2 * N_STEPS, 3 * N_STEPS}  # 60 % of three rollouts, and all that have arrived
    numbers, times = columns.observations[0]["count"][: columns.n_added].astype(int).T
    for number in (0, 1, 3):
        assert times[numbers == number].tolist() == list(range((numbers == number).sum()))
    assert 0 < (numbers == 3).sum() < (numbers == 0).sum()
    is_end = np.isin(times % 11, (6, 10))
    assert workers.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, "episode_count") == is_end.sum()
    assert columns.terminated[: columns.n_added].tolist() == (times % 11 == 6).tolist()
    followers = columns.next_row[: columns.n_added]
    linked = np.flatnonzero(followers >= 0)
    assert not is_end[linked].any()
    assert len(linked) == (~is_end).sum() - sum(int(not is_end[numbers == number][-1]) for number in (0, 1, 3))
    assert (numbers[followers[linked]] == numbers[linked]).all()
    assert (times[followers[linked]] == times[linked] + 1).all()


def test_steps_of_several_actors_are_joined_across_fragments() -> None:
    workers = workers_of(Processes(wait_for=0.5), functools.partial(two_step_env, 3), [0, 1])
    with contextlib.ExitStack() as stack:
        stack.callback(workers.stop)
        for _ in range(6):
            workers.collect_rollouts()
    columns = workers.replay_buffer.columns
    n, (before,), after = columns.n_added, columns.observations[0]["time"].T, columns.next_observation["time"][:, 0]
    is_inside = ~columns.terminated[:n]
    assert is_inside.any()
    assert (after[:n][is_inside] == before[:n][is_inside] + 1).all()


@pytest.mark.parametrize("wait_for", [1.0, 0.5])
def test_steps_of_a_replaced_environment_do_not_continue_those_of_the_lost_one(wait_for: float, tmp_path: Path) -> None:
    make_env = functools.partial(numbered_steps_env, tmp_path / "marker")
    workers = workers_of(Processes(wait_for=wait_for, max_restarts=1), make_env, [0, 1])
    begun, deadline = set[int](), time.monotonic() + 120
    with contextlib.ExitStack() as stack:
        stack.callback(workers.stop)
        while len(begun) < 3 and time.monotonic() < deadline:
            workers.collect_rollouts()
            columns = workers.replay_buffer.columns
            numbers, times = columns.observations[0]["count"][: columns.n_added].astype(int).T
            begun = set(numbers[times == 0].tolist())  # the other environment has another seed after 1,000 steps
    new_number = (begun - {0, 1}).pop()
    assert times[numbers == 1].tolist() == list(range(N_STEPS))
    assert times[numbers == new_number].tolist() == list(range((numbers == new_number).sum()))
    followers = columns.next_row[: columns.n_added]
    linked = np.flatnonzero(followers >= 0)
    assert (numbers[followers[linked]] == numbers[linked]).all()
    assert (times[followers[linked]] == times[linked] + 1).all()


@pytest.mark.parametrize("wait_for", [0.5, 0.9])
def test_each_resumed_run_begins_episodes_with_seeds_of_its_own(wait_for: float) -> None:
    seen: list[set[int]] = []
    state: dict[str, Any] = {}
    for _ in range(3):
        workers = workers_of(Processes(wait_for=wait_for), numbered_steps_env, [0, 1])
        with contextlib.ExitStack() as stack:
            stack.callback(workers.stop)
            if state:
                workers.load_state_dict(state)
            workers.collect_rollouts()
            state = workers.state_dict()
        columns = workers.replay_buffer.columns
        seen.append(set(columns.observations[0]["count"][: columns.n_added, 0].tolist()))
    assert not seen[0] & seen[1] | seen[1] & seen[2] | seen[0] & seen[2]


def test_a_failing_environment_is_named() -> None:
    workers = workers_of(Processes(wait_for=0.5), functools.partial(counting_env, fault=("raise", 2)), [0, 1])
    with pytest.raises(WorkerError, match=r"environment worker \d \(environment \d, .*the simulator lost its marbles"):
        workers.collect_rollouts()


def test_the_default_waits_for_all() -> None:
    assert not isinstance(workers_of(Processes(), slow_third_env, [0]), FirstFragmentWorkers)


@pytest.mark.parametrize(
    ("algorithm", "name", "more"),
    [
        ("dqn", "CartPole-v1", "algorithm.n_step_returns=3"),
        ("sac", "Pendulum-v1", "critic=flatten_concat_state_action"),
    ],
)
def test_training_counts_the_steps_that_have_arrived_and_resumes(
    algorithm: str, name: str, more: str, tmp_path: Path
) -> None:
    arguments = [f"algorithm={algorithm}", more, "runner=local", "runner.placement.wait_for=0.6"]
    arguments += [f"algorithm.{key}=3" for key in ("num_actors", "rollouts_per_iteration", "n_rollout_steps")]
    arguments += ["algorithm.initial_buffer_size=20", "algorithm.batch_size=8", "algorithm.replay_buffer_size=1000"]
    trained(tmp_path, *arguments, name=name)
    state = torch.load(tmp_path / "latest.pt", weights_only=True)
    with open(tmp_path / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert state["replay_buffer"]["content"]["n_added"] == state["n_env_steps"] == int(rows[-1]["env_steps"])
    assert any("fragment_age" in key for key in rows[0])
    trained(tmp_path / "resumed", *arguments, f"input_dir={tmp_path}", "resume=true", name=name)
