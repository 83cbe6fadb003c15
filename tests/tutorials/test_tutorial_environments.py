"""Mechanics of the tutorial's environments, their checks, and the order of what they learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import EnvFactory
from maze.core.utils.factory import Factory
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.perception.models.model_composer import BaseModelComposer
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.ppo.ppo_trainer import PPO
from maze.utils.check_env import check_env
from maze_envs.logistics.cutting_2d.agents.greedy_policy import GreedyPolicy

RAW = (100, 90)
DEMAND = [(60, 30), (40, 30)]
MASKS = {"struct_masked": {"cutting_mask": "cut_rotation"}}


def config_of(variant: str, *overrides: str):
    with initialize_config_module("maze.conf", version_base="1.3"):
        return compose("conf_train", [f"+experiment=tutorial_cutting_2d_{variant}", *overrides])


def make_env(variant: str):
    cfg = config_of(variant)
    return EnvFactory(cfg.env, cfg.wrappers)()


@pytest.mark.parametrize("variant", ["flat", "struct", "struct_masked"])
def test_the_environments_of_the_experiments_are_sound(variant):
    report = check_env(lambda: make_env(variant), n_steps=120, masks=MASKS.get(variant))
    assert report.findings == []
    assert report.skipped == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 12))
def test_cutting_conserves_area_and_a_raw_piece_is_always_on_stock(seed, capacity):
    from tutorial_maze_env.part04_events.env.events import InventoryEvents
    from tutorial_maze_env.part06_struct_env.env.maze_env import maze_env_factory

    env = LogStatsWrapper(maze_env_factory(capacity, RAW, DEMAND))
    env.seed(seed)
    env.reset()
    rng = np.random.default_rng(seed)
    area = RAW[0] * RAW[1]
    for _ in range(40):
        order = env.get_maze_state().current_demand
        action = {"piece_idx": rng.integers(capacity), "cut_rotation": rng.integers(2), "cut_order": rng.integers(2)}
        is_first = env.get_env_time() == 0
        env.step(action)
        events = {record.interface_method.__name__: record for record in env.get_step_events()}
        n_delivered = len(env.get_last_step_events(InventoryEvents.piece_replenished)) - is_first
        area += n_delivered * RAW[0] * RAW[1] - ("valid_cut" in events) * order[0] * order[1]
        area -= sum(np.prod(e.attributes["piece"]) for e in env.get_last_step_events(InventoryEvents.piece_discarded))
        pieces = env.get_maze_state().inventory
        assert sum(width * height for width, height in pieces) == area
        assert RAW in pieces
        assert len(pieces) <= capacity


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_masked_policy_never_makes_invalid_cuts(seed):
    from tutorial_maze_env.part06_struct_env.env.struct_env_masked import struct_env_factory

    env = struct_env_factory(50, RAW, DEMAND)
    rng = np.random.default_rng(seed)
    observation = env.reset()
    for _ in range(30):
        piece = rng.choice(np.flatnonzero(observation["inventory_mask"]))
        observation, reward, _, _ = env.step({"piece_idx": piece})
        assert reward == 0.0
        rotation = rng.choice(np.flatnonzero(observation["cutting_mask"]))
        observation, reward, _, _ = env.step({"cut_rotation": rotation, "cut_order": rng.integers(2)})
        assert reward > -2 or env.get_env_time() == 1  # the first step pays for two raw pieces
        assert env.get_actor_rewards().tolist() == [reward / 2, reward / 2]
        assert not [e for e in env.get_step_events() if "invalid" in e.interface_method.__name__]


def test_orders_take_turns_and_an_optimal_plan_needs_thirty_one_raw_pieces():
    env = make_env("struct_masked")
    observation, total, done = env.reset(), 0.0, False
    assert observation["ordered_piece"].tolist() == [60, 30]
    n_orders = 0
    while not done:
        # Cut a row of 100 x 30 from the top of the largest piece, and its two orders from that.
        inventory, order = observation["inventory"], observation["ordered_piece"]
        fits = (inventory >= order).all(axis=1)
        piece = int(np.where(fits, inventory.prod(axis=1), np.inf).argmin())
        env.step({"piece_idx": piece})
        observation, reward, done, info = env.step({"cut_rotation": 0, "cut_order": 1})
        total += reward
        n_orders += 1
        assert observation["ordered_piece"].tolist() == [[60, 30], [40, 30]][n_orders % 2]
    assert (n_orders, total, info) == (180, -31.0, {"TimeLimit.truncated": True})


def test_recorded_steps_are_divided_into_those_of_the_sub_steps():
    env = make_env("struct_masked")
    first = env.reset()
    second, *_ = env.step({"piece_idx": 0})
    state = env.get_maze_state()
    env.step({"cut_rotation": 1, "cut_order": 0})
    observations, actions = env.get_observation_and_action_dicts(state, env.get_maze_action(), True)
    for step_key, expected in ((0, first), (1, second)):
        assert observations[step_key].keys() == expected.keys()
        assert all(np.array_equal(observations[step_key][key], expected[key]) for key in expected)
    assert actions == {0: {"piece_idx": 0}, 1: {"cut_rotation": 1, "cut_order": 0}}


@pytest.mark.parametrize("variant", ["flat", "struct_masked"])
def test_greedy_policy_acts_equally_in_flat_and_structured_environments(variant):
    env, policy = make_env(variant), GreedyPolicy()
    observation, total, done = env.reset(), 0.0, False
    while not done:
        action = policy.compute_action(observation, None, env, env.actor_id())
        assert env.action_space.contains(action)
        observation, reward, done, _ = env.step(action)
        total += reward
    assert total == -38.0


def build_model(env, cfg):
    torch.manual_seed(0)
    composer = Factory(BaseModelComposer).instantiate(
        cfg.model,
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict=env.agent_counts_dict,
    )
    composer.policy.seed(1)
    return TorchActorCritic(composer.policy, composer.critic, "cpu")


@pytest.mark.parametrize("variant", ["flat", "struct", "struct_masked"])
def test_the_models_of_the_experiments_train_with_finite_numbers(variant):
    cfg = config_of(variant)
    env = SequentialVectorEnv([EnvFactory(cfg.env, cfg.wrappers)] * 2)
    env.seed([1, 2])
    model = build_model(env, cfg)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = {"n_epochs": 1, "epoch_length": 1, "n_rollout_steps": 10, "batch_size": 10, "lr": 0.001}
    PPO(config, RolloutGenerator(env), None, model, None, seed=0).train()
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert sum(changed) >= len(changed) - 2  # a constant scalar of the networks may get no gradient
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize("key", ["basic", "events"])
def test_first_runs_of_the_tutorial_compose(key):
    name = f"tutorial_cutting_2d_{key}"
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", [f"env={name}", f"wrappers={name}", f"model={name}", "algorithm=ppo"])
    env = EnvFactory(cfg.env, cfg.wrappers)()
    observation = env.reset()
    assert observation["inventory-flatten"].shape == (400,)
    model = build_model(env, cfg)
    action = model.policy.compute_action(observation, maze_state=None, env=None, actor_id=env.actor_id())
    assert env.action_space.contains(action)
