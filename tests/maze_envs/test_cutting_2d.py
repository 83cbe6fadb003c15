"""The configurable cutting environment."""

from __future__ import annotations

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import EnvFactory
from maze.utils.check_env import check_env
from maze_envs.logistics.cutting_2d.agents.greedy_policy import GreedyPolicy
from maze_envs.logistics.cutting_2d.demand_generator import build_demand_generator
from maze_envs.logistics.cutting_2d.demand_generator.mixed_periodic import MixedPeriodicDemandGenerator
from maze_envs.logistics.cutting_2d.env.inventory import residuals
from maze_envs.logistics.cutting_2d.env.maze_env import Cutting2DEnvironment
from maze_envs.logistics.cutting_2d.reward.raw_piece_usage import RawPieceUsageRewardAggregator

PACKAGE = "maze_envs.logistics.cutting_2d"


def documented_config(**core_env):
    """The configuration that the documentation shows."""
    return {
        "core_env": {
            "max_pieces_in_inventory": 1000,
            "raw_piece_size": [100, 100],
            "demand_generator": {
                "_target_": "mixed_periodic",
                "n_raw_pieces": 3,
                "m_demanded_pieces": 10,
                "rotate": True,
            },
            "reward_aggregator": {"_target_": f"{PACKAGE}.reward.default.DefaultRewardAggregator"},
            **core_env,
        },
        "action_conversion": [
            {
                "_target_": f"{PACKAGE}.space_interfaces.action_conversion.dict.ActionConversion",
                "max_pieces_in_inventory": 1000,
            }
        ],
        "observation_conversion": [
            {
                "_target_": f"{PACKAGE}.space_interfaces.observation_conversion.dict.ObservationConversion",
                "max_pieces_in_inventory": 1000,
                "raw_piece_size": [100, 100],
            }
        ],
    }


def test_the_documented_configuration_is_a_sound_environment():
    report = check_env(lambda: Cutting2DEnvironment(**documented_config()), n_steps=80)
    assert (report.findings, report.skipped) == ([], [])


def test_the_shipped_configuration_composes_and_its_greedy_policy_fulfils_all_orders():
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_rollout", ["env=cutting_2d", "wrappers=cutting_2d", "policy=cutting_2d_greedy_policy"])
    env = EnvFactory(cfg.env, cfg.wrappers)()
    assert cfg.policy._target_ == f"{GreedyPolicy.__module__}.GreedyPolicy"
    env.seed(1)
    observation, n_steps, done = env.reset(), 0, False
    while not done:
        observation, _, done, info = env.step(GreedyPolicy().compute_action(observation, None, env, env.actor_id()))
        assert info["msg"] == "valid_cut"
        n_steps += 1
    assert (n_steps, info["TimeLimit.truncated"]) == (200, True)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    n=st.integers(1, 4),
    share=st.floats(0, 1),
    rotate=st.booleans(),
)
def test_each_period_of_mixed_demand_exactly_fills_its_raw_pieces(seed, size, n, share, rotate):
    m = n + int(share * (n * size[0] * size[1] - n))
    generator = MixedPeriodicDemandGenerator(size, n_raw_pieces=n, m_demanded_pieces=m, rotate=rotate)
    generator.seed(seed)
    generator.reset()
    periods = [sorted(tuple(sorted(generator.next_order())) for _ in range(m)) for _ in range(2)]
    assert sum(width * height for width, height in periods[0]) == n * size[0] * size[1]
    assert periods[0] == periods[1]  # the same pieces, in another sequence and perhaps turned
    if not rotate:
        generator.reset()
        assert all(w <= size[0] and h <= size[1] for w, h in (generator.next_order() for _ in range(m)))


def test_a_new_future_draws_the_rest_of_the_period_again():
    env = Cutting2DEnvironment(**documented_config())
    env.seed(1)
    env.reset()
    generator = env.core_env.demand_generator

    def rest_of_period(seed=None):
        copy = generator.copy()
        if seed is not None:
            copy.new_future(seed)
        return [tuple(sorted(copy.next_order())) for _ in range(9)]  # one of ten is known

    futures = [rest_of_period(seed) for seed in range(20)]
    assert len({future[0] for future in futures}) > 3
    assert all(sorted(future) == sorted(rest_of_period()) for future in futures)
    assert rest_of_period(7) == futures[7]
    assert [generator.copy().next_order() for _ in range(2)] == [generator.next_order()] * 2


def test_demand_depends_on_its_seed_and_on_nothing_else():
    def orders(seed):
        env = Cutting2DEnvironment(**documented_config())
        env.seed(seed)
        env.reset()
        policy = RandomPolicy(env.action_spaces_dict)
        return [env.step(policy.compute_action(None))[0]["ordered_piece"].tolist() for _ in range(20)]

    assert orders(1) == orders(1) != orders(2)


