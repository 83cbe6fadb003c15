"""A simulation written for many takes the course that as many single environments of the same problem take."""

from __future__ import annotations

from abc import ABC
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from maze.api.run_context import RunContext
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.batched_core_env import BatchedCoreEnv, RowGenerators
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.env.space_values import zeros
from maze.core.errors import ConfigError, EnvironmentContractError, EnvironmentFailedError
from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_stats_grouping,
    define_step_stats,
)
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsKey, LogStatsLevel
from maze.core.utils.config_utils import EnvFactory
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.random_reset_wrapper import RandomResetWrapper
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.train.parallelization.placement import Batched
from maze.train.parallelization.vector_env.batched_stats import BatchedEpisodeStats
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.utils.check_env import check_env


class StockEvents(ABC):
    @define_epoch_stats(np.mean, input_name="all", output_name="mean_all")
    @define_epoch_stats(np.mean, input_name="mean", output_name="mean_of_means")
    @define_episode_stats(sum, output_name="all")
    @define_episode_stats(np.mean, output_name="mean")
    @define_step_stats(sum)
    def lost(self, value: float) -> None:
        """Demand that was not met."""

    @define_epoch_stats(np.max, output_name="max")
    @define_episode_stats(len)
    @define_step_stats(lambda values: values[0] * 2)
    @define_stats_grouping("kind")
    def big_order(self, kind: str, amount: int) -> None:
        """An order of three or more."""


class Stock(BatchedCoreEnv):
    """Orders in two sub-steps, an urgent one and another; ends when nothing is left."""

    row_arrays = ("stock", "urgent", "lost", "elapsed")
    event_interfaces = (StockEvents,)

    def __init__(self, n_envs: int, max_episode_steps: int = 30, breaks_off: bool = False) -> None:
        seen = spaces.Dict(stock=spaces.Box(-np.inf, np.inf, (2,), np.float32))
        super().__init__(
            n_envs,
            {
                "urgent": spaces.Dict(rush=spaces.Discrete(3)),
                "normal": spaces.Dict(amount=spaces.Discrete(5), part=spaces.Box(0, 1, (1,), np.float32)),
            },
            {"urgent": seen, "normal": spaces.Dict(**seen.spaces, urgent=spaces.Discrete(3))},
            max_episode_steps,
        )
        self.stock = np.zeros(n_envs)
        self.urgent = np.zeros(n_envs, np.int64)
        self.lost = np.zeros(n_envs)
        self.breaks_off = breaks_off

    def reset_rows(self, rows: np.ndarray) -> None:
        self.stock[rows] = 3 + np.floor(3 * self.random.uniform(rows))
        self.lost[rows] = 0

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray]:
        over = np.zeros(self.n_envs, np.bool_)
        if self.step_keys[self.substep] == "urgent":
            self.urgent[:] = actions["rush"]
            return -2.0 * self.urgent, ~over if self.breaks_off else over
        draws = self.random.uniform(count=2)
        self.stock += self.urgent + actions["amount"] * actions["part"][:, 0] - np.floor(draws[:, 0] * 5)
        missing = np.maximum(0, -self.stock)
        self.lost += missing
        self.fire(StockEvents.lost, missing > 0, value=missing)
        self.fire(StockEvents.big_order, actions["amount"] >= 3, kind="normal", amount=actions["amount"])
        return -missing - 0.1 * self.stock, draws[:, 1] > 0.95

    def observe(self, out: Any) -> None:
        out["stock"][:, 0] = self.stock
        out["stock"][:, 1] = self.elapsed
        if "urgent" in out:
            out["urgent"][:] = self.urgent

    def kpis(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"lost": self.lost[rows]}


class StockEnv(BatchedMazeEnv):
    def __init__(self, max_episode_steps: int = 30) -> None:
        super().__init__(partial(Stock, max_episode_steps=max_episode_steps))


def not_batched() -> Any:
    return GymMazeEnv("MountainCar-v0")


