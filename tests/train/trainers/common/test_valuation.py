"""Advantages and targets of whole rollouts, against numbers worked out by hand."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.core.agent.returns import GAE, gae
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStepStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_columns import FinalObservationEntry, RolloutColumns
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.trainers.common.actor_critic.sequences import actor_trajectories
from maze.train.trainers.common.actor_critic.valuation import decisions_by_policy, value_rollout
from maze.train.trainers.common.observation_statistics import CentredReturns
from maze.train.trainers.impala.impala_vtrace import VTrace

ACTION_SPACE = gym.spaces.Dict({"action": gym.spaces.Discrete(2)})
GAMMA, LAMBDA = 0.9, 0.8
FLAT = ActorID(0, 0)


class ValueIsObservation(nn.Module):
    """Values that the test writes into the observations; each sub-step reads its own key."""

    def __init__(self, key):
        super().__init__()
        self.key = key
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return {"value": x[self.key] * self.scale}


class FirstActionLikely(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([np.log(3.0), 0.0], dtype=torch.float32))

    def forward(self, x):
        return {"action": self.logits.expand(*next(iter(x.values())).shape[:-1], 2)}


def spaces_of(keys):
    return {key: gym.spaces.Dict({f"v{key}": gym.spaces.Box(-1e3, 1e3, (1,), np.float32)}) for key in keys}


def build_model(keys, critic_class=TorchSharedStateCritic):
    mapper = DistributionMapper(action_space=ACTION_SPACE, distribution_mapper_config={})
    policy = TorchPolicy({key: FirstActionLikely() for key in keys}, mapper, "cpu")
    if critic_class is TorchSharedStateCritic:
        critic = critic_class({0: ValueIsObservation(f"v{keys[0]}")}, spaces_of(keys), "cpu", stack_observations=False)
    else:
        critic = critic_class({key: ValueIsObservation(f"v{key}") for key in keys}, spaces_of(keys), "cpu")
    return TorchActorCritic(policy, critic, "cpu")


def build_columns(
    ticks, last, terminated=(), truncated=None, *, rewards=None, complete=None, actor_rewards=None, n_keys=1, pauses=()
):
    """One environment; ``ticks`` and ``last`` are (actor, value), ``truncated`` maps ticks to (actor, final value),
    in the ticks ``pauses`` its autoreset is pending."""
    keys = list(range(n_keys))
    columns = RolloutColumns(spaces_of(keys), dict.fromkeys(keys, ACTION_SPACE), 1, len(ticks))
    columns.clear()
    for tick, (actor, value) in enumerate(ticks):
        substep = columns.substeps[actor.step_key]
        substep.observation_rows[substep.n_rows][f"v{actor.step_key}"][:] = value
        substep.action_rows[substep.n_rows]["action"][:] = 1
        substep.add_row(tick, None, [actor.agent_id])
    columns.rewards[:, 0] = 1.0 if rewards is None else rewards
    columns.terminated[:, 0] = [tick in terminated for tick in range(len(ticks))]
    columns.truncated[:, 0] = [tick in (truncated or {}) for tick in range(len(ticks))]
    columns.step_complete[:, 0] = True if complete is None else complete
    if actor_rewards is not None:
        columns.actor_rewards = np.array(actor_rewards, np.float32)[:, None]
    for tick, (actor, value) in (truncated or {}).items():
        observation = {f"v{actor.step_key}": np.array([value], np.float32)}
        columns.final_observations.append(FinalObservationEntry(tick, 0, actor, observation))
    actor, value = last
    columns.next_rows()[actor.step_key][f"v{actor.step_key}"][:] = value
    if pauses:
        columns.substeps[0].fill_rows(len(ticks), 0, {tick: np.array([0]) for tick in pauses})
        columns.step_complete[list(pauses)] = False
    columns.finish([actor], [None if tick in pauses else one for tick, (one, _) in enumerate(ticks)])
    return columns


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [((1,), None, (-4.68, -19.0, 11.32, 6.0)), ((), {1: (FLAT, 25.0)}, (11.52, 3.5, 11.32, 6.0))],
)
def test_flat_rollout_matches_the_fixture(terminated, truncated, expected):
    columns = build_columns([(FLAT, v) for v in (10, 20, 30, 40)], (FLAT, 50), terminated, truncated)
    (part,) = value_rollout(build_model([0]), columns, GAE(GAMMA, LAMBDA)).parts
    assert part.advantages[0].tolist() == pytest.approx(expected, abs=1e-4)
    assert part.targets[0].tolist() == pytest.approx([a + v for a, v in zip(expected, (10, 20, 30, 40), strict=True)])
    assert part.old_values[0].tolist() == [10, 20, 30, 40]
    assert part.old_log_probs[0].tolist() == pytest.approx([np.log(0.25)] * 4)
    assert not part.advantages[0].requires_grad


@pytest.mark.parametrize("n_ticks", [1023, 1024, 1025, 1100])
def test_values_of_long_rollouts_are_those_of_their_own_rows(n_ticks):
    """Many rows are evaluated in a multiple of 64, and the rest."""
    columns = build_columns([(FLAT, tick % 37) for tick in range(n_ticks)], (FLAT, 5))
    (part,) = value_rollout(build_model([0]), columns, GAE(GAMMA, LAMBDA)).parts
    assert part.old_values[0].tolist() == [tick % 37 for tick in range(n_ticks)]


def test_rows_of_several_environments_stay_together():
    columns = RolloutColumns(spaces_of([0]), {0: ACTION_SPACE}, 3, 4)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 3)).astype(np.float32)
    columns.clear()
    for tick in range(4):
        columns.substeps[0].observation_rows[tick]["v0"][:, 0] = values[tick]
        columns.substeps[0].add_row(tick, None, [0, 0, 0])
    columns.substeps[0].observation_rows[4]["v0"][:, 0] = values[4]
    columns.rewards[:] = rng.normal(size=(4, 3))
    columns.terminated[2, 1] = True
    columns.finish([FLAT] * 3, [FLAT] * 4)
    (part,) = value_rollout(build_model([0]), columns, GAE(GAMMA, LAMBDA)).parts
    expected = gae(columns.rewards, values[:4], values[1:], columns.terminated, columns.truncated, GAMMA, LAMBDA)
    assert torch.allclose(part.advantages[0].reshape(4, 3), torch.from_numpy(expected), atol=1e-5)
    assert torch.equal(part.substeps[0].observation["v0"][:, 0], torch.from_numpy(values[:4].flatten()))


def test_observations_may_have_entries_without_numbers():
    seen = gym.spaces.Dict({"nothing": gym.spaces.Box(0, 1, (0,)), "number": gym.spaces.Box(0, 1, ())})
    columns = RolloutColumns({0: seen}, {0: ACTION_SPACE}, 3, 2)
    columns.clear()
    for tick in range(2):
        columns.substeps[0].observation_rows[tick]["number"][:] = [tick, 0.3, 0.6]
        columns.substeps[0].add_row(tick, None, [0, 0, 0])
    columns.finish([FLAT] * 3, [FLAT] * 2)
    (((rows,), index),) = decisions_by_policy(columns, [], "cpu")
    assert index is None
    assert rows.observation["nothing"].shape == (6, 0)
    assert rows.observation["number"].tolist() == pytest.approx([0.0, 0.3, 0.6, 1.0, 0.3, 0.6])


FIRST, SECOND = ActorID(0, 0), ActorID(1, 0)
TWO_SUBSTEPS = [(FIRST, 10.0), (SECOND, 3.0), (FIRST, 20.0), (SECOND, 4.0)]


def test_shared_critic_values_environment_steps_and_discounts_them_once():
    columns = build_columns(
        TWO_SUBSTEPS, (FIRST, 50.0), rewards=[0, 1, 2, 3], complete=[False, True, False, True], n_keys=2
    )
    (part,) = value_rollout(build_model([0, 1]), columns, GAE(GAMMA, LAMBDA)).parts
    second = (2 + 3) + GAMMA * 50 - 20
    first = (0 + 1) + GAMMA * 20 - 10 + GAMMA * LAMBDA * second
    for advantage in part.advantages:
        assert advantage.tolist() == pytest.approx([first, second])
    assert [target.tolist() for target in part.targets] == [pytest.approx([first + 10, second + 20])]


def test_step_critic_without_own_rewards_learns_the_rewards_of_whole_steps():
    columns = build_columns(
        TWO_SUBSTEPS, (FIRST, 50.0), rewards=[0, 1, 2, 3], complete=[False, True, False, True], n_keys=2
    )
    (part,) = value_rollout(build_model([0, 1], TorchStepStateCritic), columns, GAE(GAMMA, LAMBDA)).parts
    second = 5 + GAMMA * 50 - 4  # after the rollout, the first sub-step's critic tells what is to come
    first = 1 + GAMMA * 4 - 3 + GAMMA * LAMBDA * second
    assert part.advantages[1].tolist() == pytest.approx([first, second])
    assert part.advantages[0].tolist() == pytest.approx(
        [1 + GAMMA * 20 - 10 + GAMMA * LAMBDA * (5 + GAMMA * 50 - 20), 5 + GAMMA * 50 - 20]
    )


def test_step_critic_with_own_rewards_has_a_stream_for_each_actor():
    columns = build_columns(
        TWO_SUBSTEPS,
        (FIRST, 50.0),
        rewards=[0, 3, 0, 7],
        complete=[False, True, False, True],
        actor_rewards=[1, 2, 3, 4],
        n_keys=2,
    )
    (part,) = value_rollout(build_model([0, 1], TorchStepStateCritic), columns, GAE(GAMMA, LAMBDA)).parts
    second = 3 + GAMMA * 50 - 20
    assert part.advantages[0].tolist() == pytest.approx([1 + GAMMA * 20 - 10 + GAMMA * LAMBDA * second, second])
    second = 4 + GAMMA * 4 - 4  # its own next observation is not known: the latest value stands in
    assert part.advantages[1].tolist() == pytest.approx([2 + GAMMA * 4 - 3 + GAMMA * LAMBDA * second, second])


def test_delta_critic_adds_up_to_values_of_the_same_step():
    columns = build_columns(
        TWO_SUBSTEPS, (FIRST, 50.0), rewards=[0, 1, 2, 3], complete=[False, True, False, True], n_keys=2
    )
    (part,) = value_rollout(build_model([0, 1], TorchDeltaStateCritic), columns, GAE(GAMMA, LAMBDA)).parts
    assert part.old_values[1].tolist() == [13.0, 24.0]
    assert torch.allclose(part.advantages[0] - part.advantages[1], torch.tensor([3.0, 4.0]))


def test_a_truncated_step_of_several_substeps_bootstraps_from_its_final_observation():
    columns = build_columns(
        TWO_SUBSTEPS,
        (FIRST, 50.0),
        truncated={1: (FIRST, 25.0)},
        complete=[False, True, False, True],
        rewards=[0, 1, 0, 1],
        n_keys=2,
    )
    (part,) = value_rollout(build_model([0, 1]), columns, GAE(GAMMA, LAMBDA)).parts
    assert part.advantages[0].tolist() == pytest.approx([1 + GAMMA * 25 - 10, 1 + GAMMA * 50 - 20])


IRREGULAR = [(FIRST, 10.0), (SECOND, 20.0), (SECOND, 30.0), (FIRST, 40.0)]


@pytest.mark.parametrize("critic_class", [TorchStepStateCritic])
@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [((1,), None, (-4.68, -19.0, 11.32, 6.0)), ((), {1: (SECOND, 25.0)}, (11.52, 3.5, 11.32, 6.0))],
)
def test_irregular_actors_share_one_stream_where_rewards_are_shared(critic_class, terminated, truncated, expected):
    columns = build_columns(IRREGULAR, (SECOND, 50), terminated, truncated, n_keys=2)
    assert not columns.is_dense()
    batch = value_rollout(build_model([0, 1], critic_class), columns, GAE(GAMMA, LAMBDA))
    first, second = batch.parts
    assert first.advantages[0].tolist() == pytest.approx([expected[0], expected[3]], abs=1e-4)
    assert second.advantages[0].tolist() == pytest.approx([expected[1], expected[2]], abs=1e-4)
    assert second.targets[0].tolist() == pytest.approx([expected[1] + 20, expected[2] + 30], abs=1e-4)
    assert (batch.n_rows, batch.n_steps) == (4, 4)


def test_a_shared_critic_observes_each_actor_separately_where_actors_vary():
    """It reads the first sub-step's observation only; values elsewhere are zero."""
    columns = build_columns(IRREGULAR, (FIRST, 50), n_keys=2)
    first, second = value_rollout(build_model([0, 1]), columns, GAE(GAMMA, 0.0)).parts
    assert first.advantages[0].tolist() == pytest.approx([1 + GAMMA * 0 - 10, 1 + GAMMA * 50 - 40])
    assert second.advantages[0].tolist() == pytest.approx([1 + GAMMA * 0 - 0, 1 + GAMMA * 40 - 0])


