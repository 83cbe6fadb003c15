"""Policies without networks."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from maze.core.agent.action_distribution import ExploringPolicy
from maze.core.agent.default_policy import DefaultPolicy
from maze.core.agent.dummy_cartpole_policy import DummyCartPolePolicy
from maze.core.agent.flat_policy import FlatPolicy
from maze.core.agent.heuristic_lunar_lander_policy import HeuristicLunarLanderPolicy
from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError

SPACE = spaces.Dict(
    {
        "move": spaces.Discrete(4),
        "use": spaces.MultiBinary(3),
        "tune": spaces.MultiDiscrete([2, 3]),
        "steer": spaces.Box(-2, 5, (2, 2), np.float32),
        "brake": spaces.Box(0, 1, (), np.float32),
        "open": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "count": spaces.Box(0, 9, (2,), np.int64),
    }
)


def mean_return(env_id, policy, n_episodes):
    env = gym.make(env_id)
    total = 0.0
    for episode in range(n_episodes):
        observation, _ = env.reset(seed=episode)
        done = False
        while not done:
            action = policy.compute_action({"observation": observation}, actor_id=ActorID(0, 0))
            observation, reward, terminated, truncated, _ = env.step(int(action["action"]))
            total += float(reward)
            done = terminated or truncated
    env.close()
    return total / n_episodes


def test_random_actions_are_elements_of_the_space_and_depend_on_the_seed_alone():
    policies = [RandomPolicy({0: SPACE}) for _ in range(2)]
    for policy in policies:
        policy.seed(5)
    actions = [[policy.compute_action(None, actor_id=ActorID(0, 0)) for _ in range(20)] for policy in policies]
    for first, second in zip(*actions, strict=True):
        assert SPACE.contains(first)
        for head in SPACE.spaces:
            np.testing.assert_array_equal(first[head], second[head])
    assert len({int(action["move"]) for action in actions[0]}) == 4


def test_a_random_policy_names_unknown_substeps_and_offers_candidates():
    policy = RandomPolicy({"select": SPACE})
    with pytest.raises(ConfigError, match=r"'selct' is unknown. Did you mean `select`"):
        policy.compute_action(None, actor_id=ActorID("selct", 0))
    actions, probabilities = policy.compute_top_action_candidates(None, 4, None, None)
    assert len(actions) == 4
    assert probabilities == [0.25] * 4
    assert not policy.needs_state()
    assert not policy.needs_env()


class Constant(FlatPolicy):
    def __init__(self, value):
        self.value = value
        self.seeds = []

    def seed(self, seed):
        self.seeds.append(seed)

    def compute_action(self, observation, deterministic):
        return {"action": self.value}

    def compute_top_action_candidates(self, observation, num_candidates):
        return [{"action": self.value}], [1.0]


def test_a_default_policy_calls_the_flat_policy_of_the_substep():
    policy = DefaultPolicy({"select": Constant(1), "cut": {"_target_": f"{__name__}.Constant", "value": 2}})
    assert policy.compute_action(None, actor_id=ActorID("select", 0)) == {"action": 1}
    assert policy.compute_action(None, actor_id=ActorID("cut", 3)) == {"action": 2}
    assert policy.compute_top_action_candidates(None, 1, None, None, ActorID("cut", 0)) == ([{"action": 2}], [1.0])
    policy.seed(10)
    assert [flat.seeds for flat in policy.policies.values()] == [[10], [11]]
    with pytest.raises(ConfigError, match="'cutt' is unknown"):
        policy.policy_for(ActorID("cutt", 0))
    with pytest.raises(ConfigError, match="actor_id"):
        policy.policy_for(None)


def test_a_list_of_flat_policies_has_the_keys_zero_one():
    policy = DefaultPolicy([Constant(1), Constant(2)])
    assert policy.compute_action(None, actor_id=ActorID(1, 0)) == {"action": 2}
    assert DefaultPolicy([Constant(3)]).compute_action(None) == {"action": 3}


def test_the_cartpole_heuristic_balances():
    assert mean_return("CartPole-v1", DummyCartPolePolicy(), 3) == 500.0


def test_the_lunar_lander_heuristic_lands():
    pytest.importorskip("Box2D")
    assert mean_return("LunarLander-v3", HeuristicLunarLanderPolicy(), 3) > 200.0


MASKED = spaces.Dict({"move": spaces.Discrete(4), "turn": spaces.Discrete(2), "steer": SPACE["steer"]})


def test_random_actions_are_sampled_uniformly_from_unmasked_actions():
    policy = RandomPolicy({0: MASKED})
    policy.seed(0)
    masks = {"move_mask": np.array([0.0, 1.0, 0.0, 1.0]), "x": np.zeros(4), "turn_mask": np.array([False, True])}
    actions = [policy.compute_action(masks, actor_id=ActorID(0, 0)) for _ in range(400)]
    assert all(MASKED.contains(action) for action in actions)
    counts = np.bincount([action["move"] for action in actions], minlength=4)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert 160 < counts[1] < 240
    assert {int(action["turn"]) for action in actions} == {1}
    candidates, _ = policy.compute_top_action_candidates(masks, 50, None, None)
    assert {int(candidate["move"]) for candidate in candidates} == {1, 3}


def test_masks_may_change_with_every_step_and_one_that_allows_nothing_is_taken_for_none():
    policy = RandomPolicy({0: MASKED})
    policy.seed(0)
    for allowed in (0, 3, 2):
        action = policy.compute_action({"move_mask": np.eye(4)[allowed]}, actor_id=ActorID(0, 0))
        assert action["move"] == allowed
    free = {int(policy.compute_action({"move_mask": np.zeros(4)})["move"]) for _ in range(60)}
    assert free == {0, 1, 2, 3}


def test_masks_of_several_choices_and_bits_are_respected():
    heads = spaces.Dict(pair=spaces.MultiDiscrete([2, 3], start=[0, 5]), bits=spaces.MultiBinary(3))
    masks = {"pair_mask": np.array([0, 1, 1, 0, 1]), "bits_mask": np.array([[1, 1, 1], [0, 1, 0]])}  # stacked: the last
    policy = RandomPolicy({0: heads})
    policy.seed(0)
    actions = [policy.compute_action(masks) for _ in range(60)]
    assert all(heads.contains(action) for action in actions)
    assert {tuple(action["pair"].tolist()) for action in actions} == {(1, 5), (1, 7)}
    assert {tuple(action["bits"].tolist()) for action in actions} == {(0, 0, 0), (0, 1, 0)}
    named = RandomPolicy({0: heads}, masks={"allowed": "pair"})
    found = {tuple(named.compute_action({"allowed": np.array([1, 0, 0, 1, 0])})["pair"].tolist()) for _ in range(20)}
    assert found == {(0, 6)}


def test_ambiguous_masks_need_a_configured_head():
    heads = spaces.Dict({"first": spaces.Discrete(3), "second": spaces.Discrete(3)})
    mask = {"some_mask": np.array([0, 0, 1])}
    for masks, expected in ((None, {0, 1, 2}), ({"some_mask": "second"}, {2})):
        policy = RandomPolicy({0: heads}, masks=masks)
        policy.seed(0)
        actions = [policy.compute_action(mask) for _ in range(60)]
        assert {int(action["second"]) for action in actions} == expected
        assert {int(action["first"]) for action in actions} == {0, 1, 2}


class Remembering(Policy):
    """Counts its observations as a hidden state does."""

    is_recurrent = True

    def __init__(self) -> None:
        self.n_observations, self.env = 0, None

    def bind(self, env):
        self.env = env

    def compute_action(self, observation, maze_state=None, env=None, actor_id=None, deterministic=False):
        self.n_observations += 1
        return {"action": 1}


def test_hidden_states_of_an_exploring_policy_carry_all_observations():
    base = Remembering()
    policy = ExploringPolicy(base, 0.5, {0: spaces.Dict(action=spaces.Discrete(2))})
    policy.seed(1)
    env = object()
    policy.bind(env)
    assert policy.is_recurrent
    assert base.env is env
    actions = [int(policy.compute_action({}, actor_id=ActorID(0, 0))["action"]) for _ in range(100)]
    assert base.n_observations == 100
    assert 10 < actions.count(0) < 40
