"""Environments of uneven speed in worker processes: first fragments, hanging environments, replaced processes."""

from __future__ import annotations

import contextlib
import csv
import itertools
import logging
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError, WorkerError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import EnvFactory
from maze.train.parallelization.placement import InProcess, Placement, Processes
from tests.train.parallelization.placements import recorded_by, trained
from tests.train.parallelization.toy_envs import (
    Observe,
    PassOn,
    SlowThirdCoreEnv,
    cause_fault,
    counting_env,
    slow_third_env,
)
from tests.train.parallelization.toy_policies import make_policy


def with_groups(placement: Placement, n_groups: int) -> Placement:
    placement.env_groups = n_groups
    return placement


def collecting(env: Any, n_steps: int = 5, make_env: Any = slow_third_env) -> tuple[Any, Any]:
    """Return a function that collects a rollout, and its columns."""
    generator, policy = RolloutGenerator(env, record_logits=True), make_policy(make_env)
    columns = generator.allocate(n_steps, policy)
    return lambda: generator.collect(policy, columns), columns


@pytest.mark.parametrize("max_age", [0, 100_000])
def test_a_slow_environment_is_not_waited_for_and_loses_no_step(max_age: int) -> None:
    env: Any = Processes(wait_for=0.6, max_fragment_age=max_age).vector_env(slow_third_env, 3, "train")
    with contextlib.closing(env):
        env.seed([0, 1, 3])
        collect, columns = collecting(env)
        assert columns.n_envs == 2
        seen: dict[int, list[int]] = {number: [] for number in (0, 1, 3)}
        until = time.monotonic() + 1.0  # the slow environment has a rollout in a tenth of it
        while time.monotonic() < until:
            collect()
            numbers, times = columns.substeps[0].observations["count"][:5].astype(int).transpose(2, 1, 0)
            for number, of_env in zip(numbers[:, 0].tolist(), times.tolist(), strict=True):
                seen[number] += of_env
        if max_age:  # each fragment continues the one before and is delivered once
            for times_of_env in seen.values():
                assert times_of_env == list(range(len(times_of_env)))
            assert len(seen[3]) >= 5
        env.write_epoch_stats()
        found = {str(key.event.__name__): value for key, value in env.epoch_stats.last_stats.items()}
        assert found["fragments_dropped"] == 0 if max_age else found["fragments_dropped"] > 0


def test_resumed_environments_that_did_not_wait_begin_other_episodes() -> None:
    state: dict[str, Any] = {}
    seen: list[set[int]] = []
    for _ in range(3):
        env: Any = Processes(wait_for=0.5).vector_env(slow_third_env, 2, "train")
        with contextlib.closing(env):
            env.seed([0, 1])  # a resumed run draws the seeds of its first start again
            if state:
                assert len(env.load_state_dict(state)) == 2
            collect, columns = collecting(env, make_env=slow_third_env)
            collect()
            seen.append({int(number) for number in columns.substeps[0].observations["count"][0, :, 0]})
            state = env.state_dict()
    assert seen[0] <= {0, 1}
    assert not (seen[0] | {0, 1}) & (seen[1] | seen[2])
    assert not seen[1] & seen[2]


def test_evaluations_and_rollouts_that_wait_for_all_are_those_of_groups_in_this_process() -> None:
    one, other = (
        recorded_by(with_groups(placement, 3), "flat") for placement in (InProcess(), Processes(max_restarts=1))
    )
    assert one == other


class OnceFaultyCoreEnv(SlowThirdCoreEnv):
    """Has a fault in the third step of the environment with seed 1, in the first process that takes it."""

    def __init__(self, marker: Path, fault: str) -> None:
        super().__init__()
        self._marker, self._fault = marker, fault

    def step(self, maze_action: Any) -> Any:
        if self.time == 2 and self.number == 1 and not self._marker.exists():
            self._marker.touch()
            if self._fault == "native hang":
                sum(itertools.repeat(0))  # never returns to Python, where signals are handled
            cause_fault(self._fault)
        return super().step(maze_action)


def once_faulty_env(marker: Path, fault: str) -> MazeEnv[Any]:
    observation = spaces.Dict({"count": spaces.Box(0, 100_000, (2,), np.float32)})
    move = PassOn(spaces.Dict({"move": spaces.Discrete(5)}))
    return MazeEnv(OnceFaultyCoreEnv(marker, fault), {0: move}, {0: Observe(observation)})


EXPECTED = {
    "raise": r"raised ValueError: the simulator lost its marbles in environment .* during `collect`",
    "kill": r"was killed by signal 9 \(SIGKILL\) during `collect`",
    "hang": r"raised TimeoutError: `step` takes longer than the limit of 0.3 s",
    "native hang": r"did not return from native code within 1 seconds after `runner.env_timeout` during",
}


