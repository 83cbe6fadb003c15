"""Prioritised replay and returns over several steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.env.structured_env import ActorID
from maze.train.trainers.common.replay_buffer.transitions import TransitionColumns, TransitionRows, usual_steps
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import (
    PrioritizedReplayBuffer,
    UniformReplayBuffer,
)

OBSERVATIONS = {0: spaces.Dict(x=spaces.Box(-99, 99, (1,), np.float32))}
ACTIONS = {0: spaces.Dict(action=spaces.Discrete(2))}
ACTOR = ActorID(0, 0)


def rows(first: int, rewards, terminated, follows) -> TransitionRows:
    """Row i is seen in state i and leads to state i + 1."""
    n = len(rewards)
    states = np.arange(first, first + n, dtype=np.float32)[:, None]
    return TransitionRows(
        observations=[{"x": states}],
        actions=[{"action": np.zeros(n, np.int64)}],
        rewards=np.array(rewards, np.float32)[:, None],
        next_observation={"x": states + 1},
        terminated=np.array(terminated, np.bool_),
        n_substeps=np.ones(n, np.int64),
        follows=np.array(follows),
    )


def test_every_step_of_a_large_buffer_is_drawn_by_its_priority():
    buffer, n = PrioritizedReplayBuffer(3000, seed=0, alpha=1.0), 2500
    buffer.allocate([ACTOR], OBSERVATIONS, ACTIONS)
    buffer.add_rows(rows(0, [0.0] * n, [False] * n, [-1] * n))
    buffer.sample_transitions(1, "cpu")
    errors = np.zeros(n)
    errors[[5, 1023, 1024, 2499]] = [1.0, 2.0, 3.0, 4.0]
    buffer.set_errors(np.arange(n), errors)
    drawn = np.concatenate([buffer.sample_transitions(50, "cpu").slots for _ in range(100)])
    share = np.bincount(drawn, minlength=n) / len(drawn)
    np.testing.assert_allclose(share[[5, 1023, 1024, 2499]], [0.1, 0.2, 0.3, 0.4], atol=0.02)
    buffer.set_errors(np.array([2499]), np.array([0.0]))
    drawn = np.concatenate([buffer.sample_transitions(50, "cpu").slots for _ in range(100)])
    np.testing.assert_allclose(np.bincount(drawn, minlength=n)[1024] / len(drawn), 0.5, atol=0.02)


def test_steps_are_sampled_proportionally_to_the_power_of_their_errors_with_importance_weights():
    buffer = PrioritizedReplayBuffer(8, seed=0, alpha=0.5, beta=1.0)
    buffer.allocate([ACTOR], OBSERVATIONS, ACTIONS)
    buffer.add_rows(rows(0, [0.0] * 4, [False] * 4, [-1] * 4))
    buffer.sample_transitions(2, "cpu")
    buffer.set_errors(np.arange(4), np.array([0.0, 1.0, 4.0, 9.0]))  # roots 0, 1, 2, 3
    drawn = np.concatenate([buffer.sample_transitions(60, "cpu").slots for _ in range(100)])
    share = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(share, [0.0, 1 / 6, 2 / 6, 3 / 6], atol=0.02)
    batch = buffer.sample_transitions(60, "cpu")
    weights = {int(slot): float(weight) for slot, weight in zip(batch.slots, batch.weights, strict=True)}
    assert weights[1] / weights[3] == pytest.approx(3.0, rel=1e-3)
    assert max(weights.values()) == pytest.approx(1.0)


def test_new_steps_have_the_highest_priority_and_replace_the_oldest():
    buffer = PrioritizedReplayBuffer(4, seed=0, alpha=1.0)
    buffer.allocate([ACTOR], OBSERVATIONS, ACTIONS)
    buffer.add_rows(rows(0, [0.0] * 4, [False] * 4, [-1] * 4))
    buffer.sample_transitions(1, "cpu")
    buffer.set_errors(np.arange(4), np.array([7.0, 0.0, 0.0, 0.0]))
    buffer.add_rows(rows(4, [0.0] * 2, [False] * 2, [-1] * 2))  # the step with error 7 is gone
    drawn = np.concatenate([buffer.sample_transitions(50, "cpu").slots for _ in range(20)])
    np.testing.assert_allclose(np.bincount(drawn, minlength=4)[:2] / len(drawn), [0.5, 0.5], atol=0.02)


def test_a_restored_buffer_samples_the_same_items():
    buffers = [PrioritizedReplayBuffer(6, seed=seed) for seed in (1, 2)]
    for buffer in buffers:
        buffer.allocate([ACTOR], OBSERVATIONS, ACTIONS)
    buffers[0].add_rows(rows(0, [0.0] * 5, [False] * 5, [-1] * 5))
    buffers[0].sample_transitions(4, "cpu")
    buffers[0].set_errors(np.arange(3), np.array([1.0, 2.0, 3.0]))
    buffers[1].load_state_dict(buffers[0].state_dict())
    for _ in range(3):
        one, other = (buffer.sample_transitions(10, "cpu") for buffer in buffers)
        np.testing.assert_array_equal(one.slots, other.slots)
        assert torch.equal(one.weights, other.weights)


def test_steps_of_a_uniform_buffer_get_the_priority_of_new_ones():
    uniform, prioritized = UniformReplayBuffer(6, seed=1), PrioritizedReplayBuffer(6, seed=2)
    for buffer in (uniform, prioritized):
        buffer.allocate([ACTOR], OBSERVATIONS, ACTIONS)
    uniform.add_rows(rows(0, [0.0] * 5, [False] * 5, [-1] * 5))
    prioritized.load_state_dict(uniform.state_dict())
    drawn = np.concatenate([prioritized.sample_transitions(50, "cpu").slots for _ in range(20)])
    np.testing.assert_allclose(np.bincount(drawn, minlength=6) / len(drawn), [*[0.2] * 5, 0.0], atol=0.02)


def test_n_step_returns_match_hand_worked_values():
    columns = TransitionColumns(8, [ACTOR], *usual_steps([ACTOR], OBSERVATIONS, ACTIONS))
    # two episodes: 0 1 2 ends, 3 4 is cut off after 4, and 5 begins anew
    columns.add(rows(0, [1, 2, 3, 4, 5, 6], [False, False, True, False, False, False], [-1, 0, 1, -1, 3, -1]))
    found = columns.n_step_returns(np.arange(6), 3, 0.5, "cpu")
    assert found.rewards[:, 0].tolist() == [1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3, 4 + 0.5 * 5, 5, 6]
    assert found.terminated.tolist() == [True, True, True, False, False, False]
    assert found.discounts.tolist() == [0.125, 0.25, 0.5, 0.25, 0.5, 0.5]
    assert found.next_observations[0]["x"][:, 0].tolist() == [3, 3, 3, 5, 5, 6]
    one_step = columns.n_step_returns(np.arange(6), 1, 0.5, "cpu")
    assert one_step.rewards[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert one_step.next_observations[0]["x"][:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_steps_that_were_overwritten_are_not_followed():
    columns = TransitionColumns(3, [ACTOR], *usual_steps([ACTOR], OBSERVATIONS, ACTIONS))
    columns.add(rows(0, [1, 2, 3], [False] * 3, [-1, 0, 1]))
    columns.add(rows(3, [4, 5], [False] * 2, [2, 3]))  # rows 3, 4 lie where 0, 1 did
    found = columns.n_step_returns(np.array([2, 0, 1]), 3, 1.0, "cpu")
    assert found.rewards[:, 0].tolist() == [3 + 4 + 5, 4 + 5, 5]
