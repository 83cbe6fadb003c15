"""Branches: copies with new futures, in arrays and in single environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maze.core.env.batched_core_env import RowGenerators
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.planning.branches import ArrayBranches, Branches, SingleBranches, SingleState, simulation_of
from maze_envs.inventory.dual_sourcing import DualIndexPolicy, DualSourcingEnv
from maze_envs.inventory.lost_sales import BaseStockPolicy, LostSalesEnv
from maze_envs.memory.recall import Recall, RecallEnv
from maze_envs.packing.bin_packing import BinPackingEnv
from maze_envs.queueing.network import PriorityPolicy, QueueingEnv
from maze_envs.scheduling.job_shop import JobShopEnv

BATCHED = [LostSalesEnv, DualSourcingEnv, QueueingEnv, BinPackingEnv, JobShopEnv, RecallEnv]


def begun(make: Any, seed: int = 3, n_steps: int = 4) -> tuple[Any, Any, np.random.Generator]:
    """An environment in mid-episode, with what it observes."""
    env = make()
    env.seed(seed)
    observation = env.reset()
    rng = np.random.default_rng(0)
    for _ in range(n_steps):
        observation = env.step(allowed(env, observation, rng))[0]
    return env, observation, rng


def allowed(env: Any, observation: Any, rng: np.random.Generator, step_key: Any = None) -> dict[str, Any]:
    """An action that masks allow."""
    action = {}
    space = env.action_space if step_key is None else env.action_spaces_dict[step_key]
    for head, choice in space.spaces.items():
        mask = observation.get(f"{head}_mask")
        choices = np.arange(choice.n) if mask is None else np.flatnonzero(mask)
        action[head] = int(choices[rng.integers(len(choices))])
    return action


def test_rows_of_a_scenario_use_common_random_numbers_in_every_step() -> None:
    streams = RowGenerators(4)
    streams.new_futures(np.arange(4), np.array([0, 0, 1, 1]), seed=5)
    streams.uniform(np.array([1]), 3)  # one draws more than its sibling
    streams.begin_step()
    numbers = streams.uniform(count=20)
    np.testing.assert_array_equal(numbers[::2], numbers[1::2])
    assert not np.isin(numbers[0], numbers[2]).any()
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_scenarios_are_independent_and_uniform() -> None:
    streams = RowGenerators(2000)
    streams.new_futures(slice(0, 2000), np.arange(2000), seed=1)
    numbers = streams.uniform(count=50)
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.01


def test_a_planning_scenario_differs_from_the_future_of_an_environment_with_the_same_seed() -> None:
    streams, other = RowGenerators(1), RowGenerators(1)
    streams.seed(0, 7)
    other.new_futures(np.arange(1), 0, seed=7)
    assert not np.isin(streams.uniform(count=100), other.uniform(count=100)).any()


def test_streams_of_scenarios_are_saved_and_ended_by_a_seed() -> None:
    streams, other = RowGenerators(2), RowGenerators(1)
    streams.seed(0, 1)
    streams.seed(1, 1)
    streams.new_futures(np.array([1]), 3, seed=9)
    streams.uniform(count=5)
    other.load_state(0, streams.state(1))
    np.testing.assert_array_equal(other.uniform(count=9)[0], streams.uniform(count=9)[1])
    streams.seed(0, 4)
    streams.seed(1, 4)
    np.testing.assert_array_equal(*streams.uniform(count=9))


@pytest.mark.parametrize("make", BATCHED)
def test_copied_rows_continue_as_their_originals(make: Any) -> None:
    env, observation, rng = begun(make)
    copies = env.batch(3)
    copies.copy_rows(env.core_env.simulation, np.zeros(2, np.int64), np.array([2, 0]))
    for _ in range(3):
        action = allowed(env, observation, rng)
        rewards = copies.advance({key: np.full(3, value) for key, value in action.items()})[0]
        observation, reward, _, _ = env.step(action)
        np.testing.assert_allclose(rewards[[0, 2]], reward)


@pytest.mark.parametrize("make", BATCHED)
def test_equal_actions_in_a_scenario_have_equal_returns(make: Any) -> None:
    env, observation, rng = begun(make)
    arrays: Branches = ArrayBranches(env.batch)
    single: Branches = SingleBranches(env)
    scenarios = np.repeat(np.arange(4), 2)
    arrays.fork(env.core_env.simulation, np.zeros(8, np.int64), scenarios, seed=1)
    single.fork([SingleState(env, observation)], np.zeros(8, np.int64), scenarios, seed=1)
    for branches in (arrays, single):
        for _ in range(4):
            decisions = [
                (group, [allowed(env, group.single(0), rng, group.actor_id.step_key)] * len(group.rows))
                for group in branches.observe()
            ]
            branches.step(decisions)
        np.testing.assert_array_equal(branches.returns[::2], branches.returns[1::2])
        assert branches.n_decisions == 32


@pytest.mark.parametrize(
    ("make", "policy"),
    [(LostSalesEnv, BaseStockPolicy(20)), (DualSourcingEnv, DualIndexPolicy(4, 9)), (QueueingEnv, PriorityPolicy())],
)
def test_scenarios_differ_and_do_not_change_the_environment(make: Any, policy: Any) -> None:
    env, observation, _ = begun(make)
    before = env.core_env.simulation.row_state(0)
    for branches, source in (
        (ArrayBranches(env.batch, gamma=0.9), env.core_env.simulation),
        (SingleBranches(env, gamma=0.9), [SingleState(env, observation)]),
    ):
        branches.fork(source, np.zeros(40, np.int64), np.arange(40), seed=1)
        while groups := branches.observe(horizon=5):
            branches.step([(group, policy.compute_actions(group.stacked(), group.actor_id)) for group in groups])
        assert (branches.steps == 5).all()
        assert len(np.unique(branches.returns)) > 5
    after = env.core_env.simulation.row_state(0)
    assert before["random"] == after["random"]
    np.testing.assert_equal(before["arrays"], after["arrays"])


def test_branches_that_have_ended_keep_their_returns() -> None:
    env, observation, _ = begun(lambda: BinPackingEnv(n_items=7))
    for branches, source in (
        (ArrayBranches(env.batch), env.core_env.simulation),
        (SingleBranches(env), [SingleState(env, observation)]),
    ):
        branches.fork(source, np.zeros(3, np.int64), np.arange(3), seed=1)
        while groups := branches.observe():
            branches.step(
                [(group, {"level": np.full(len(group.rows), env.core_env.simulation.capacity)}) for group in groups]
            )
        assert branches.done.all()
        assert (branches.steps == 3).all()


def test_undisclosed_symbols_are_sampled_again() -> None:
    simulation = Recall(50, n_items=5, n_symbols=9)
    for row in range(50):
        simulation.seed_row(row, 1)
    simulation.begin(np.arange(50))
    shown = simulation.items[:, 0].copy()
    simulation.new_futures(slice(0, 50), np.arange(50), seed=2)
    np.testing.assert_array_equal(simulation.items[:, 0], shown)
    assert len(np.unique(simulation.items[:, 1:], axis=0)) > 40


@pytest.mark.parametrize(
    "wrap", [lambda env: env, lambda env: TimeLimitWrapper.wrap(LogStatsWrapper.wrap(env), max_episode_steps=50)]
)
def test_clones_have_the_same_future_or_a_new_one(wrap: Any) -> None:
    env = wrap(LostSalesEnv())
    env.seed(1)
    env.reset()
    env.step({"order": 3})
    courses = {}
    for future in ("same", "new"):
        copy = wrap(LostSalesEnv())
        copy.reset()
        copy.clone_from(env, future=future)
        courses[future] = [copy.step({"order": 5})[1] for _ in range(10)]
    expected = [env.step({"order": 5})[1] for _ in range(10)]
    assert courses["same"] == expected
    assert courses["new"] != expected
    with pytest.raises(ConfigError, match="must be 'same' or 'new', found 'other'"):
        copy.clone_from(env, future="other")


def test_gymnasium_environments_get_new_futures() -> None:
    env = GymMazeEnv("FrozenLake-v1")
    env.seed(1)
    env.reset()
    branches = SingleBranches(env)
    branches.fork([SingleState(env, env.reset())], np.zeros(60, np.int64), np.repeat(np.arange(30), 2), seed=1)
    for _ in range(4):
        branches.step([(group, {"action": np.full(len(group.rows), 2)}) for group in branches.observe()])
    np.testing.assert_array_equal(branches.done[::2], branches.done[1::2])
    assert 0 < branches.done.sum() < 60


def test_time_limits_are_supported_and_other_wrappers_are_refused() -> None:
    env: Any = LostSalesEnv()
    found = simulation_of(LogStatsWrapper.wrap(TimeLimitWrapper.wrap(env, max_episode_steps=50)))
    assert found is not None
    assert found[0] is env
    assert found[1] == 50
    from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper

    assert simulation_of(RewardScalingWrapper.wrap(env, scale=2.0)) is None


def test_vector_environments_of_gymnasium_cannot_be_copied_by_rows() -> None:
    import gymnasium

    from maze.core.wrappers.gym_vector_env import GymBatch

    batch = GymBatch(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"))
    batch.begin(np.arange(2))
    with pytest.raises(
        EnvironmentContractError, match=r"^CartPoleVectorEnv\(CartPole-v1, num_envs=2\) cannot be copied"
    ):
        batch.copy_rows(batch, np.arange(1), np.arange(1))
    with pytest.raises(
        EnvironmentContractError, match=r"^CartPoleVectorEnv\(CartPole-v1, num_envs=2\): .* cannot get new futures"
    ):
        batch.new_futures(np.arange(2), 0, 1)


@pytest.mark.parametrize("branches", [ArrayBranches(JobShopEnv().batch), SingleBranches(JobShopEnv())])
def test_episodes_are_begun_from_seeds_and_continued_by_others(branches: Branches) -> None:
    """Two begun episodes, taken over three times: what siblings do alike has equal returns, the earlier ones
    included."""
    other = type(branches)(JobShopEnv().batch) if isinstance(branches, ArrayBranches) else SingleBranches(JobShopEnv())
    branches.begin([5, 6])
    rng, env = np.random.default_rng(0), JobShopEnv()

    def step(each: Branches) -> None:
        for group in each.observe():
            chosen = [allowed(env, group.single(row), rng, group.actor_id.step_key) for row in range(2)]
            each.step([(group, [chosen[row % 2] for row in range(len(group.rows))])])

    env.seed(6)
    np.testing.assert_equal(dict(branches.observe()[0].single(1)), dict(env.reset()))
    for _ in range(5):
        step(branches)
    returns = branches.returns.copy()
    other.continue_from(branches, np.array([0, 1, 0, 1, 0, 1]))
    np.testing.assert_array_equal(other.returns, np.tile(returns, 3))
    step(other)
    np.testing.assert_array_equal(other.returns, np.tile(other.returns[:2], 3))
    assert (other.steps == 6).all()