@pytest.mark.parametrize(
    ("fault", "wait_for"),
    [("raise", 1.0), ("raise", 0.5), ("kill", 1.0), ("kill", 0.5), ("hang", 0.5), ("native hang", 1.0)],
)
def test_the_process_of_a_faulty_environment_is_named_and_replaced(
    fault: str, wait_for: float, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "native hang":
        monkeypatch.setattr("maze.core.utils.worker_pool._HANG_SECONDS", 1.0)
    placement = Processes(wait_for=wait_for, max_restarts=1)
    placement.env_timeout = 0.3
    factory = EnvFactory(partial(once_faulty_env, tmp_path / "marker", fault), timeout=placement.env_timeout)
    env: Any = placement.vector_env(factory, 2, "train")
    with contextlib.closing(env):
        env.seed([0, 1])
        collect, columns = collecting(env)
        deadline, seen = time.monotonic() + 120, set[int]()
        with caplog.at_level(logging.WARNING):
            while len(seen - {0, 1}) < 1 and time.monotonic() < deadline:  # the replaced environment has another seed
                collect()
                seen |= set(columns.substeps[0].observations["count"][:5, :, 0].astype(int).ravel().tolist())
        env.write_epoch_stats()
    (warning,) = [text for text in caplog.messages if "The process is replaced" in text]
    assert re.search(rf"environment worker 1 \(environment 1, pid \d+\) {EXPECTED[fault]}", warning)
    assert len(seen - {0, 1}) == 1
    assert env._pool.n_restarts == 1


@pytest.mark.parametrize(("fault", "wait_for"), [("raise", 1.0), ("kill", 0.5)])
def test_environments_in_threads_are_replaced_together_and_lose_no_step(
    fault: str, wait_for: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory = partial(once_faulty_env, tmp_path / "marker", fault)
    # while a process starts, the others may collect hundreds of rollouts: no fragment is too old
    env: Any = Processes(wait_for=wait_for, max_fragment_age=100_000, max_restarts=1, threads=2).vector_env(
        factory, 4, "train"
    )
    with contextlib.closing(env):
        assert len({worker.process.pid for worker in env._pool.workers}) == 2
        env.seed([0, 1, 2, 4])
        collect, columns = collecting(env)
        deadline, seen = time.monotonic() + 120, dict[int, list[int]]()
        with caplog.at_level(logging.WARNING):
            while len(seen.keys() - {0, 1}) < 4 and time.monotonic() < deadline:
                collect()
                numbers, times = columns.substeps[0].observations["count"][:5].astype(int).transpose(2, 1, 0)
                for number, of_env in zip(numbers[:, 0].tolist(), times.tolist(), strict=True):
                    seen.setdefault(number, []).extend(of_env)
    for times_of_env in seen.values():
        assert times_of_env == list(range(len(times_of_env)))
    assert len(seen.keys() - {0, 1}) == 4  # the process of the others and the new one
    assert {2, 4} <= seen.keys()
    assert "a thread of 2" in caplog.text
    assert env._pool.n_restarts == 1


def test_threads_of_a_process_that_has_imported_nothing_import_one_after_the_other() -> None:
    env = Processes(start_method="spawn", threads=8).vector_env(counting_env, 8, "train")
    with contextlib.closing(env):
        env.seed(list(range(8)))
        collect, columns = collecting(env, make_env=counting_env)
        collect()
    assert columns.n_envs == 8


@pytest.mark.parametrize("threads", [1, 2])
def test_an_actor_of_impala_is_replaced(threads: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    actors = Processes(max_restarts=1, threads=threads).actors(
        env_factory=partial(once_faulty_env, tmp_path / "marker", "kill"),
        policy=make_policy(slow_third_env),
        n_rollout_steps=4,
        n_actors=2,
        batch_size=2,
        queue_out_of_sync_factor=1.0,
        actor_env_seeds=[0, 1],
        actor_agent_seeds=[0, 1],
    )
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        stack.callback(actors.stop)
        for _ in range(5):
            actors.broadcast_updated_policy(actors.policy.state_dict())
            batch = actors.collect_batch()
            assert batch.columns.rewards.shape == (4, 2)
    workers = [1] if threads == 1 else [0, 1]  # a process that is killed has both
    assert any(f"environment worker {index} (environment {index}" in caplog.text for index in workers)


def test_a_process_that_fails_again_and_again_ends_the_run() -> None:
    env = Processes(max_restarts=2).vector_env(partial(counting_env, fault=("raise", 2)), 2)
    env.seed([0, 1])
    collect, _ = collecting(env, make_env=counting_env)
    with pytest.raises(WorkerError, match=r"lost its marbles in environment 0"):
        collect()
    assert env._pool.n_restarts >= 2


def test_ppo_learns_from_the_first_fragments_and_resumes(tmp_path: Path) -> None:
    where = ["runner=local", "runner.concurrency=3", "runner.placement.wait_for=0.6", "algorithm.n_rollout_steps=20"]
    trained(tmp_path, "algorithm=ppo", *where)
    with open(tmp_path / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["env_steps"] for row in rows if row["env_steps"]} >= {"80", "160"}  # 2 of 3 environments, 20 steps
    assert any("fragment_age" in key for key in rows[0])
    state = trained(tmp_path / "resumed", "algorithm=ppo", *where, f"input_dir={tmp_path}", "resume=true")
    assert state


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"wait_for": 0}, r"wait_for: expected a share in \(0, 1\], found 0"),
        ({"wait_for": 1.5}, "found 1.5"),
        ({"wait_for": float("nan")}, "found nan"),
        ({"wait_for": "most"}, "found 'most'"),
        ({"max_fragment_age": -1}, "max_fragment_age: expected a whole number of at least 0"),
        ({"max_restarts": 0.5}, "max_restarts: expected a whole number"),
        ({"threads": 0}, "threads: expected a whole number of at least 1"),
    ],
)
def test_wrong_values_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Processes(**settings)


def test_time_limits_of_environments_in_threads_are_refused() -> None:
    placement = Processes(threads=2)
    placement.env_timeout = 0.3
    with pytest.raises(ConfigError, match=r"env_timeout.*found 0.3 s and runner\.placement\.threads=2"):
        placement.vector_env(slow_third_env, 2, "train")


def test_groups_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"wait_for.*3 environments in 2 groups.*runner\.concurrency"):
        with_groups(Processes(wait_for=0.5), 2).vector_env(slow_third_env, 3, "train")
