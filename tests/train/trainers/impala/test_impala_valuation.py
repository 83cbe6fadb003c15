"""Advantages and targets of whole batches: ends of episodes, importance weights, sub-steps."""

from functools import partial

import numpy as np
import pytest
import torch

from maze.core.agent.returns import GAE
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStepStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_columns import FinalObservationEntry, RolloutColumns
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.actor_critic.valuation import value_rollout
from maze.train.trainers.impala.impala_vtrace import VTrace
from tests.train.parallelization.toy_envs import coming_and_going_env, hierarchical_env, two_step_env
from tests.train.trainers.common.test_structured_training import build_model as build_structured_model
from tests.train.trainers.common.test_valuation import ACTION_SPACE, build_model, spaces_of

GAMMA, LAMBDA = 0.9, 0.8
FLAT, FIRST, SECOND = ActorID(0, 0), ActorID(0, 0), ActorID(1, 0)
ON_POLICY = [np.log(3.0), 0.0]
"""The logits of the test model; action 1 has probability 1/4."""


def build_columns(
    ticks,
    last,
    terminated=(),
    truncated=None,
    *,
    rewards=None,
    complete=None,
    logits=None,
    actor_rewards=None,
    n_keys=1,
):
    """One environment; ``ticks`` and ``last`` are (actor, value), ``truncated`` maps ticks to (actor, final value)."""
    keys = list(range(n_keys))
    shapes = {key: {"action": (2,)} for key in keys}
    columns = RolloutColumns(spaces_of(keys), dict.fromkeys(keys, ACTION_SPACE), 1, len(ticks), shapes)
    columns.clear()
    for tick, (actor, value) in enumerate(ticks):
        substep = columns.substeps[actor.step_key]
        row = substep.n_rows
        substep.observation_rows[row][f"v{actor.step_key}"][:] = value
        substep.action_rows[row]["action"][:] = 1
        substep.logits_rows[row]["action"][:] = ON_POLICY if logits is None else logits[tick]
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
    columns.finish([actor], [tick_actor for tick_actor, _ in ticks])
    return columns


def targets_minus_values(model, columns, **options):
    batch = value_rollout(model, columns, VTrace(GAMMA, **{"trace_lambda": LAMBDA, **options}))
    (part,) = batch.parts
    return [(target - old).tolist() for target, old in zip(part.targets, part.old_values, strict=True)]


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [((1,), None, (-4.68, -19.0, 11.32, 6.0)), ((), {1: (FLAT, 25.0)}, (11.52, 3.5, 11.32, 6.0))],
)
def test_flat_batch_on_policy_matches_the_fixture(terminated, truncated, expected):
    columns = build_columns([(FLAT, v) for v in (10, 20, 30, 40)], (FLAT, 50), terminated, truncated)
    (found,) = targets_minus_values(build_model([0]), columns)
    assert found == pytest.approx(expected, abs=1e-4)


def test_importance_weights_compare_the_learning_policy_with_the_recorded_logits():
    # the actor gave action 1 a probability of 1/2 where the learner gives it 1/4: rho = 1/2
    columns = build_columns([(FLAT, 10.0), (FLAT, 20.0)], (FLAT, 50.0), logits=[[0.0, 0.0], ON_POLICY])
    batch = value_rollout(build_model([0]), columns, VTrace(GAMMA))
    (part,) = batch.parts
    second = 1 + GAMMA * 50 - 20
    first = 0.5 * (1 + GAMMA * 20 - 10) + GAMMA * 0.5 * second
    assert (part.targets[0] - part.old_values[0]).tolist() == pytest.approx([first, second])
    assert part.advantages[0].tolist() == pytest.approx([0.5 * (1 + GAMMA * (20 + second) - 10), second])
    assert part.old_log_probs[0].exp().tolist() == pytest.approx([0.5, 0.25])
    assert not part.advantages[0].requires_grad
    assert part.outputs[1].values[0].requires_grad  # evaluated once, for targets and for the loss


TWO_SUBSTEPS = [(FIRST, 10.0), (SECOND, 3.0), (FIRST, 20.0), (SECOND, 4.0)]
COMPLETE = [False, True, False, True]


@pytest.mark.parametrize("critic_class", [TorchSharedStateCritic, TorchStepStateCritic, TorchDeltaStateCritic])
def test_sub_steps_on_policy_have_the_targets_of_generalized_advantage_estimation(critic_class):
    columns = build_columns(TWO_SUBSTEPS, (FIRST, 50.0), rewards=[0, 1, 2, 3], complete=COMPLETE, n_keys=2)
    model = build_model([0, 1], critic_class)
    (expected,) = value_rollout(model, columns, GAE(GAMMA, LAMBDA)).parts
    (part,) = value_rollout(model, columns, VTrace(GAMMA, trace_lambda=LAMBDA)).parts
    assert torch.allclose(part.targets[0], expected.targets[0])
    assert len(part.advantages) == 2
    if critic_class is TorchStepStateCritic:
        assert torch.allclose(part.targets[1], expected.targets[1])


def test_a_shared_critic_weighs_the_whole_step_and_discounts_it_once():
    logits = [[0.0, 0.0], [0.0, 0.0], ON_POLICY, ON_POLICY]  # rho = 1/2 * 1/2 in the first step
    columns = build_columns(
        TWO_SUBSTEPS, (FIRST, 50.0), rewards=[0, 1, 2, 3], complete=COMPLETE, logits=logits, n_keys=2
    )
    (part,) = value_rollout(build_model([0, 1]), columns, VTrace(GAMMA)).parts
    second = (2 + 3) + GAMMA * 50 - 20
    first = 0.25 * ((0 + 1) + GAMMA * 20 - 10) + GAMMA * 0.25 * second
    assert (part.targets[0] - part.old_values[0]).tolist() == pytest.approx([first, second])
    for advantage in part.advantages:
        assert advantage.tolist() == pytest.approx([0.25 * (1 + GAMMA * (20 + second) - 10), second])


