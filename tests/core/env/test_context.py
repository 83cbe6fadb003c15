"""Contexts of batched simulations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import poisson

from maze.core.env.context import Context
from maze.core.errors import ConfigError
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.utils.check_env import check_env
from maze_envs.inventory.lost_sales import SCALE, ContextBaseStockPolicy, LostSales, LostSalesEnv

CONTEXT = {"demand": ["poisson", "geometric"], "lead_time": [1, 2, 4], "penalty": {"lower": 4, "upper": 39}}


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=3))
def test_sampled_values_lie_in_their_ranges_and_are_observed_in_the_unit_interval(numbers):
    context = Context({**CONTEXT, "lead_time": {"lower": 1, "upper": 4, "integer": True}}, tuple(CONTEXT))
    stored = context.drawn(np.array([numbers]))
    demand, lead_time, penalty = stored[0]
    assert demand in (0, 1)
    assert lead_time in (1, 2, 3, 4)
    assert 4 <= penalty <= 39
    seen = context.observed(stored)
    assert seen.shape == (1, 4)
    assert seen.min() >= 0
    assert seen.max() <= 1
    assert context.stored(seen).tolist() == [[demand, lead_time, pytest.approx(penalty)]]


def test_observed_values_of_hand_worked_numbers():
    context = Context(CONTEXT, tuple(CONTEXT))
    assert context.observed(np.array([[1, 2, 39.0]])).tolist() == [[0, 1, pytest.approx(1 / 3), 1]]


def test_grid_contains_all_combinations():
    grid = Context(CONTEXT, tuple(CONTEXT)).instances()
    combinations = set(zip(*(array.tolist() for array in grid.values()), strict=True))
    assert combinations == {(d, lead, p) for d in (0, 1) for lead in (1, 2, 4) for p in (4, 21.5, 39)}


def test_grid_has_each_whole_number_of_a_narrow_interval_once():
    grid = Context({"lead_time": {"lower": 1, "upper": 2, "integer": True}}, tuple(CONTEXT)).instances()
    assert grid["context/lead_time"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"price": [1, 2]}, "env.context: expected some of the parameters demand, lead_time"),
        ({"penalty": 4}, "env.context.penalty: expected a list"),
        ({"penalty": []}, "env.context.penalty: expected a list"),
        ({"penalty": [4, 4]}, "env.context.penalty: expected a list of different"),
        ({"penalty": [4, "high"]}, "env.context.penalty: expected a list of different"),
        ({"penalty": {"lower": 4, "upper": 4}}, "env.context.penalty: expected .* `lower` < `upper`"),
        ({"penalty": [4, None]}, "env.context.penalty: expected a list of different"),
        ({"penalty": [[4], [5]]}, "env.context.penalty: expected a list of different"),
        ({"penalty": {"lower": 4, "upper": None}}, "env.context.penalty: expected .* `lower` < `upper`"),
        ({"penalty": {"lower": "4", "upper": 5}}, "env.context.penalty: expected .* `lower` < `upper`"),
        # 1 + floor(2.5 u) would reach 3
        ({"lead_time": {"lower": 1, "upper": 2.5, "integer": True}}, "env.context.lead_time: .*both whole numbers"),
        ({"penalty": {"from": 4, "upper": 5}}, "env.context.penalty: expected .* `lower` < `upper`"),
        ({"penalty": ["low", "high"]}, "env.context.penalty: expected numbers above 0"),
        ({"demand": {"lower": 1, "upper": 2}}, "env.context.demand: expected a list of texts"),
        ({"demand": ["poisson", "binomial"]}, "env.demand: expected one of poisson, geometric"),
        ({"lead_time": {"lower": 1, "upper": 4}}, "env.context.lead_time: expected whole numbers"),
        ({"lead_time": [0, 1]}, "env.context.lead_time: expected whole numbers"),
    ],
)
def test_invalid_contexts_are_refused_with_the_key(context, message):
    with pytest.raises(ConfigError, match=message):
        LostSalesEnv(context=context)


def test_the_longest_lead_time_of_the_context_sizes_the_observation():
    env = LostSalesEnv(context={"lead_time": [1, 6]}, lead_time=4)
    assert env.reset()["stock"].shape == (6,)
    env.step({"order": 3})


def test_base_stock_by_context_needs_a_context():
    with pytest.raises(ConfigError, match=r"env\.context: expected the parameters"):
        ContextBaseStockPolicy(None)


def test_base_stock_levels_are_quantiles_of_the_demand_until_the_next_delivery():
    context = {"lead_time": [1, 4], "penalty": [4, 39]}
    env = BatchedVectorEnv(LostSales(4, context=context, instances="grid"))
    env.seed([1, 2, 3, 4])
    observation = env.reset()
    orders = ContextBaseStockPolicy(context).choose({key: observation[key] for key in ("stock", "context")}, 0)
    position = np.rint(observation["stock"] * SCALE).sum(axis=1)
    for level, (lead_time, penalty) in zip(orders["order"] + position, env.simulation.context_values, strict=True):
        assert level == poisson.ppf(penalty / (penalty + 1.0), 5.0 * (lead_time + 1))


def test_grid_without_context_is_refused():
    with pytest.raises(ConfigError, match=r"env\.instances=grid: expected env\.context"):
        LostSalesEnv(instances="grid")


def test_each_row_equals_a_simulation_with_its_constants():
    """A row with the context (demand, lead time, penalty) costs what a simulation with these constants costs."""
    many = LostSales(12, context={**CONTEXT, "penalty": [4, 39]}, instances="grid", max_episode_steps=None)
    for row in range(12):
        many.seed_row(row, row)
    many.begin(np.arange(12))
    demands, lead_times, penalties = many.context_values.T
    for row in range(12):
        name = ("poisson", "geometric")[int(demands[row])]
        one = LostSales(1, name, lead_time=int(lead_times[row]), penalty=penalties[row], max_episode_steps=None)
        one.begin(np.zeros(1, np.int64))
        many.seed_row(row, row)
        many.begin(np.array([row]))
        one.random.load_state(0, many.random.state(row))
        draws = many.random.state(row)
        paid = []
        for step in range(30):
            orders = np.full(12, step % 7)
            rewards, *_ = many.advance({"order": orders})
            reward, *_ = one.advance({"order": orders[:1]})
            paid.append((rewards[row], reward[0]))
        assert np.allclose(*np.transpose(paid)), (row, draws)


def test_context_is_observed_and_a_kpi_of_the_episode():
    env = LostSalesEnv(context={"penalty": [4, 39]}, lead_time=2, max_episode_steps=3)
    env.seed(1)
    seen = set()
    for _ in range(20):
        observation = env.reset()
        done = False
        while not done:
            observation, _, done, _ = env.step({"order": 5})
        kpis = env.core_env.get_kpi_calculator().calculate_kpis(None, None)
        assert observation["context"].tolist() == [float(kpis["context/penalty"] == 39)]
        seen.add(kpis["context/penalty"])
    assert seen == {4.0, 39.0}


def test_grid_is_played_in_order():
    env = LostSalesEnv(context={"penalty": [4, 9], "lead_time": [1, 2]}, instances="grid")
    env.seed(4)
    played = []
    for _ in range(5):
        env.reset()
        played.append(env.core_env.simulation.context_values[0].tolist())
    assert played == [[4, 1], [4, 2], [9, 1], [9, 2], [4, 1]]
    assert env.n_instances == 4


def test_environment_with_context_passes_the_checker():
    report = check_env(lambda: LostSalesEnv(context=CONTEXT), n_steps=60)
    assert (report.findings, report.skipped) == ([], [])


def test_newsvendor_rewards_are_relative_costs():
    """Without lead time 5 Poisson units and penalty 4 cost 3.12 at the best stock of 7."""
    stores = LostSales(1, reward_scale="newsvendor", expected_costs=True, lead_time=1)
    stores.begin(np.zeros(1, np.int64))
    stores.stock[:] = 7
    reward, _, _ = stores.advance({"order": np.zeros(1)})
    assert reward[0] == pytest.approx(0.0)


def test_batches_and_single_environments_draw_the_same_contexts():
    env = LostSalesEnv(context=CONTEXT, max_episode_steps=4)
    batch = BatchedVectorEnv(env.batch(3))
    single = SequentialVectorEnv([lambda: LostSalesEnv(context=CONTEXT, max_episode_steps=4)] * 3)
    seen = []
    for vector in (batch, single):
        vector.seed([1, 2, 3])
        found = [vector.reset()]
        found += [vector.step({"order": np.full(3, 4)})[0] for _ in range(10)]
        seen.append([{key: array.tolist() for key, array in observation.items()} for observation in found])
    assert seen[0] == seen[1]
    assert len({tuple(row) for observation in seen[0] for row in observation["context"]}) > 3, "episodes differ"


def test_copies_keep_their_context():
    stores = LostSales(4, context=CONTEXT)
    stores.begin(np.arange(4))
    copies = LostSales(2, context=CONTEXT)
    copies.copy_rows(stores, np.array([3, 1]), slice(0, 2))
    assert copies.context_values.tolist() == stores.context_values[[3, 1]].tolist()
