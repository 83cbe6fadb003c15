"""The rollout policy, and the planner that compares its candidates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import OmegaConf

from maze.api.run_context import RunContext
from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.utils.checkpoint import load_state
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.planning.planner import Planner, gains_by_horizon
from maze.planning.rollout_policy import PlanningEvents, RolloutPolicy, candidate_actions
from maze_envs.inventory.dual_sourcing import DualIndexPolicy, DualSourcingEnv
from maze_envs.inventory.lost_sales import BaseStockPolicy, LostSalesEnv
from maze_envs.logistics.dispatching.maze_env import dispatching_env
from maze_envs.packing.bin_packing import BinPackingEnv, PackingRule
from maze_envs.queueing.network import PriorityPolicy, QueueingEnv
from maze_envs.scheduling.job_shop import JobShopEnv
from tests.train.parallelization.toy_envs import Observe, PassOn, ToyCoreEnv


class Given:
    """Returns of candidates that are normally distributed around given means, with noise that they share."""

    def __init__(self, means: list[float], noise: float = 0.1, common: float = 10.0) -> None:
        self.means, self.noise, self.common = means, noise, common
        self.n_decisions = 0

    def __call__(self, source: Any, rows: Any, scenarios: Any, first: Any, seed: Any) -> np.ndarray:
        self.n_decisions += 5 * len(rows)
        returns = []
        for scenario, which in zip(scenarios, first.which, strict=True):
            action = first.actions[which]
            shared = np.random.default_rng((seed, scenario)).normal() * self.common
            own = np.random.default_rng((seed, scenario, action["a"])).normal() * self.noise
            returns.append(self.means[action["a"]] + shared + own)
        return np.array(returns)


def candidates(n: int) -> list[list[dict[str, int]]]:
    return [[{"a": index} for index in range(n)]]


def test_the_best_candidate_is_found_among_shared_noise() -> None:
    found = Planner(Given([0.0, -1.0, 0.2, 0.5, 0.45, -3.0]), 256).plan(None, candidates(6), seed=1)[0]
    assert found.chosen == 3
    assert found.low[3] > 0
    assert found.differences[3] == pytest.approx(0.5, abs=0.05)
    assert found.scenarios[5] < found.scenarios[3] <= 256  # the worse half is dropped


def test_the_action_of_the_base_is_kept_where_nothing_is_shown_to_be_better() -> None:
    kept = [Planner(Given([0.0] * 8, noise=1.0), 64).plan(None, candidates(8), seed)[0].chosen for seed in range(40)]
    assert sum(chosen == 0 for chosen in kept) >= 34
    assert Planner(Given([0.0, -1.0]), 64).plan(None, candidates(2), 1)[0].scenarios[1] == 16  # shown to be worse


def test_few_scenarios_do_not_replace_the_action_of_the_base() -> None:
    rare = Given([0.0, 0.5], noise=0.0, common=0.0)  # as long as no scenario differs, chance is not seen
    planner = Planner(rare, 10_000, decisions=20, length=5)
    found = planner.plan(None, candidates(2), 1)[0]
    assert 0 < found.scenarios[1] < 32
    assert found.chosen == 0


def test_without_chance_two_scenarios_are_enough() -> None:
    simulate = Given([0.0, 0.1, 0.2], noise=0.0, common=0.0)
    found = Planner(simulate, 128, chance=False).plan(None, candidates(3), 1)[0]
    assert found.chosen == 2
    assert found.scenarios.tolist() == [2, 2, 2]


def test_budgets_in_decisions_are_kept() -> None:
    simulate = Given([0.0, 0.01, 0.02], noise=1.0)
    planner = Planner(simulate, 10_000, decisions=2000, length=5)
    found = planner.plan(None, candidates(3), 1)[0]
    assert 1000 <= simulate.n_decisions <= 2000
    assert Planner(simulate, 100, decisions=5, length=5).plan(None, candidates(3), 1)[0].scenarios[0] == 0
    assert found.scenarios[0] > 100


def test_batches_of_states_have_the_values_of_single_states() -> None:
    simulate = Given([0.0, 0.3, -1.0])
    found = Planner(simulate, 64).plan(None, candidates(3) + candidates(2) + candidates(3), 1)
    alone = Planner(simulate, 64).plan(None, candidates(3), 1)[0]
    assert [one.chosen for one in (*found, alone)] == [1] * 4
    np.testing.assert_allclose(found[2].differences, alone.differences)


@pytest.mark.parametrize(
    ("short", "long", "gains"),
    [
        (1.0, -2.0, [-2.0, 0.0]),  # what looks better after few steps is worse in the end
        (-1.0, 3.0, [0.0, 3.0]),  # only the long horizon finds what is better
        (0.5, 0.5, [0.5, 0.5]),
    ],
)
def test_gain_of_a_horizon_is_measured_up_to_the_last_one(short: float, long: float, gains: list[float]) -> None:
    of_base = np.array([[3.0, 1.0, 4.0, 1.0], [5.0, 9.0, 2.0, 6.0]])
    returns = np.stack([of_base, of_base + np.array([[short], [long]])], axis=1)
    assert gains_by_horizon(returns).tolist() == pytest.approx(gains)


def test_scenarios_that_choose_do_not_measure() -> None:
    noise = np.random.default_rng(1).normal(size=(500, 1, 8, 16))
    assert abs(np.mean([gains_by_horizon(each)[0] for each in noise])) < 0.05  # the best of eight is no better


def test_horizon_shorter_than_the_lead_time_gains_nothing() -> None:
    env = LostSalesEnv(lead_time=2, penalty=9.0, max_order=8, max_episode_steps=20, expected_costs=True)
    policy = RolloutPolicy(BaseStockPolicy(level=5, cap=8), scenarios=32)
    seeds = [(seed, seed) for seed in range(8)]
    gains = policy.gains(env, seeds, horizons=(1, 8), deadline=np.inf).mean(axis=0)
    assert gains[0] <= 0.0
    assert gains[1] > 1.0


def test_candidates_are_the_unmasked_actions_and_the_base_action_comes_first() -> None:
    space = spaces.Dict(a=spaces.Discrete(4), b=spaces.Discrete(2))
    seen = {"a_mask": np.array([1, 0, 1, 1]), "x": np.zeros(3)}
    rng = np.random.default_rng(0)
    found = candidate_actions({"a": 2, "b": 1}, space, seen, 64, rng, dict)
    assert len(found) == 6
    assert found[0] == {"a": 2, "b": 1}
    assert {action["a"] for action in found} == {0, 2, 3}
    assert len(candidate_actions({"a": 2, "b": 1}, space, seen, 4, rng, dict)) <= 4
    best = [{"a": 0, "b": 0}, {"a": 0, "b": 1}]
    ranked = candidate_actions({"a": 2, "b": 1}, space, seen, 4, rng, dict, lambda n: best[:n])
    assert ranked[:3] == [{"a": 2, "b": 1}, *best]
    continuous = spaces.Dict(force=spaces.Box(-1, 1, (2,), np.float32))
    drawn = candidate_actions(
        {"force": np.zeros(2)}, continuous, {}, 8, rng, lambda: {"force": rng.normal(size=2).clip(-1, 1)}
    )
    assert len(drawn) == 8


def test_candidates_of_vectors_of_choices_begin_with_their_starts() -> None:
    space = spaces.Dict(a=spaces.MultiDiscrete([2, 2], start=[5, -1]), b=spaces.MultiBinary(1))
    base = {"a": np.array([6, -1]), "b": np.array([1])}
    found = candidate_actions(base, space, {}, 64, np.random.default_rng(0), dict)
    chosen = [(*action["a"].tolist(), *action["b"].tolist()) for action in found]
    assert chosen[0] == (6, -1, 1)
    assert sorted(chosen) == list(itertools.product((5, 6), (-1, 0), (0, 1)))
    assert all(space.contains(dict(action)) for action in found[1:])
    seen = {"a_mask": np.array([0, 1, 1, 1]), "b_mask": np.array([0])}
    found = candidate_actions(
        {"a": np.array([6, 0]), "b": np.array([0])}, space, seen, 64, np.random.default_rng(0), dict
    )
    assert [(*action["a"].tolist(), *action["b"].tolist()) for action in found] == [(6, 0, 0), (6, -1, 0)]


def played(env: Any, policy: Policy, n_steps: int, seed: int = 1) -> float:
    env.seed(seed)
    policy.seed(seed)
    observation, total = env.reset(), 0.0
    for _ in range(n_steps):
        action = policy.compute_action(observation, env.get_maze_state(), env, env.actor_id(), deterministic=True)
        observation, reward, done, _ = env.step(action)
        total += reward
        if done:
            break
    return total


@pytest.mark.parametrize(
    ("make", "base", "n_steps"),
    [
        (lambda: LostSalesEnv(lead_time=2, penalty=9.0), BaseStockPolicy(12), 60),
        (DualSourcingEnv, DualIndexPolicy(1, 5), 60),
        (lambda: QueueingEnv("I.H."), PriorityPolicy("I.H.", "last_buffer_first"), 60),
    ],
)
def test_a_poor_base_policy_is_improved(make: Any, base: Policy, n_steps: int) -> None:
    policy = RolloutPolicy(base, horizon=8, scenarios=32)
    before = sum(played(make(), base, n_steps, seed) for seed in range(2))
    assert sum(played(make(), policy, n_steps, seed) for seed in range(2)) >= before


def test_a_base_policy_may_need_the_state() -> None:
    make = lambda: BinPackingEnv(n_items=12)  # noqa: E731
    policy = RolloutPolicy(PackingRule("first_fit"), horizon=6, scenarios=16)
    assert played(make(), policy, 12) >= played(make(), PackingRule("first_fit"), 12) - 1.0
    assert policy.n_simulated > 500


def test_planning_beats_the_heuristic_on_a_deterministic_problem() -> None:
    base = RandomPolicy(JobShopEnv(n_jobs=4, n_machines=4).action_spaces_dict)
    policy = RolloutPolicy(base, horizon=None)
    assert played(JobShopEnv(n_jobs=4, n_machines=4), policy, 100) > played(
        JobShopEnv(n_jobs=4, n_machines=4), base, 100
    )


@pytest.mark.parametrize(
    "wrap", [lambda env: env, lambda env: LogStatsWrapper.wrap(TimeLimitWrapper.wrap(env, max_episode_steps=30))]
)
def test_planned_actions_are_independent_of_the_true_future(wrap: Any) -> None:
    decisions = []
    for future in (1, 2):
        env = wrap(LostSalesEnv())
        env.seed(3)
        observation = env.reset()
        env.new_future(future)
        policy = RolloutPolicy(BaseStockPolicy(18), horizon=6, scenarios=64)
        policy.seed(5)
        decisions.append(policy.plan(observation, env))
    np.testing.assert_array_equal(decisions[0].differences, decisions[1].differences)
    assert decisions[0].action == decisions[1].action


def test_nothing_comes_after_a_time_limit() -> None:
    env = TimeLimitWrapper.wrap(LostSalesEnv(), max_episode_steps=3)
    env.seed(3)
    observation = env.reset()
    found = []
    for horizon, value in ((3, None), (3, after_the_end), (10, after_the_end)):
        policy = RolloutPolicy(BaseStockPolicy(18), horizon=horizon, scenarios=16, value=value)
        policy.seed(1)
        found.append(policy.plan(observation, env).values)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    seeds = [(episode, episode) for episode in range(5)]
    gains = RolloutPolicy(BaseStockPolicy(12), scenarios=16).gains(env, seeds, (3, 5, 20), deadline=np.inf)
    assert len(gains) > 1
    np.testing.assert_array_equal(gains[:, 0], gains[:, 1])
    np.testing.assert_array_equal(gains[:, 0], gains[:, 2])


def test_the_critic_of_the_base_estimates_the_return_after_the_horizon(tmp_path: Path) -> None:
    run, settings = tmp_path / "run", {"algorithm.epoch_length": 1, "runner.concurrency": 2}
    rc = RunContext(env="CartPole-v1", algorithm="a2c", run_dir=run, overrides=settings, silent=True)
    rc.train(n_epochs=1)
    weights = load_state(run / "state_dict.pt")
    rc.runner.trainer.model.load_state_dict(weights)
    env = GymMazeEnv("CartPole-v1")
    env.seed(1)
    observation, expected = env.reset(), []
    for action in (0, 1):
        copy = GymMazeEnv("CartPole-v1")
        copy.clone_from(env)
        following = copy.step({"action": action})[0]
        value = rc.runner.trainer.model.critic.predict_value(following, 0)
        expected.append(1.0 + 0.9 * value.item())

    base = {
        "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
        "model": OmegaConf.to_container(OmegaConf.load(run / "hydra_config.yaml").model, resolve=True),
        "state_dict_file": str(run / "state_dict.pt"),
        "spaces_dict_file": str(run / "spaces_config.pkl"),
        "device": "cpu",
    }
    policy = RolloutPolicy(base, horizon=1, scenarios=1, gamma=0.9, value="critic")
    actions, values = policy.compute_top_action_candidates(observation, None, None, env, ActorID(0, 0))
    found = {int(action["action"]): value for action, value in zip(actions, values, strict=True)}
    assert [found[0], found[1]] == pytest.approx(expected, rel=1e-5)
    (best,), (highest,) = policy.compute_top_action_candidates(observation, 1, None, env, ActorID(0, 0))
    assert highest == max(values)
    assert found[int(best["action"])] == highest


def after_the_end(observation: Any, actor: ActorID) -> np.ndarray:
    return 1000.0 + np.arange(len(next(iter(observation.values()))))


def test_planning_is_the_same_through_single_environments_and_processes() -> None:
    class Alone(BaseStockPolicy):
        def needs_env(self) -> bool:
            return True

    found = []
    for base, n_processes in ((BaseStockPolicy(18), 1), (Alone(18), 1), (Alone(18), 2)):
        env = LostSalesEnv(max_episode_steps=40)
        env.seed(3)
        observation = env.reset()
        policy = RolloutPolicy(base, horizon=4, scenarios=16, n_processes=n_processes)
        policy.seed(1)
        found.append(policy.plan(observation, env))
        policy.close()
    np.testing.assert_allclose(found[1].differences, found[2].differences)
    assert len(found[0].actions) == len(found[1].actions) == 21


def test_several_agents_and_continuous_actions_are_planned_in_copies_of_single_environments() -> None:
    vehicles = dispatching_env()
    agents = RolloutPolicy(RandomPolicy(vehicles.action_spaces_dict), horizon=2, scenarios=8, candidates=4)
    vehicles.seed(1)
    agents.seed(1)
    observation = vehicles.reset()
    for _ in range(3):
        found = agents.plan(observation, vehicles)
        assert 1 <= len(found.actions) <= 4
        observation = vehicles.step(found.action)[0]
    pendulum = GymMazeEnv("Pendulum-v1")
    pendulum.seed(1)
    observation = pendulum.reset()
    continuous = RolloutPolicy(RandomPolicy(pendulum.action_spaces_dict), horizon=4, candidates=5)
    continuous.seed(1)
    values = continuous.plan(observation, pendulum)
    assert len(values.actions) == 5
    assert len({float(action["action"][0]) for action in values.actions}) == 5


def test_events_report_cost_and_gain_of_planning() -> None:
    env: Any = LogStatsWrapper.wrap(LostSalesEnv(max_episode_steps=5))
    policy = RolloutPolicy(BaseStockPolicy(12), horizon=8, scenarios=16)
    RolloutRunner.run_interaction_loop(env, policy, 1, episode_seeds=[(1, 1)])
    stats = {
        key.event.__name__: value
        for key, value in env.get_stats(LogStatsLevel.EPISODE).last_stats.items()
        if key.event.__qualname__.startswith(PlanningEvents.__name__)
    }
    assert stats["simulated_decisions"] > 5 * 22 * 8
    assert stats["gain"] > 0
    assert stats["seconds"] > 0


def test_a_deployment_plans_for_reported_states() -> None:
    env = LostSalesEnv(max_episode_steps=6)
    policy = RolloutPolicy(BaseStockPolicy(12), horizon=4, scenarios=16)
    system = LostSalesEnv(max_episode_steps=6).core_env
    system.seed(1)
    state, reward, done, info = system.reset(), 0.0, False, {}
    with AgentDeployment(policy, env, num_candidates=1, deterministic=True) as deployment:
        while not done:
            action = deployment.act(state, reward, done, info)
            state, reward, done, info = system.step(action)
        deployment.finish_episode(state, reward, done, info)
        assert deployment.n_episodes == 1


class Line(ToyCoreEnv):
    """Steps to the left or to the right; the distance from 0 is paid."""

    def reset(self) -> Any:
        self.position = 3
        return self.get_maze_state()

    def step(self, maze_action: Any) -> Any:
        self.position += int(maze_action["move"]) - 1
        return self.get_maze_state(), -float(abs(self.position)), False, {}

    def get_maze_state(self) -> Any:
        return {"position": [self.position]}

    def clone_from(self, env: Any) -> None:
        self.load_maze_state(env.get_maze_state(), env.actor)

    def load_maze_state(self, maze_state: Any, actor_id: ActorID) -> None:
        self.position, self.actor = maze_state["position"][0], actor_id


def test_a_real_system_is_planned_for_in_the_state_that_it_reports() -> None:
    seen = spaces.Dict(position=spaces.Box(-99, 99, (1,), np.float32))
    move = spaces.Dict(move=spaces.Discrete(3))

    class Rests(Policy):
        def compute_action(self, *arguments: Any, **options: Any) -> Any:
            return {"move": 1}

    def env() -> Any:
        return MazeEnv(Line(), {0: PassOn(move)}, {0: Observe(seen)})

    policy = RolloutPolicy(Rests(), horizon=4, scenarios=1)
    policy.seed(1)
    with AgentDeployment(policy, env()) as deployment:
        moves = [deployment.act({"position": [x]}, 0.0, False, {})["move"] for x in (5, -7, 0, 2)]
    assert [int(move) - 1 for move in moves] == [-1, 1, 0, -1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "soon"}, "a time such as 50ms"),
        ({"budget": 0}, "policy.budget"),
        ({"budget": 2.5}, "policy.budget: expected a whole number of at least 1, found 2.5"),
        ({"scenarios": 0}, "policy.scenarios"),
        ({"horizon": 0}, "policy.horizon"),
        ({"candidates": 1}, "policy.candidates"),
        ({"confidence": 1.0}, "policy.confidence: expected a number above 0 and below 1, found 1.0"),
        ({"gamma": "high"}, "policy.gamma: expected a number above 0 and at most 1, found 'high'"),
        ({"value": "critic"}, "a run with a state critic"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutPolicy(BaseStockPolicy(12), **arguments)


def test_one_scenario_is_refused_where_there_is_chance_and_the_true_future_is_better() -> None:
    env = LostSalesEnv(max_episode_steps=40)
    with pytest.raises(ConfigError, match="clairvoyant=true"):
        RolloutPolicy(BaseStockPolicy(18), scenarios=1).bind(env)
    RolloutPolicy(BaseStockPolicy(18), scenarios=1).bind(JobShopEnv())
    clairvoyant = RolloutPolicy(BaseStockPolicy(18), clairvoyant=True, horizon=12)
    honest = RolloutPolicy(BaseStockPolicy(18), horizon=12, scenarios=64)
    assert played(env, clairvoyant, 40) > played(env, honest, 40)


def test_environments_without_copies_are_refused() -> None:
    class Fixed(GymMazeEnv):
        pass

    env = Fixed("CartPole-v1")
    env.core_env.clone_from = lambda other: super(type(env.core_env), env.core_env).clone_from(other)  # type: ignore[misc]
    with pytest.raises(ConfigError, match="implement `clone_from` to plan"):
        RolloutPolicy(RandomPolicy(env.action_spaces_dict)).bind(env)


def test_a_budget_that_is_too_small_keeps_the_base_policys_action() -> None:
    env = LostSalesEnv()
    env.seed(1)
    observation = env.reset()
    policy = RolloutPolicy(BaseStockPolicy(18), budget=10)
    with pytest.warns(UserWarning, match="too small for one scenario of 21 candidates"):
        action = policy.compute_action(observation, None, env, ActorID(0, 0))
    assert action == BaseStockPolicy(18).compute_action(observation, None, None)


class OneNan(gymnasium.Env[Any, Any]):
    """Action 1 is rewarded with NaN in its second step."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)
    n_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        reward = np.nan if action == 1 and self.n_steps == 2 else 1.0
        return np.zeros(1, np.float32), reward, False, self.n_steps == 9, {}


def test_simulated_returns_that_are_not_numbers_are_refused() -> None:
    env = GymMazeEnv(OneNan())
    policy = RolloutPolicy(RandomPolicy(env.action_spaces_dict), horizon=1, scenarios=2)
    policy.seed(1)
    env.seed(1)
    observation = env.reset()
    policy.compute_action(observation, None, env, env.actor_id())
    observation = env.step({"action": np.int64(0)})[0]
    with pytest.raises(NonFiniteError, match="returns are not numbers"):
        policy.compute_action(observation, None, env, env.actor_id())
