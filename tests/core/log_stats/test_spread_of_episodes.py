"""The statistics of an epoch depend on its episodes only, not on which environments or processes played them."""

# Event interfaces have no abstract methods: topics implement all of them.

from __future__ import annotations

from abc import ABC
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.events.pubsub import Pubsub
from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_stats_grouping,
    define_step_stats,
)
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsKey, LogStatsLevel
from maze.core.log_stats.reducer_functions import histogram
from maze.core.rollout.parallel_rollout_runner import ParallelRolloutRunner
from maze.core.rollout.sequential_rollout_runner import SequentialRolloutRunner
from maze.core.utils.seeding import MazeSeeding
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from tests.train.parallelization.toy_envs import Observe, PassOn, ToyCoreEnv


def zeros_among(values):
    return sum(value == 0 for value in values)


STEP = {"len": len, "sum": sum, "max": max}
EPISODE = {
    "len": len,
    "sum": sum,
    "min": min,
    "max": max,
    "mean": np.mean,
    "median": np.median,
    "zeros": zeros_among,
    "all": histogram,
}
EPOCH = {"len": len, "sum": sum, "min": min, "max": max, "mean": np.mean, "all": histogram}


def combinations():
    return [
        (step, episode, epoch)
        for step in STEP
        for episode in EPISODE
        for epoch in EPOCH
        if episode != "all" or epoch == "all"  # a histogram of episodes is a list
    ]


def with_every_statistic(event):
    for step, function in STEP.items():
        define_step_stats(function, input_name="value", output_name=step)(event)
        for episode, function_ in EPISODE.items():
            define_episode_stats(function_, input_name=step, output_name=f"{step} {episode}")(event)
    for step, episode, epoch in combinations():
        names = f"{step} {episode}", f"{step} {episode} {epoch}"
        define_epoch_stats(EPOCH[epoch], input_name=names[0], output_name=names[1])(event)
    return event


class SparseEvents(ABC):
    @with_every_statistic
    def happened(self, value):
        """Now and then."""

    @with_every_statistic
    @define_stats_grouping("name")
    def named(self, name, value):
        """Of a few kinds, which are not known beforehand."""


def expected(episodes: list[list[list[int]]], combination: tuple[str, str, str]) -> Any:
    """The documented formula; `None` where there is nothing to calculate.

    :param episodes: For each step the values of the events of one group.
    """
    step, episode, epoch = combination
    counts = step in ("len", "sum")
    values = []
    for steps in episodes:
        of_steps = [STEP[step](fired) if fired else 0 for fired in steps if fired or counts]
        n_occurred = sum(map(bool, steps))
        if episode == "len":
            value = n_occurred
        elif episode == "sum":
            value = sum(of_steps)
        elif of_steps:
            value = EPISODE[episode](of_steps)
        else:
            continue
        if epoch != "len" or n_occurred:
            values.append(value)
    return EPOCH[epoch](values) if values else None


def comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else round(float(value), 9)


def assert_documented(stats: dict[LogStatsKey, Any], episodes: list[list[list[int]]]) -> None:
    """Checks all statistics; the value of an event is its group as well."""
    groups = sorted({value for steps in episodes for fired in steps for value in fired})
    cases: list[tuple[Any, Any, Any]] = [(SparseEvents.happened, None, episodes)]
    for group in groups:
        of_group = [[[value for value in fired if value == group] for fired in steps] for steps in episodes]
        cases.append((SparseEvents.named, (group,), of_group))
    for event, group, played in cases if groups else ():
        for combination in combinations():
            key = LogStatsKey(event, " ".join(combination), group)
            wanted = expected(played, combination)
            assert (wanted is None) == (key not in stats), key
            if wanted is not None:
                assert comparable(stats[key]) == comparable(wanted), key
    counted = {key.output_name for key in stats if key.event is SparseEvents.happened}
    assert bool(counted) == bool(groups)


episodes_strategy = st.lists(
    st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=1, max_size=4), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), episodes=episodes_strategy)