def test_irregular_actors_with_own_rewards_have_streams_of_their_own():
    columns = build_columns(IRREGULAR, (SECOND, 50), actor_rewards=[1, 2, 3, 4], n_keys=2)
    first, second = value_rollout(build_model([0, 1], TorchStepStateCritic), columns, GAE(GAMMA, LAMBDA)).parts
    last = 4 + GAMMA * 40 - 40  # the first actor's latest value stands in
    decay = GAMMA**3  # three environment steps between its decisions
    assert first.advantages[0].tolist() == pytest.approx([1 + decay * 40 - 10 + decay * LAMBDA * last, last])
    last = 3 + GAMMA**2 * 50 - 30
    assert second.advantages[0].tolist() == pytest.approx([2 + GAMMA * 30 - 20 + GAMMA * LAMBDA * last, last])


def test_delta_critic_is_refused_where_actors_vary():
    columns = build_columns(IRREGULAR, (SECOND, 50), n_keys=2)
    with pytest.raises(ConfigError, match="Use a step or a shared critic"):
        value_rollout(build_model([0, 1], TorchDeltaStateCritic), columns, GAE(GAMMA, LAMBDA))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**31))
def test_streams_of_a_single_actor_equal_generalized_advantages(n_ticks, n_envs, seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, n_ticks, n_envs))
    last = rng.normal(size=n_envs)
    terminated = rng.random((n_ticks, n_envs)) < 0.2
    truncated = (rng.random((n_ticks, n_envs)) < 0.2) & ~terminated
    final = {(int(t), int(e)): float(rng.normal()) for t, e in np.argwhere(truncated)}
    next_values = np.concatenate([values[1:], last[np.newaxis]])
    for place, value in final.items():
        next_values[place] = value
    complete = np.ones((n_ticks, n_envs), bool)
    ends = {**final, **{(n_ticks, env): float(value) for env, value in enumerate(last)}}
    own_values, next_of_actor, _ = actor_trajectories(
        values,
        complete[..., np.newaxis],
        {place: (0, value) for place, value in ends.items()},
        terminated,
        truncated,
        complete,
        GAMMA,
        has_left=np.zeros((n_ticks, n_envs, 1), bool),
    )
    values_after = next_of_actor[..., 0]
    found = gae(
        rewards, own_values[..., 0], values_after, terminated, truncated, GAMMA, LAMBDA, complete, acts=complete
    )
    expected = gae(rewards, values, next_values, terminated, truncated, GAMMA, LAMBDA)
    assert np.allclose(found, expected)