def drawn(env: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    n = env.n_envs
    if env.actor_ids()[0].step_key == "urgent":
        return {"rush": rng.integers(0, 3, n)}
    return {"amount": rng.integers(0, 5, n), "part": rng.random((n, 1), np.float32)}


def course(env: Any, n_ticks: int, rng: np.random.Generator, observations: Any = None) -> list[Any]:
    """Everything that can be seen of some ticks."""
    seen: list[Any] = []
    out = zeros(env.observation_spaces_dict, (env.n_envs,), "observation")
    for _ in range(n_ticks):
        env.step(drawn(env, rng), out)
        step_key = env.actor_ids()[0].step_key
        seen.append(
            {
                "observations": {key: array.tolist() for key, array in out[step_key].items()},
                "flags": [env.rewards.tolist(), env.terminated.tolist(), env.truncated.tolist()],
                "complete": env.step_complete.tolist(),
                "finals": {
                    row: (final.actor_id, {key: array.tolist() for key, array in final.observation.items()})
                    for row, final in env.final_observations.items()
                },
                "episodes": dict(env.finished_episodes),
                "time": env.get_env_time().tolist(),
            }
        )
    return seen


@pytest.mark.parametrize("keeps_terminal", [False, True])
def test_batched_environments_reproduce_single_environments(keeps_terminal):
    courses = []
    for env in (SequentialVectorEnv([StockEnv] * 4), BatchedVectorEnv(Stock(4))):
        env.keep_terminal_observations = keeps_terminal
        env.seed([7, 8, 9, 10])
        first = env.reset()
        seen = course(env, 1150, np.random.default_rng(0))  # environments are seeded anew after 1,000 ticks
        env.reset()
        seen += course(env, 50, np.random.default_rng(1))
        courses.append((first["stock"].tolist(), seen, env.epoch_stats.reduce()))
    assert courses[0] == courses[1]
    assert any(tick["flags"][2] != [False] * 4 for tick in courses[0][1])
    assert any(tick["finals"] for tick in courses[0][1])


def test_sums_of_episodes_are_added_in_order():
    """Numbers whose sum depends on the order in which they are added."""
    n_envs, n_ticks = 3, 400
    rewards = np.random.default_rng(0).standard_normal((n_ticks, n_envs)) * 10.0 ** np.arange(-4, 5, 3)
    finished = []
    stats = BatchedEpisodeStats(n_envs)
    begun, expected = [0] * n_envs, []
    for tick in range(n_ticks):
        stats.add(BaseEnvEvents.reward, None, None, rewards[tick])
        stats.complete_step()
        over = (tick + np.arange(n_envs)) % 7 == 6
        if over.any():
            stats.end(over.nonzero()[0])
            finished.append(stats.finished())
            for row in np.flatnonzero(over).tolist():
                expected.append(sum(rewards[begun[row] : tick + 1, row].tolist()))
                begun[row] = tick + 1
    stats.deliver(receiver := LogStatsAggregator(LogStatsLevel.EPOCH))
    (rewards_received,) = (row["inputs"]["sum"] for row in receiver.state()["rows"] if "sum" in row["inputs"])
    assert rewards_received == expected
    key = LogStatsKey(BaseEnvEvents.reward, "sum", None)
    assert [row[key] for episodes in finished for row in episodes.values()] == expected


@pytest.mark.parametrize("restored_at", [None, 700, 2600])
def test_values_of_episodes_of_thousands_of_steps_are_kept(restored_at):
    """One long episode among short ones, with an event that rarely occurs; optionally restored from its rows."""
    n_envs, n_ticks, rng = 3, 3000, np.random.default_rng(2)
    rewards, occurs = rng.integers(-9, 9, (n_ticks, n_envs)).astype(float), rng.random((n_ticks, n_envs)) < 0.01
    stats, begun, found, expected = BatchedEpisodeStats(n_envs), [0] * n_envs, [], []
    for tick in range(n_ticks):
        if tick == restored_at:
            stored, stats = stats, BatchedEpisodeStats(n_envs)
            for row in range(n_envs):
                stats.load_row_state(row, stored.row_state(row))
        stats.add(BaseEnvEvents.reward, None, None, rewards[tick])
        stats.fire(BaseEnvEvents.kpi, occurs[tick], {"name": "rare", "value": rewards[tick]})
        stats.complete_step()
        ended = [row for row in range(n_envs) if tick == n_ticks - 1 or (row and tick % (100 * row + 7) == 5)]
        if ended:
            stats.end(np.array(ended))
            found += [stats.finished()[row] for row in ended]
            for row in ended:
                taken = slice(begun[row], tick + 1)
                expected.append((rewards[taken, row], rewards[taken, row][occurs[taken, row]]))
                begun[row] = tick + 1
    assert len(found) == len(expected) > 40
    total, length = (LogStatsKey(BaseEnvEvents.reward, name, None) for name in ("sum", "count"))
    rare = LogStatsKey(BaseEnvEvents.kpi, None, ("rare",))
    for episode, (of_reward, of_rare) in zip(found, expected, strict=True):
        assert (episode[total], episode[length]) == (of_reward.sum(), len(of_reward))
        assert episode.get(rare) == (of_rare[-1] if len(of_rare) else None)


def test_rows_do_not_depend_on_how_many_there_are():
    alone, among = BatchedVectorEnv(Stock(1)), BatchedVectorEnv(Stock(5))
    alone.seed([3])
    among.seed([1, 2, 3, 4, 5])
    np.testing.assert_array_equal(alone.reset()["stock"][0], among.reset()["stock"][2])
    for step_key in ["urgent", "normal"] * 200:
        action = {"rush": [1]} if step_key == "urgent" else {"amount": [2], "part": [[0.5]]}
        one = alone.step({key: np.array(value) for key, value in action.items()})
        five = among.step({key: np.array(value * 5) for key, value in action.items()})
        np.testing.assert_array_equal(one[0]["stock"][0], five[0]["stock"][2])
        assert alone.finished_episodes.get(0) == among.finished_episodes.get(2)


@pytest.mark.parametrize("n_ticks", [0, 31, 1150])
def test_a_state_is_continued_exactly(n_ticks):
    original = BatchedVectorEnv(Stock(3))
    original.seed([1, 2, 3])
    original.reset()
    course(original, n_ticks, np.random.default_rng(0))
    state = original.state_dict()
    other = BatchedVectorEnv(Stock(3))
    other.seed([11, 12, 13])
    other.reset()
    course(other, 5, np.random.default_rng(4))
    assert other.load_state_dict(state) == {}
    other.reset()
    assert course(other, 300, np.random.default_rng(5)) == course(original, 300, np.random.default_rng(5))


@pytest.mark.parametrize("make", [lambda: BatchedVectorEnv(Stock(2)), lambda: SequentialVectorEnv([StockEnv] * 2)])
def test_seeding_replaces_a_restored_state(make):
    restored, fresh = make(), make()
    restored.seed([1, 2])
    restored.reset()
    course(restored, 7, np.random.default_rng(0))
    restored.load_state_dict(restored.state_dict())
    for env in (restored, fresh):
        env.seed([3, 4])
        env.reset()
    assert course(restored, 30, np.random.default_rng(5)) == course(fresh, 30, np.random.default_rng(5))


def test_without_running_episodes_the_next_ones_are_those_after_a_reset():
    original, other = BatchedVectorEnv(Stock(3)), BatchedVectorEnv(Stock(3))
    original.seed([1, 2, 3])
    original.reset()
    course(original, 77, np.random.default_rng(0))
    other.load_state_dict(original.state_dict(with_running=False))
    original.reset()
    other.reset()
    assert course(other, 200, np.random.default_rng(5)) == course(original, 200, np.random.default_rng(5))


def test_state_of_single_environments_starts_new_episodes_with_a_warning():
    single, batched = SequentialVectorEnv([StockEnv] * 2), BatchedVectorEnv(Stock(2))
    for env in (single, batched):
        env.seed([1, 2])
        env.reset()
        course(env, 6, np.random.default_rng(0))
    of_single, of_batched = single.state_dict(), batched.state_dict()
    assert batched.load_state_dict(of_single) == dict.fromkeys(range(2), "it was not in a vectorised simulation")
    assert single.load_state_dict(of_batched) == dict.fromkeys(range(2), "it was in a vectorised simulation")


def test_streams_depend_on_seed_and_position_alone():
    streams, other = RowGenerators(3), RowGenerators(1)
    for row in range(3):
        streams.seed(row, row - 1)
    other.seed(0, 1)
    rows = np.array([2])
    for count in [1, 3, 512, 7, 1, 300, 300]:
        streams.uniform(np.array([0]), count)
        np.testing.assert_array_equal(streams.uniform(rows, count), other.uniform(count=count))
    state = streams.state(2)
    expected = streams.uniform(rows, 20)
    other.load_state(0, state)
    np.testing.assert_array_equal(other.uniform(count=20), expected)
    assert ((expected >= 0) & (expected < 1)).all()


def test_one_environment_of_a_batch_behaves_like_a_single_environment():
    env = StockEnv()
    assert check_env(env).findings == []
    env.seed(1)
    env.reset()
    clone = StockEnv()
    clone.reset()
    env.step({"rush": 1})
    clone.clone_from(env)
    for _ in range(3):
        for action in ({"amount": 2, "part": np.ones(1, np.float32)}, {"rush": 1}):
            one, other = env.step(action), clone.step(action)
            np.testing.assert_array_equal(one[0]["stock"], other[0]["stock"])
            assert one[1:] == other[1:]


def test_actions_outside_their_space_are_refused_and_boxes_clipped():
    env = BatchedVectorEnv(Stock(2))
    with pytest.raises(EnvironmentContractError, match="`reset` has to be called"):
        env.step({"rush": np.zeros(2)})
    env.seed([1, 2])
    env.reset()
    with pytest.raises(
        EnvironmentContractError, match=r"environment 1: action `rush` of sub-step 'urgent': .* found 3"
    ):
        env.step({"rush": np.array([0, 3])})
    with pytest.raises(EnvironmentContractError, match=r"expected the shape \(2,\)"):
        env.step({"rush": np.array([0, 1, 1])})
    with pytest.raises(EnvironmentContractError, match="expected an integer as the seed"):
        env.seed(["a", 1])
    env.step({"rush": np.array([0, 0])})
    before = env.simulation.stock.copy()
    env.step({"amount": np.array([4, 4]), "part": np.full((2, 1), 9.0)})
    assert (env.simulation.stock <= before + 4).all()


@pytest.mark.parametrize(("method", "call"), [("observe", "reset"), ("step", "step")])
def test_exceptions_name_the_simulation(method, call, monkeypatch):
    env = BatchedVectorEnv(Stock(3))
    env.seed([1, 2, 3])
    if call == "step":
        env.reset()

    def divide(*_):
        raise ZeroDivisionError("no capacity")

    monkeypatch.setattr(env.simulation, method, divide)
    message = rf"Stock \(3 environments\), sub-step '?\w+'?: `{call}` raised ZeroDivisionError: no capacity"
    with pytest.raises(EnvironmentFailedError, match=message):
        env.reset() if call == "reset" else env.step({"rush": np.zeros(3)})


def test_an_episode_that_ends_in_mid_step_is_an_error():
    env = BatchedVectorEnv(Stock(2, breaks_off=True))
    env.seed([1, 2])
    env.reset()
    with pytest.raises(EnvironmentContractError, match="ended with the sub-step 'urgent'"):
        env.step({"rush": np.zeros(2)})


@pytest.mark.parametrize(
    ("env", "wrappers", "message"),
    [
        (not_batched, None, "vectorised simulation .* found .*MountainCar"),
        (StockEnv, {RandomResetWrapper: {"min_skip_steps": 1, "max_skip_steps": 2}}, "found RandomResetWrapper"),
        (
            StockEnv,
            {RewardScalingWrapper: {"scale": 2.0}, TimeLimitWrapper: {"max_episode_steps": 5}},
            "found TimeLimitWrapper, RewardScalingWrapper",
        ),
    ],
)
def test_environments_that_cannot_be_batched_are_named(env, wrappers, message):
    config = {f"{cls.__module__}.{cls.__name__}": arguments for cls, arguments in (wrappers or {}).items()}
    with pytest.raises(ConfigError, match=message):
        Batched().vector_env(EnvFactory(env, config), 2)


def trained(placement: str) -> tuple[Any, dict[str, Any]]:
    with RunContext(
        env=StockEnv,
        algorithm="ppo",
        silent=True,
        overrides={
            "runner.placement": placement,
            "runner.concurrency": 4,
            "algorithm.epoch_length": 1,
            "algorithm.n_rollout_steps": 20,
            "algorithm.batch_size": 40,
            "algorithm.rollout_evaluator.n_episodes": 4,
            "seeding.env_base_seed": 5,
            "seeding.agent_base_seed": 6,
        },
    ) as rc:
        result = rc.train(n_epochs=2)
        return result.best_score, {
            name: value.numpy() for name, value in rc.policy.networks["normal"].state_dict().items()
        }


@pytest.mark.slow
def test_batched_training_gives_the_weights_of_sequential_training():
    (one_score, one), (many_score, many) = trained("in_process"), trained("batched")
    assert one_score == many_score
    for name in one:
        np.testing.assert_array_equal(one[name], many[name])