def test_other_demand_generators_are_chosen_by_their_short_names():
    static = build_demand_generator({"_target_": "static", "orders": [[3, 2], [1, 1]]}, (10, 10))
    static.reset()
    assert [static.next_order() for _ in range(3)] == [(3, 2), (1, 1), (3, 2)]
    uniform = build_demand_generator({"_target_": "uniform", "min_size": [2, 3], "max_size": [4, 3]}, (10, 10))
    uniform.seed(0)
    drawn = {uniform.next_order() for _ in range(60)}
    assert drawn == {(2, 3), (3, 3), (4, 3)}


@pytest.mark.parametrize(
    ("core_env", "message"),
    [
        ({"demand_generator": {"_target_": "mixed_periodik"}}, "Did you mean `mixed_periodic`"),
        ({"demand_generator": {"_target_": "static", "orders": [[101, 1]]}}, "does not fit into a raw piece"),
        ({"demand_generator": {"_target_": "static", "orders": []}}, "at least one order"),
        ({"demand_generator": {"_target_": "mixed_periodic", "n_raw_pieces": 3, "m_demanded_pieces": 2}}, "divided"),
        ({"demand_generator": {"_target_": "uniform", "min_size": [5, 5], "max_size": [4, 9]}}, "min_size"),
        ({"raw_piece_size": [100]}, "two positive whole numbers"),
        ({"max_pieces_in_inventory": 0}, "at least 1"),
    ],
)
def test_wrong_configurations_raise_errors_with_what_is_expected(core_env, message):
    with pytest.raises(ConfigError, match=message):
        Cutting2DEnvironment(**documented_config(**core_env))


@pytest.mark.parametrize(
    ("reverse", "expected"),
    [(False, [(70, 100), (30, 85)]), (True, [(100, 85), (70, 15)])],
)
def test_the_first_cut_goes_through_the_whole_piece(reverse, expected):
    assert residuals((100, 100), (30, 15), reverse) == expected
    assert residuals((30, 15), (30, 15), reverse) == []


def test_rewards_follow_the_aggregator_and_steps_report_what_happened():
    demand = {"_target_": "static", "orders": [[30, 15]]}
    usage = {
        "_target_": f"{RawPieceUsageRewardAggregator.__module__}.RawPieceUsageRewardAggregator",
        "reward_scale": 0.1,
    }
    steps = [(0, 0), (1, 0), (900, 0), (0, 1)]
    expected = {  # the piece of the reset counts in the first step
        "default": [-2.0, 0.0, -2.0, 0.0],
        "usage": [-0.2, 0.0, 0.0, 0.0],
    }
    for name, config in (("default", {}), ("usage", {"reward_aggregator": usage})):
        env = Cutting2DEnvironment(**documented_config(demand_generator=demand, **config))
        env.reset()
        results = [env.step({"piece_idx": p, "cut_rotation": r, "cut_order": 0}) for p, r in steps]
        assert [reward for _, reward, _, _ in results] == pytest.approx(expected[name])
        assert [info for *_, info in results][2] == {"error": "piece_id_out_of_bounds"}


def test_a_full_inventory_discards_its_oldest_pieces_but_never_the_last_raw_piece():
    demand = {"_target_": "static", "orders": [[1, 1]]}
    env = Cutting2DEnvironment(**documented_config(demand_generator=demand, max_pieces_in_inventory=3))
    env.reset()
    rng = np.random.default_rng(0)
    for _ in range(50):
        env.step({"piece_idx": rng.integers(3), "cut_rotation": 0, "cut_order": rng.integers(2)})
        pieces = env.get_maze_state().inventory
        assert (100, 100) in pieces
        assert len(pieces) <= 3


def test_kpis_are_raw_pieces_and_fulfilled_orders_per_step():
    from maze.core.log_stats.log_stats import LogStatsLevel
    from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper

    demand = {"_target_": "static", "orders": [[100, 50]]}
    env = LogStatsWrapper(Cutting2DEnvironment(**documented_config(demand_generator=demand)))
    env.reset()
    for piece in (0, 0, 999, 0):  # half of a raw piece, the other half, nothing, half of the next one
        env.step({"piece_idx": piece, "cut_rotation": 0, "cut_order": 0})
    env.publish_episode()
    stats = env.get_stats(LogStatsLevel.EPISODE).last_stats
    kpis = {
        key.group[0] if isinstance(key.group, tuple) else key.group: v
        for key, v in stats.items()
        if key.event.__name__ == "kpi"
    }
    assert kpis == {"raw_piece_usage_per_step": 3 / 4, "fulfilled_orders": 3 / 4}
