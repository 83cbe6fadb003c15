"""The inventory problems against published figures and an independent computation."""

from __future__ import annotations

import numpy as np
import pytest

from maze.core.errors import ConfigError
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.utils.check_env import check_env
from maze_envs.inventory.dual_sourcing import DualIndexPolicy, DualSourcing, DualSourcingEnv
from maze_envs.inventory.exact import dual_sourcing_cost, lost_sales_cost
from maze_envs.inventory.lost_sales import BaseStockPolicy, LostSales, LostSalesEnv
from maze_envs.inventory.stores import distribution, geometric, poisson

ZIPKIN_POISSON = {  # Zipkin (2008), table 1: optimal average costs, Poisson demand, by penalty and lead time
    (4, 1): 4.04, (4, 2): 4.40, (4, 3): 4.60, (4, 4): 4.73, (9, 1): 5.44, (9, 2): 6.09, (9, 3): 6.53,
}  # fmt: skip


def test_demands_have_their_means_and_sum_to_one():
    for name in ("poisson", "geometric"):
        probabilities = distribution(name, 5.0)
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
        assert probabilities @ np.arange(len(probabilities)) == pytest.approx(5.0, abs=1e-6)
    assert poisson(5.0)[0] == pytest.approx(np.exp(-5.0))
    assert geometric(5.0)[1] / geometric(5.0)[0] == pytest.approx(5 / 6)
    with pytest.raises(ConfigError, match="expected one of poisson, geometric, found 'normal'"):
        distribution("normal", 5.0)


@pytest.mark.parametrize("mean", [599.0, 601.0, 746.0, 1e5])
def test_poisson_demand_has_equal_mean_and_variance_for_large_means(mean):
    probabilities = poisson(mean)
    demands = np.arange(len(probabilities))
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-9)
    assert probabilities @ demands == pytest.approx(mean, rel=1e-6)
    assert probabilities @ (demands - mean) ** 2 == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("demand", ["poisson", "geometric"])
def test_stores_without_demand_sell_nothing(demand):
    stores = LostSales(2, demand=demand, mean_demand=0.0, lead_time=1)
    stores.begin(np.arange(2))
    stores.advance({"order": np.array([0, 3])})
    assert stores.advance({"order": np.array([0, 0])})[0].tolist() == [0.0, -3.0]
    with pytest.raises(ConfigError, match="demand does not vary"):
        LostSales(1, demand=demand, mean_demand=0.0, reward_scale="newsvendor").begin(np.arange(1))
    with pytest.raises(ConfigError, match=r"env\.mean_demand: expected a finite number of at least 0, found -1"):
        LostSales(1, demand=demand, mean_demand=-1.0)


@pytest.mark.parametrize(("penalty", "lead_time"), ZIPKIN_POISSON)
def test_the_optimum_of_lost_sales_is_the_published_one(penalty, lead_time):
    found = lost_sales_cost(LostSales(1, lead_time=lead_time, penalty=penalty), largest_order=12, tolerance=1e-3)
    assert found.cost == pytest.approx(ZIPKIN_POISSON[penalty, lead_time], abs=0.006)


def test_costs_of_two_periods_match_hand_worked_values():
    stores = LostSales(1, lead_time=2, penalty=9.0)
    stores.begin(np.zeros(1, int))
    assert (stores.stock.tolist(), stores.outstanding.tolist()) == ([5], [[5]])
    draws = iter([0.0, 0.999999])
    stores.random.uniform = lambda: np.array([next(draws)])
    assert stores.advance({"order": np.array([3])})[0] == [-5.0]  # no demand
    assert (stores.stock.tolist(), stores.outstanding.tolist()) == ([10], [[3]])
    cost = -stores.advance({"order": np.array([1])})[0][0]
    demand = int(np.searchsorted(np.cumsum(stores.probabilities), 0.999999))
    assert demand > 15
    assert cost == 9.0 * (demand - 10)
    assert (stores.stock.tolist(), stores.outstanding.tolist()) == ([3], [[1]])
    assert stores.kpis(np.zeros(1, int))["average_cost"] == [(5 + cost) / 2]


@pytest.mark.parametrize("demand", ["poisson", "geometric"])
def test_expected_costs_are_the_mean_of_what_periods_cost(demand):
    stocks = np.array([0, 1, 4, 9, 30, 400])
    stores = LostSales(len(stocks), demand=demand, penalty=9.0, lead_time=1, reward_scale=10.0, expected_costs=True)
    stores.begin(np.arange(len(stocks)))
    stores.stock[:] = stocks
    of_demand = np.arange(len(stores.probabilities))
    left_over, lost = np.maximum(stocks[:, None] - of_demand, 0), np.maximum(of_demand - stocks[:, None], 0)
    expected = (1.0 * left_over + 9.0 * lost) @ stores.probabilities
    rewards, _ = stores.step({"order": np.zeros(len(stocks), int)})
    np.testing.assert_allclose(rewards, -expected / 10, atol=1e-9)
    assert not np.allclose(stores.counted_cost, expected)  # what is counted is what it came to