def test_minibatches_hold_every_row_once_and_keep_rows_together():
    columns = build_columns([(FLAT, float(v)) for v in range(10)], (FLAT, 0.0))
    batch = value_rollout(build_model([0]), columns, GAE(GAMMA, LAMBDA))
    generator = torch.Generator().manual_seed(0)
    minibatches = list(batch.shuffled(4, generator))
    assert [minibatch.n_rows for minibatch in minibatches] == [3, 3, 4]  # as even as possible
    rows = torch.cat([minibatch.parts[0].substeps[0].observation["v0"][:, 0] for minibatch in minibatches])
    assert rows.tolist() != list(range(10))
    assert sorted(rows.tolist()) == list(range(10))
    (part,) = batch.parts
    for minibatch in minibatches:
        index = minibatch.parts[0].substeps[0].observation["v0"][:, 0].long()
        assert torch.equal(minibatch.parts[0].advantages[0], part.advantages[0][index])
        assert torch.equal(minibatch.parts[0].targets[0], part.targets[0][index])


FLAT_TICKS = [(FLAT, 0.0)] * 4


def test_differential_returns_are_of_what_rewards_are_above_their_average():
    columns = build_columns(FLAT_TICKS, (FLAT, 0.0), rewards=[1, 2, 3, 4])
    returns = CentredReturns(GAE(gamma=1.0, gae_lambda=1.0), rate=0.5)
    (part,) = value_rollout(build_model([0]), columns, returns).parts
    assert returns.averages == [2.5]  # the first rollout's mean; then half of what they differ
    assert part.advantages[0].tolist() == [0.0, 1.5, 2.0, 1.5]
    assert part.targets[0].tolist() == [-1.25, 0.25, 0.75, 0.25]  # their constant is chosen so that the mean is 0
    columns.rewards += 2.0
    value_rollout(build_model([0]), columns, returns)
    assert returns.averages == [3.5]


