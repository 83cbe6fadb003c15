"""Dispatching (agents that come and go) and pick and place (a hierarchy)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module

from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.structured_env import ACTORS_DONE_KEY, ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.log_stats import LogStatsKey, LogStatsLevel
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import EnvFactory
from maze.core.utils.factory import Factory
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.perception.models.model_composer import BaseModelComposer
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.ppo.ppo_trainer import PPO
from maze.utils.check_env import check_env
from maze_envs.common.masked_flatten_concat import MaskedFlattenConcatPolicyNet
from maze_envs.logistics.dispatching.events import DispatchingEvents
from maze_envs.logistics.dispatching.maze_env import dispatching_env, flat_dispatching_env
from maze_envs.logistics.dispatching.rules import NearestOrder
from maze_envs.logistics.dispatching.simulation import Order
from maze_envs.robotics.pick_and_place.core_env import PLACE_REWARD, STEP_COST
from maze_envs.robotics.pick_and_place.maze_env import flat_pick_and_place_env, pick_and_place_env

ENVS = [dispatching_env, flat_dispatching_env, pick_and_place_env, flat_pick_and_place_env]
LATE_SHARE = LogStatsKey(BaseEnvEvents.kpi, None, ("late_share",))
EXPERIMENTS = [
    "dispatching_ppo",
    "dispatching_flat_ppo",
    "dispatching_late_ppo",
    "pick_and_place_ppo",
    "pick_and_place_flat_ppo",
]


@pytest.mark.parametrize("make_env", ENVS)
def test_the_example_environments_are_sound(make_env):
    report = check_env(make_env, n_steps=150)
    assert (report.findings, report.skipped) == ([], [])


def episode_return(env, act, seed):
    env.seed(seed)
    observation, total, done = env.reset(), 0.0, False
    while not done:
        observation, reward, done, _ = env.step(act(observation, env))
        total += reward
    return total


def nearest_order(observation, env):
    return NearestOrder().compute_action(observation, None, None, env.actor_id())


def straight_to_the_goal(observation, env):
    if "orientation" in observation:
        return {"orientation": int(observation["orientation"].argmax())}
    x, y = observation["offset"]
    return {"direction": (1 if x > 0 else 3) if x else (0 if y > 0 else 2)}


def test_good_dispatchers_earn_twice_as_much_as_random_ones():
    env = dispatching_env()
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(0)
    random = np.mean([episode_return(env, lambda o, e: policy.compute_action(o), seed) for seed in range(5)])
    good = np.mean([episode_return(env, nearest_order, seed) for seed in range(5)])
    assert good > 75
    assert random < 50


def test_vehicles_leave_are_replaced_and_their_identities_never_return():
    env = dispatching_env(shift_length=10)
    env.seed(3)
    observation, done = env.reset(), False
    gone, seen = set(), []
    while not done:
        actor = env.actor_id()
        assert actor.step_key == "vehicle"
        assert actor.agent_id not in gone
        seen.append(actor.agent_id)
        observation, _, done, _ = env.step(nearest_order(observation, env))
        if env.is_actor_done():
            gone.add(actor.agent_id)
    assert max(seen) > 20
    assert gone
    assert env.agent_counts_dict == {"vehicle": -1}


def test_each_vehicle_that_goes_home_is_reported_at_its_last_decision():
    env = dispatching_env(shift_length=10)
    env.seed(3)
    observation, done, order, reported = env.reset(), False, [], {}
    while not done:
        actor = env.actor_id()
        order.append(actor.agent_id)
        action = NearestOrder(0.3).compute_action(observation, None, None, actor)  # vehicles often wait
        observation, _, done, info = env.step(action)
        ends = [len(order) - 1] if env.is_actor_done() else []
        ends += [len(order) - 1 - n_ago for n_ago in info.get(ACTORS_DONE_KEY, ())]
        reported |= {order[position]: position for position in ends}
    at_work = {vehicle.agent_id for vehicle in env.core_env.simulation.vehicles}
    last = {agent: position for position, agent in enumerate(order)}
    assert {agent: last[agent] for agent in set(order) - at_work}.items() <= reported.items()
    assert reported.items() <= last.items()


def test_rollouts_mark_the_last_decision_of_each_vehicle():
    env = SequentialVectorEnv([lambda: dispatching_env(shift_length=10)] * 2)
    env.seed([1, 2])
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(0)
    generator = RolloutGenerator(env)
    columns = generator.collect(policy, generator.allocate(40))
    assert columns.actor_done.shape == columns.actor_rewards.shape == (columns.n_ticks, 2)
    agents = columns.substeps["vehicle"].agent_ids
    left = np.argwhere(columns.actor_done)
    assert len(left) > 4
    for tick, index in left:
        ends = np.flatnonzero((columns.terminated | columns.truncated)[tick:, index])
        end = tick + ends[0] if len(ends) else columns.n_ticks
        assert agents[tick, index] not in agents[tick + 1 : end + 1, index]


def test_each_vehicle_observes_the_state_left_by_earlier_vehicles_and_gets_its_own_reward():
    env = dispatching_env(distance_cost=0.0)
    env.seed(0)
    observation = env.reset()
    n_open, rewards = int(observation["order_mask"][:-1].sum()), []
    for position in range(4):
        assert env.get_env_time() == 0
        assert int(observation["order_mask"][:-1].sum()) == n_open - position
        choice = 8 if position == 1 else int(observation["order_mask"].argmax())  # the second one waits
        n_open += position == 1
        observation, reward, _, _ = env.step({"order": choice})
        rewards.append(reward)
    assert rewards == [1.0, 0.0, 1.0, 1.0]
    assert env.get_actor_rewards().tolist() == rewards
    assert env.get_env_time() == 1


@pytest.mark.parametrize(("farthest", "chosen"), [(1.0, 1), (0.25, 1), (0.2, 3)])  # 3: wait
def test_the_nearest_order_within_reach_is_taken(farthest, chosen):
    orders = [[1.0, 0.5, 1.0], [1.0, 0.75, 1.0], [0.0, 0.0, 0.0]]
    action = NearestOrder(farthest).compute_action({"orders": np.array(orders, np.float32)}, None, None)
    assert action["order"] == chosen


@pytest.mark.parametrize(
    ("distance", "lost_at", "late_share"),
    [
        (3, 3, 0.0),  # the vehicle arrives when the patience ends
        (3, 2, 0.5),  # one time unit after it, one of two orders
    ],
)
def test_orders_are_late_if_they_are_lost_or_reached_too_late(distance, lost_at, late_share):
    env = LogStatsWrapper.wrap(dispatching_env(n_vehicles=1, arrival_rate=0.0, horizon=20))
    env.seed(0)
    env.reset()
    x, y = env.core_env.simulation.vehicles[0].position
    orders = [Order((x - distance, y), lost_at), Order((x, y), 20)]
    env.core_env.simulation.orders = orders + [None] * 6
    done = False
    while not done:  # the first order first
        _, _, done, _ = env.step({"order": 0 if env.core_env.simulation.orders[0] else 1})
    env.reset()
    assert env.get_stats(LogStatsLevel.EPISODE).last_stats[LATE_SHARE] == late_share


def test_a_lost_order_is_late_once():
    env = LogStatsWrapper.wrap(dispatching_env(n_vehicles=1, arrival_rate=0.0, horizon=20))
    env.seed(0)
    env.reset()
    env.core_env.simulation.orders = [Order((0, 0), 2)] + [None] * 7
    done = False
    while not done:
        _, _, done, _ = env.step({"order": 8})  # wait
    env.reset()
    assert env.get_stats_value(DispatchingEvents.order_late, LogStatsLevel.EPISODE) == 1
    assert env.get_stats(LogStatsLevel.EPISODE).last_stats[LATE_SHARE] == 1.0


def test_the_task_follows_from_the_state_and_lasts_several_steps():
    env = pick_and_place_env()
    env.seed(4)
    observation, tasks, total = env.reset(), [], 0.0
    while "place" not in tasks:
        tasks.append(env.actor_id().step_key)
        observation, reward, _, _ = env.step(straight_to_the_goal(observation, env))
        total += reward
    order = list(dict.fromkeys(tasks))
    assert order == [task for task in ("reach", "grasp", "move", "place") if task in tasks]
    assert tasks.count("grasp") == tasks.count("place") == 1
    assert tasks.count("reach") + tasks.count("move") > 2
    assert total == pytest.approx(PLACE_REWARD + 0.2 - STEP_COST * len(tasks))
    assert env.get_env_time() == len(tasks)


def test_a_gripper_turned_the_wrong_way_holds_nothing():
    env = pick_and_place_env(size=2, n_orientations=4)
    env.seed(0)
    observation = env.reset()
    while env.actor_id() != ActorID("grasp", 0):
        observation, *_ = env.step(straight_to_the_goal(observation, env))
    wrong = (int(observation["orientation"].argmax()) + 1) % 4
    _, reward, _, _ = env.step({"orientation": wrong})
    assert (reward, env.actor_id().step_key) == (-STEP_COST, "grasp")


def test_the_flat_robot_drops_its_part_when_it_grips_while_carrying():
    env = flat_pick_and_place_env()
    env.seed(1)
    env.reset()
    core_env = env.core_env
    core_env.robot = core_env.object
    core_env.target = (core_env.robot[0], (core_env.robot[1] + 3) % core_env.size)
    env.step({"direction": 4, "orientation": core_env.object_orientation})
    assert core_env.holds_object
    env.step({"direction": 4, "orientation": 0})
    assert not core_env.holds_object
    assert core_env.task() == "grasp"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_experiments_train_with_finite_numbers_at_different_sub_steps(experiment):
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", [f"+experiment={experiment}"])
    env = SequentialVectorEnv([EnvFactory(cfg.env, cfg.wrappers)] * 3)
    env.seed([1, 2, 3])
    torch.manual_seed(0)
    if "critic" in cfg and cfg.model.get("critic") is None:
        cfg.model.critic = cfg.critic
    composer = Factory(BaseModelComposer).instantiate(
        cfg.model,
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict=env.agent_counts_dict,
    )
    composer.policy.seed(1)
    model = TorchActorCritic(composer.policy, composer.critic, "cpu")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = {
        "n_epochs": 1,
        "epoch_length": 1,
        "n_rollout_steps": 12,
        "batch_size": 24,
        "n_optimization_epochs": 2,
        "lr": 0.001,
    }
    PPO(config, RolloutGenerator(env), None, model, None, seed=0).train()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_masks_apply_to_the_named_actions_only():
    torch.manual_seed(0)
    sizes = {"hidden_units": [4], "non_lin": torch.nn.Tanh}
    net = MaskedFlattenConcatPolicyNet({"x": (2,), "m": (3,)}, {"a": (3,), "b": (2,)}, masks={"a": "m"}, **sizes)
    logits = net({"x": torch.zeros(1, 2), "m": torch.tensor([[1.0, 0.0, 1.0]])})
    assert torch.softmax(logits["a"], -1)[0, 1] == 0.0
    assert bool((torch.softmax(logits["b"], -1) > 0).all())
    with pytest.raises(EnvironmentContractError, match="leaves no valid action"):
        net({"x": torch.zeros(1, 2), "m": torch.zeros(1, 3)})
    with pytest.raises(ConfigError, match="must name an action"):
        MaskedFlattenConcatPolicyNet({"x": (2,)}, {"a": (3,)}, masks={"a": "m"}, **sizes)


def test_invalid_values_of_example_environments_are_named():
    with pytest.raises(ConfigError, match=r"env\.n_vehicles: must be at least 1"):
        dispatching_env(n_vehicles=0)
    with pytest.raises(ConfigError, match="size >= 2"):
        pick_and_place_env(size=1)