def test_costs_of_the_simulation_equal_those_of_the_exact_solver():
    policy = BaseStockPolicy(20, cap=6)
    exact = lost_sales_cost(
        LostSales(1, lead_time=3), lambda s: policy.choose({"stock": s / 10}, 0)["order"], tolerance=1e-3
    ).cost
    stores = LostSales(256, lead_time=3, max_episode_steps=None, warm_up=50)
    assert simulated(stores, policy, 1000) == pytest.approx(exact, abs=0.03)


DUAL = {  # Gijsbrechts et al. (2022), figure 9: gaps of capped dual index and dual index policies in percent
    (2, 105.0, (4, 7, 2), (4, 7)): (0.00, 0.11),
    (2, 110.0, (4, 8, 2), (4, 8)): (0.03, 0.18),
    (3, 105.0, (4, 10, 1), (4, 8)): (0.00, 0.27),
}


@pytest.mark.parametrize(("setting", "gaps"), DUAL.items())
def test_gaps_of_dual_index_policies_are_the_published_ones(setting, gaps):
    lead_time, express_cost, *levels = setting
    problem = DualSourcing(1, lead_time=lead_time, express_cost=express_cost)
    best = dual_sourcing_cost(problem).cost
    for level, gap in zip(levels, gaps, strict=True):
        cost = dual_sourcing_cost(problem, index_policy(*level), tolerance=0.01).cost
        assert 100 * (cost / best - 1) == pytest.approx(gap, abs=0.025)


def test_dual_sourcing_costs_equal_those_of_the_exact_solver():
    exact = dual_sourcing_cost(DualSourcing(1), index_policy(4, 7, 2), tolerance=0.01).cost
    stores = DualSourcing(512, max_episode_steps=None, warm_up=50)
    cost = simulated(stores, DualIndexPolicy(4, 7, 2), 1000)
    # the price of the mean demand, 2 units, is most of the noise: demand differs by chance
    assert cost == pytest.approx(exact, abs=0.6)


def test_rewards_exclude_the_unavoidable_regular_order_cost():
    stores, policy = DualSourcing(512, max_episode_steps=None), DualIndexPolicy(4, 7, 2)
    for row in range(512):
        stores.random.seed(row, row)
    stores.begin(np.arange(512))
    earned = np.zeros(512)
    for _ in range(600):
        for step_key in stores.step_keys:
            seen = {"stock": np.zeros((512, 2), np.float32)}
            stores.observe(seen)
            earned += stores.advance(policy.choose(seen, step_key))[0]
    costs = stores.kpis(np.arange(512))["average_cost"].mean() - stores.unavoidable
    # the units that demand takes more or less than its mean, by chance, are bought at 100 each
    assert -stores.reward_scale * earned.mean() / 600 == pytest.approx(costs, abs=1.0)


@pytest.mark.parametrize("make", [LostSalesEnv, DualSourcingEnv])
def test_the_environments_are_sound(make):
    report = check_env(make, n_steps=60)
    assert (report.findings, report.skipped) == ([], [])


@pytest.mark.parametrize(
    ("env", "policy"), [(LostSalesEnv(), BaseStockPolicy(20, 6)), (DualSourcingEnv(), DualIndexPolicy(4, 7))]
)
def test_a_heuristic_chooses_the_same_action_alone_and_in_batches(env, policy):
    env.seed(1)
    many = BatchedVectorEnv(env.batch(1))
    many.seed([1])
    one, batch = env.reset(), many.reset()
    for _ in range(100):
        actor = env.actor_id()
        action, actions = policy.compute_action(one, None, None, actor), policy.compute_actions(batch, actor)
        assert {key: [value] for key, value in action.items()} == {key: list(value) for key, value in actions.items()}
        one, batch = env.step(action)[0], many.step(actions)[0]


def test_an_inventory_is_rendered():
    import matplotlib.pyplot as plt

    env = DualSourcingEnv()
    env.seed(1)
    env.reset()
    env.get_renderer().render(env.get_maze_state(), {"express": np.array(2)}, None)
    assert [patch.get_height() for patch in plt.gca().patches] == [2, 2, 2]
    plt.close()


def index_policy(express_level, regular_level, cap=None):
    def orders(states):
        express = np.clip(express_level - states[:, 0], 0, 6)
        position = states.sum(axis=1) + express
        return express, np.clip(regular_level - position, 0, cap)

    return orders


def simulated(stores, policy, n_periods):
    """The average cost of a rule."""
    for row in range(stores.n_envs):
        stores.random.seed(row, row)
    rows = np.arange(stores.n_envs)
    stores.begin(rows)
    for _ in range(n_periods):
        for step_key in stores.step_keys:
            seen = {"stock": np.zeros((stores.n_envs, *stores.observation_spaces[step_key]["stock"].shape), np.float32)}
            stores.observe(seen)
            stores.advance(policy.choose(seen, step_key))
    return stores.kpis(rows)["average_cost"].mean()