def test_centred_rewards_are_scaled_to_targets_of_standard_deviation_one():
    columns = build_columns(FLAT_TICKS, (FLAT, 0.0), rewards=[1, 2, 3, 4])
    returns = CentredReturns(GAE(gamma=1.0, gae_lambda=1.0), rate=0.5, is_scaled=True)
    (part,) = value_rollout(build_model([0]), columns, returns).parts
    std = np.std([0.0, 1.5, 2.0, 1.5])
    assert returns.averages == [2.5]  # in the unit of the environment
    assert returns.std == pytest.approx(std)
    np.testing.assert_allclose(part.advantages[0], np.array([0.0, 1.5, 2.0, 1.5]) / std, atol=1e-5)
    columns.rewards *= 3.0
    (part,) = value_rollout(build_model([0]), columns, returns).parts
    spread = np.array([0.0, 1.5, 2.0, 1.5]) * 3.0  # but for a constant: the average follows by half
    np.testing.assert_allclose(part.advantages[0] * std, spread + np.arange(4, 0, -1) * 2.5, atol=1e-5)
    other = CentredReturns(GAE(gamma=1.0, gae_lambda=1.0), rate=0.5, is_scaled=True)
    other.load_state_dict(returns.state_dict())
    assert other.state_dict() == returns.state_dict()


