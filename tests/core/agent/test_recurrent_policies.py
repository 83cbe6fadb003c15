"""Recurrent policies at work: hidden states follow the episodes of whatever they act in."""

import copy
import pickle

import numpy as np
import pytest
import torch

from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.evaluation.inspection import inspected_episode
from maze.interop.sb3_policy import SB3Predictor
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from tests.train.parallelization.toy_envs import counting_env, two_step_env
from tests.train.trainers.common.recurrent_models import recurrent_model

ENDINGS = ((3, "terminated"), (5, "truncated"))
ONLY = ActorID(0, 0)


def counting():
    return counting_env(ENDINGS)


def policy_for(env):
    return recurrent_model(env).policy


def played(env, act, n_steps):
    """What is done in consecutive episodes."""
    actions, observation = [], env.reset()
    for _ in range(n_steps):
        action = act(observation, env)
        actions.append(action)
        observation, _, done, _ = env.step(action)
        if done:
            observation = env.reset()
    return actions


def by_hand(policy, n_episodes=2):
    """The most probable actions in the first episodes, with states that the caller carries."""
    env, actions = counting(), []
    for _ in range(n_episodes):
        observation, done = env.reset(), False
        states = {key: np.zeros((1, size), np.float32) for key, size in policy.state_sizes(ONLY).items()}
        while not done:
            batch = {key: np.asarray(value)[None] for key, value in observation.items()}
            action = policy.compute_actions(batch, ONLY, True, states=states)
            actions.append(int(action["move"][0]))
            observation, _, done, _ = env.step({"move": action["move"][0]})
    return actions


def varied(policy):
    """A policy whose most probable actions differ from step to step."""
    torch.manual_seed(1)
    for parameter in policy.parameters():
        parameter.data = torch.randn_like(parameter)
    return policy


def test_in_an_environment_a_policy_starts_each_episode_with_a_zero_state():
    env = counting()
    policy = varied(policy_for(env))
    expected = by_hand(policy)
    assert len(set(expected)) > 1

    def act(observation, env):
        return policy.compute_action(observation, env=env, actor_id=ONLY, deterministic=True)

    assert [int(action["move"]) for action in played(env, act, 8)] == expected


@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_copies_have_no_hidden_states_and_act_equally(way):
    env = counting()
    policy = varied(policy_for(env))
    expected = by_hand(policy)
    policy.compute_action(env.reset(), env=env, actor_id=ONLY)
    twin = copy.deepcopy(policy) if way == "copied" else pickle.loads(pickle.dumps(policy))
    assert by_hand(twin) == expected


def test_a_policy_repeats_its_action_for_the_same_step():
    env = counting()
    policy = varied(policy_for(env))

    def act_thrice(observation, env):
        first, second, last = (
            policy.compute_action(observation, env=env, actor_id=ONLY, deterministic=True) for _ in range(3)
        )
        (candidate, *_), (probability, *_) = policy.compute_top_action_candidates(observation, 2, None, env, ONLY)
        assert first == second == last == candidate
        assert probability > 0.2
        return last

    assert [int(action["move"]) for action in played(env, act_thrice, 8)] == by_hand(policy)


def test_hidden_states_of_two_environments_are_separate():
    first, second = counting(), counting()
    policy = varied(policy_for(first))
    expected = by_hand(policy)
    found, observations = ([], []), [first.reset(), second.reset()]
    for _ in range(3):
        for index, env in enumerate((first, second)):
            action = policy.compute_action(observations[index], env=env, actor_id=ONLY, deterministic=True)
            found[index].append(int(action["move"]))
            observations[index] = env.step(action)[0]
    assert found[0] == found[1] == expected[:3]


def test_rollouts_of_one_and_of_many_environments_act_equally():
    expected = by_hand(policy := varied(policy_for(counting())))
    single = RolloutGenerator(counting())
    policy.seed(1)
    record = single.rollout(policy, 8)
    policy.seed(1)
    together = RolloutGenerator(SequentialVectorEnv([counting])).rollout(policy, 8)
    assert [int(step.actions[0]["move"]) for step in record.step_records] == [
        int(step.actions[0]["move"][0]) for step in together.step_records
    ]
    assert len(expected) == 8