@pytest.mark.parametrize("is_terminated", [True, False])
def test_an_episode_that_ends_within_a_step_is_followed_sub_step_by_sub_step(is_terminated):
    """The episode ends with the first sub-step of the second step, so the order of actors is not fixed."""
    ticks = [(FIRST, 10.0), (SECOND, 3.0), (FIRST, 20.0), (FIRST, 30.0), (SECOND, 5.0)]
    columns = build_columns(
        ticks,
        (FIRST, 50.0),
        terminated=(2,) if is_terminated else (),
        truncated=None if is_terminated else {2: (SECOND, 7.0)},
        rewards=[0, 1, 2, 3, 4],
        complete=[False, True, False, False, True],
        n_keys=2,
    )
    assert not columns.is_dense()
    model = build_model([0, 1], TorchStepStateCritic)
    batch = value_rollout(model, columns, VTrace(GAMMA))
    found = {part.substeps[0].actor_id.step_key: (part.targets[0]).tolist() for part in batch.parts}
    after = 0.0 if is_terminated else GAMMA * 7.0
    third = 2 + after
    second = 1 + GAMMA * third
    fifth = 4 + GAMMA * 50
    assert found == {
        0: pytest.approx([0 + second, third, 3 + fifth]),
        1: pytest.approx([second, fifth]),
    }


def test_actors_with_own_rewards_weigh_all_decisions_up_to_their_next():
    """The second actor's second action has half the probability under the learner: rho = 1/2 for both actors."""
    ticks = [(FIRST, 10.0), (SECOND, 20.0), (SECOND, 30.0), (FIRST, 40.0)]
    logits = [ON_POLICY, ON_POLICY, [0.0, 0.0], ON_POLICY]
    columns = build_columns(ticks, (SECOND, 50.0), actor_rewards=[1, 2, 3, 4], logits=logits, n_keys=2)
    batch = value_rollout(build_model([0, 1], TorchStepStateCritic), columns, VTrace(GAMMA))
    first, second = ((part.targets[0] - part.old_values[0]).tolist() for part in batch.parts)
    last = 4 + GAMMA * 40 - 40  # its own next observation is not known: the latest value stands in
    assert first == pytest.approx([0.5 * (1 + GAMMA**3 * 40 - 10) + GAMMA**3 * 0.5 * last, last])
    last = 0.5 * (3 + GAMMA**2 * 50 - 30)
    assert second == pytest.approx([2 + GAMMA * 30 - 20 + GAMMA * last, last])


def test_the_weight_of_an_agent_that_leaves_ends_with_its_environment_step():
    agent, other = ActorID(0, 0), ActorID(0, 1)
    columns = build_columns(
        [(agent, 4), (other, 6), (other, 8)],
        (other, 0),
        complete=[False, True, True],
        logits=np.zeros((3, 2)),  # both actions had probability 1/2, that of the taken one is 1/4 by now
        actor_rewards=[8.0, 0.0, 0.0],
    )
    columns.actor_done = np.array([[True], [False], [False]])
    batch = value_rollout(build_model([0], TorchStepStateCritic), columns, VTrace(1.0))
    (part,) = batch.parts
    last = 0.5 * (0 - 8)
    # its own decision and that of the other agent in the same step: 1/4
    assert (part.targets[0] - part.old_values[0]).tolist() == pytest.approx(
        [0.25 * (8 - 4), 0.5 * (8 - 6) + 0.5 * last, last]
    )


@pytest.mark.parametrize("trace_lambda", [1.0, 0.8, 0.0])
@pytest.mark.parametrize("critic", ["Shared", "Step"])
@pytest.mark.parametrize("make_env", [hierarchical_env, coming_and_going_env, partial(two_step_env, 3, 1)])
def test_on_policy_targets_equal_generalized_advantage_estimation_with_varying_actors(make_env, critic, trace_lambda):
    env = SequentialVectorEnv([make_env] * 3)
    env.seed([1, 2, 3])
    model = build_structured_model(env, critic)
    generator = RolloutGenerator(env, record_logits=True)
    columns = generator.collect(model.policy, generator.allocate(41, model.policy))
    assert not columns.is_dense()
    expected = value_rollout(model, columns, GAE(GAMMA, trace_lambda))
    found = value_rollout(model, columns, VTrace(GAMMA, trace_lambda=trace_lambda))
    for part, of_gae in zip(found.parts, expected.parts, strict=True):
        assert torch.allclose(part.targets[0], of_gae.targets[0], atol=1e-4)
        if trace_lambda == 1.0:
            assert torch.allclose(part.advantages[0], of_gae.advantages[0], atol=1e-4)


def test_a_delta_critic_needs_fixed_sub_steps():
    ticks = [(FIRST, 1.0), (FIRST, 2.0), (SECOND, 3.0)]
    columns = build_columns(ticks, (FIRST, 0.0), complete=[True, False, True], n_keys=2)
    with pytest.raises(ConfigError, match=r"model\.critic: a delta critic"):
        value_rollout(build_model([0, 1], TorchDeltaStateCritic), columns, VTrace(GAMMA))