def test_an_environment_whose_autoreset_is_pending_has_no_part_in_average_mean_and_deviation():
    columns = build_columns(
        [(FLAT, 0.0)] * 5, (FLAT, 0.0), truncated={1: (FLAT, 0.0)}, rewards=[1, 2, 0, 3, 4], pauses=[2]
    )
    returns = CentredReturns(GAE(gamma=1.0, gae_lambda=1.0), rate=0.5, is_scaled=True)
    (part,) = value_rollout(build_model([0]), columns, returns).parts
    assert returns.averages == [2.5]
    unscaled = [-1.5 - 0.5, -0.5, 0.5 + 1.5, 1.5]  # two episodes of what rewards are above 2.5
    assert returns.std == pytest.approx(np.std(unscaled))
    expected = (np.array(unscaled) - np.mean(unscaled)) / np.std(unscaled)
    np.testing.assert_allclose(part.targets[0], expected, atol=1e-5)


def test_the_scale_of_rewards_does_not_matter_where_they_are_centred_and_scaled():
    found = []
    for scale in (1.0, 1000.0):
        columns = build_columns(FLAT_TICKS, (FLAT, 0.0), rewards=[1, 5, 2, 3])
        columns.rewards *= scale
        returns = CentredReturns(GAE(GAMMA, LAMBDA), rate=0.1, is_scaled=True)
        found.append([value_rollout(build_model([0]), columns, returns).parts[0].targets[0] for _ in range(3)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("returns", [GAE(GAMMA, LAMBDA), VTrace(GAMMA)])
def test_a_constant_added_to_all_rewards_changes_nothing_where_they_are_centred(returns):
    found = []
    for constant in (0.0, 100.0):
        columns = build_columns([(FLAT, v) for v in (1, 2, 3, 4)], (FLAT, 5.0), rewards=[1, 5, 2, 3])
        columns.rewards += constant
        columns.substeps[0].logits = {"action": np.zeros((4, 1, 2), np.float32)}
        (part,) = value_rollout(build_model([0]), columns, CentredReturns(returns, rate=1.0)).parts
        found.append(part.advantages[0])
    assert torch.allclose(*found, atol=1e-4)


def test_the_average_is_that_of_environment_steps_and_of_each_reward_that_is_predicted():
    ticks = {"rewards": [0, 1, 2, 3], "complete": [False, True, False, True], "n_keys": 2}
    returns = CentredReturns(GAE(gamma=1.0, gae_lambda=1.0), rate=1.0)
    zero = [(actor, 0.0) for actor, _ in TWO_SUBSTEPS]
    (part,) = value_rollout(build_model([0, 1]), build_columns(zero, (FIRST, 0.0), **ticks), returns).parts
    assert returns.averages == [3.0]
    assert [advantage.tolist() for advantage in part.advantages] == [[0.0, 2.0]] * 2
    returns = CentredReturns(GAE(gamma=1.0, gae_lambda=1.0), rate=1.0)
    columns = build_columns(zero, (FIRST, 0.0), **ticks, actor_rewards=[1, 2, 3, 8])
    (part,) = value_rollout(build_model([0, 1], TorchStepStateCritic), columns, returns).parts
    assert returns.averages == [2.0, 5.0]
    assert [advantage.tolist() for advantage in part.advantages] == [[0.0, 1.0], [0.0, 3.0]]


def test_rewards_of_terminating_episodes_are_not_centred():
    columns = build_columns(FLAT_TICKS, (FLAT, 0.0), terminated=(2,))
    with pytest.raises(ConfigError, match=r"algorithm.reward_centering: .* but an episode ended by itself"):
        value_rollout(build_model([0]), columns, CentredReturns(GAE(GAMMA, LAMBDA), rate=0.1))