def test_epoch_statistics_equal_the_documented_formula_for_any_spread(data, episodes):
    n_envs = data.draw(st.integers(1, len(episodes)), label="environments")
    env_of = data.draw(st.lists(st.integers(0, n_envs - 1), min_size=len(episodes), max_size=len(episodes)))
    epoch = LogStatsAggregator(LogStatsLevel.EPOCH)
    levels = []
    for _ in range(n_envs):
        episode = LogStatsAggregator(LogStatsLevel.EPISODE, epoch)
        levels.append((LogStatsAggregator(LogStatsLevel.STEP, episode), episode))
    for env, steps in zip(env_of, episodes, strict=True):
        step, episode = levels[env]
        topic = step.create_event_topic(SparseEvents)
        rewards = episode.input_values(BaseEnvEvents.reward)
        for fired in steps:
            for value in fired:
                topic.happened(value)
                topic.named(str(value), value)
            if fired:  # what an environment's statistics do
                step.reduce()
            rewards.append(1.0)
        episode.reduce(n_periods=len(steps))
    stats = {
        key._replace(group=(int(key.group[0]),)) if key.event is SparseEvents.named else key: value
        for key, value in epoch.reduce().items()
    }
    assert_documented(stats, episodes)


class SparseCoreEnv(ToyCoreEnv):
    """Plays given episodes and then one that does not end; or, without any, one that its seed decides."""

    def __init__(self, episodes: Any) -> None:
        super().__init__()
        self.pubsub = Pubsub(self.context.event_service)
        self.topic = self.pubsub.create_event_topic(SparseEvents)
        self.episodes = episodes
        self.n_resets = 0

    def reset(self):
        self.time = 0
        if self.episodes is None:
            length = int(self.rng.integers(1, 5))
            occurs = self.rng.random() < 0.5
            self.steps = [[1] if occurs and self.rng.random() < 0.5 else [] for _ in range(length)]
        else:
            is_last = self.n_resets >= len(self.episodes)
            self.steps = [[]] * 10**6 if is_last else self.episodes[self.n_resets]
        self.n_resets += 1
        return self.get_maze_state()

    def step(self, maze_action):
        for value in self.steps[self.time]:
            self.topic.happened(value)
            self.topic.named(value, value)
        self.time += 1
        return self.get_maze_state(), 1.0, self.time == len(self.steps), {}

    def get_maze_state(self):
        return {"time": [self.time]}


def sparse_env(episodes: Any = None) -> MazeEnv[Any]:
    return MazeEnv(
        SparseCoreEnv(episodes),
        action_conversion_dict={0: PassOn(spaces.Dict({"move": spaces.Discrete(2)}))},
        observation_conversion_dict={0: Observe(spaces.Dict({"time": spaces.Box(0, 100, (1,), np.float32)}))},
    )


EPISODES = [[[], [2]], [[], [], []], [[1, 3], [], []], [[]], [[], [], [], []], [[1], [1]]]


@pytest.mark.parametrize(
    ("vector_env", "n_envs"),
    [
        *((SequentialVectorEnv, n_envs) for n_envs in (1, 2, 3, 6)),
        *((partial(SubprocVectorEnv, n_workers=2), n_envs) for n_envs in (1, 3)),
    ],
)
def test_vector_environments_give_the_documented_statistics_for_any_spread(vector_env, n_envs):
    envs = vector_env([partial(sparse_env, EPISODES[index::n_envs]) for index in range(n_envs)])
    try:
        envs.reset()
        for _ in range(sum(map(len, EPISODES))):
            envs.step({"move": np.zeros(n_envs, int)})
        stats = envs.get_stats(LogStatsLevel.EPOCH).reduce()
    finally:
        envs.close()
    assert stats[LogStatsKey(BaseEnvEvents.reward, "episode_count", None)] == len(EPISODES)
    assert_documented(stats, EPISODES)


def test_rollouts_give_the_same_statistics_in_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nothing_recorded: Any = {"record_trajectory": False, "record_event_logs": False}
    outcomes = []
    for n_processes in (0, 1, 3):
        if n_processes == 0:
            runner: Any = SequentialRolloutRunner(8, 10, render=False, **nothing_recorded)
        else:
            runner = ParallelRolloutRunner(8, 10, n_processes=n_processes, **nothing_recorded)
        runner.maze_seeding = MazeSeeding(3, 4, False)
        runner.run_with(env=sparse_env, wrappers={}, agent={"_target_": "maze.core.agent.random_policy.RandomPolicy"})
        outcomes.append(
            {key: comparable(value) for key, value in runner.stats.items() if key.event is SparseEvents.happened}
        )
    assert outcomes[0]
    assert outcomes[0] == outcomes[1] == outcomes[2]