def test_logits_recorded_in_one_environment_equal_those_of_many():
    policy, found = varied(policy_for(counting())), []
    for env in (counting(), SequentialVectorEnv([counting])):
        generator = RolloutGenerator(env, record_logits=True)
        policy.seed(1)
        steps = [step for n_steps in (3, 5) for step in generator.rollout(policy, n_steps).step_records]
        found.append([np.ravel(step.logits[0]["move"]) for step in steps])
    np.testing.assert_allclose(*found, atol=1e-6)


def test_deployment_keeps_hidden_states_within_an_episode_only():
    policy = varied(policy_for(counting()))
    simulation, actions = counting().core_env, []
    with AgentDeployment(policy, counting(), deterministic=True) as deployment:
        for _ in range(2):
            state, reward, done, info = simulation.reset(), 0.0, False, {}
            while not done:
                action = deployment.act(state, reward, done, info)
                actions.append(int(action["move"]))
                state, reward, done, info = simulation.step(action)
            deployment.finish_episode(state, reward, done, info)
    assert actions == by_hand(policy)


def test_models_of_other_libraries_carry_the_recurrent_state_between_predictions():
    env = counting()
    policy = varied(policy_for(env))
    shapes = {key: tuple(space.shape or ()) for key, space in env.observation_space.spaces.items()}
    predictor = SB3Predictor(policy, ONLY, shapes, {"move": np.asarray})
    actions, observation, state, start = [], env.reset(), None, np.ones(1, np.bool_)
    for _ in range(8):
        batch = {key: np.asarray(value)[None] for key, value in observation.items()}
        before = copy.deepcopy(state)
        chosen, following = predictor.predict(batch, state, start, deterministic=True)
        assert state is None or all((state[key] == before[key]).all() for key in state)  # it is the caller's
        actions.append(int(chosen[0]))
        state, start = following, np.zeros(1, np.bool_)
        observation, _, done, _ = env.step({"move": chosen[0]})
        if done:
            observation, start = env.reset(), np.ones(1, np.bool_)
    assert actions == by_hand(policy)


def test_decisions_can_be_inspected():
    policy = varied(policy_for(counting()))
    episode = inspected_episode(counting(), policy, {"itself": policy}, None, 0.9, True)
    heads = [step[0]["heads"][0] for step in episode.decisions]
    assert [head["taken"][0] for head in heads] == by_hand(policy)[:3]
    assert [int(np.argmax(head["values"])) for head in heads] == by_hand(policy)[:3]
    assert not any(step[0]["others"][0]["differs"] for step in episode.decisions)


def test_responses_of_feed_forward_policies_contain_no_hidden_states():
    env = counting()
    model = recurrent_model(env)
    observation = {key: np.asarray(value)[None] for key, value in env.reset().items()}
    with pytest.raises(ConfigError, match="Pass the environment as `env`"):
        model.policy.compute_action(env.reset(), actor_id=ONLY)
    with pytest.raises(ConfigError, match="expected the hidden states"):
        model.policy.compute_actions(observation, ONLY)
    with pytest.raises(ConfigError, match="carries hidden states"):
        model.policy.compute_substep_policy_output(observation, ONLY)
    with pytest.raises(ConfigError, match="carries hidden states"):
        model.critic.predict_value(observation, 0)


def test_each_sub_step_has_its_own_recurrent_state():
    env = two_step_env()
    policy = policy_for(env)
    observation = env.reset()
    for step_key in ("choose", "cut", "choose"):
        action = policy.compute_action(observation, env=env, actor_id=ActorID(step_key, 0))
        observation = env.step(action)[0]
    ((_, memory, _),) = policy._hidden_states.by_context.values()
    states = memory.copied()
    assert set(states) == {ActorID("choose", 0), ActorID("cut", 0)}
    assert all(array.any() for of_actor in states.values() for array in of_actor.values())
