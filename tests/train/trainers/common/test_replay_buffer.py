"""Replay buffers: what goes in comes out, with the true observation after each step."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.replay_buffer.column_rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import fixed_actors
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from tests.train.parallelization.toy_envs import coming_and_going_env, counting_env, hierarchical_env, two_step_env


def step(number, done=False, truncated=False, with_next=True):
    return StructuredSpacesRecord(
        [
            SpacesRecord(
                ActorID(0, 0),
                observation={"x": np.array([number], np.float32)},
                action={"a": np.int64(number % 3)},
                reward=float(10 * number),
                done=done,
                info={"TimeLimit.truncated": True} if truncated else {},
                next_observation={"x": np.array([number + 1], np.float32)} if with_next else None,
            )
        ]
    )


def filled_from_env(make_env, n_envs, n_rollouts, n_steps, policy_seed=0):
    """A buffer with several short rollouts of a random policy."""
    env = SequentialVectorEnv([make_env] * n_envs)
    env.seed(list(range(n_envs)))
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(policy_seed)
    all_spaces = (env.observation_spaces_dict, env.action_spaces_dict)
    actors = fixed_actors(env.agent_counts_dict)
    buffer = UniformReplayBuffer(1000, seed=0)
    buffer.allocate(actors, *all_spaces)
    generator, rows = RolloutGenerator(env), RolloutRows(actors, *all_spaces, n_envs)
    for _ in range(n_rollouts):
        columns = generator.collect(policy, generator.allocate(n_steps))
        buffer.add_rows(rows.convert(columns, buffer.n_rows_added))
    return buffer


def everything(buffer):
    return buffer.columns.read(np.arange(len(buffer.columns)), "cpu")


def test_a_drawn_transition_is_one_that_was_added():
    buffer = UniformReplayBuffer(10, seed=0)
    buffer.add_rollout([step(number) for number in range(5)])
    for record in buffer.sample_batch(50, "cpu"):
        substep = record.substep_records[0]
        number = int(substep.observation["x"])
        assert substep.reward.item() == 10 * number
        assert substep.next_observation["x"].item() == number + 1
        assert substep.action["a"].item() == number % 3
        assert not substep.done.item()


@given(size=st.integers(1, 7), pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_full_buffer_holds_exactly_the_latest_items(size, pieces):
    buffer, number = UniformReplayBuffer(size, seed=0), 0
    for piece in pieces:
        for first in range(0, piece, size):
            n = min(size, piece - first)
            buffer.add_rollout([step(number + index) for index in range(n)])
            number += n
    held = sorted(everything(buffer).observations[0]["x"].flatten().tolist())
    assert held == [float(value) for value in range(max(0, number - size), number)]
    assert len(buffer) == min(size, number)
    assert buffer.n_added == number


def test_every_item_is_drawn_about_equally_often():
    buffer = UniformReplayBuffer(4, seed=1)
    buffer.add_rollout([step(number) for number in range(4)])
    drawn = buffer.sample_transitions(8000, "cpu").observations[0]["x"].flatten().long()
    counts = torch.bincount(drawn, minlength=4)
    assert (counts - 2000).abs().max() < 200
    assert buffer.avg_pick_per_transition == 2000


def test_the_same_seed_draws_the_same_items_and_a_restored_buffer_continues():
    first, second = (UniformReplayBuffer(8, seed=7) for _ in range(2))
    for buffer in (first, second):
        buffer.add_rollout([step(number) for number in range(8)])
    restored = UniformReplayBuffer(8, seed=99)
    restored.add_transition(step(55))
    first.sample_transitions(5, "cpu")
    second.sample_transitions(5, "cpu")
    restored.load_state_dict(first.state_dict())
    draws = [buffer.sample_transitions(20, "cpu").rewards for buffer in (first, second, restored)]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


def test_truncation_is_no_termination_in_records():
    buffer = UniformReplayBuffer(4, seed=0)
    buffer.add_rollout([step(0, done=True, truncated=True), step(5, done=True), step(7)])
    assert everything(buffer).terminated.tolist() == [False, True, False]


def test_what_followed_a_step_is_taken_from_the_step_after():
    buffer = UniformReplayBuffer(4, seed=0)
    buffer.add_rollout([step(0, with_next=False), step(4)])
    assert everything(buffer).next_observations[0]["x"].flatten().tolist() == [4.0, 5.0]


def test_a_last_step_without_its_next_observation_is_refused_unless_it_terminated():
    buffer = UniformReplayBuffer(4, seed=0)
    with pytest.raises(ConfigError, match="IdentityWithNextObservationTrajectoryProcessor"):
        buffer.add_transition(step(0, done=True, truncated=True, with_next=False))
    buffer.add_transition(step(0, done=True, with_next=False))
    assert len(buffer) == 1


def test_a_whole_rollout_can_be_one_item():
    buffer = UniformReplayBuffer(2, seed=0)
    for first in (0, 10, 20):
        trajectory = SpacesTrajectoryRecord(None)
        trajectory.step_records = [step(first + index) for index in range(3)]
        buffer.add_transition(trajectory)
    assert len(buffer) == 2
    for item in buffer.sample_batch(10, "cpu"):
        numbers = [int(record.substep_records[0].observation["x"]) for record in item.step_records]
        assert numbers in ([10, 11, 12], [20, 21, 22])
    with pytest.raises(ConfigError, match="items of 3"):
        buffer.add_transition(step(0))


def test_experience_of_another_environment_is_refused_by_key_and_shape():
    buffer = UniformReplayBuffer(4, seed=0)
    space = {0: spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32)})}
    buffer.allocate([ActorID(0, 0)], space, {0: spaces.Dict({"a": spaces.Discrete(3)})})
    with pytest.raises(EnvironmentContractError, match=r"observation `x`: expected shape \(2,\), found shape \(1,\)"):
        buffer.add_transition(step(0))


def test_a_number_that_is_not_finite_is_refused_by_step_and_key():
    broken = step(1)
    broken.substep_records[0].observation["x"] = np.array([np.nan], np.float32)
    with pytest.raises(NonFiniteError, match=r"Step 1 .* `x`"):
        UniformReplayBuffer(4, seed=0).add_rollout([step(0), broken, step(2)])


def test_an_empty_buffer_says_so():
    with pytest.raises(ConfigError, match="empty"):
        UniformReplayBuffer(4, seed=0).sample_batch(1, "cpu")


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [1, 4])
def test_after_a_truncation_the_true_last_observation_follows(n_envs, n_steps):
    """Step t of an episode observes t and is followed by t + 1: also at its end, where the next episode shows 0."""
    make_env = partial(counting_env, endings=((3, "truncated"), (2, "terminated")))
    buffer = filled_from_env(make_env, n_envs, 12, n_steps)
    batch = everything(buffer)
    time, episode = batch.observations[0]["count"].T
    next_time, next_episode = batch.next_observations[0]["count"].T
    assert torch.equal(batch.rewards[:, 0], time + 1)
    alive = ~batch.terminated
    assert torch.equal(next_time[alive], time[alive] + 1)
    assert torch.equal(next_episode[alive], episode[alive])
    assert torch.equal(batch.terminated, (episode % 2 == 1) & (time == 1))
    assert len(time) == 12 * n_steps * n_envs


def test_no_step_of_a_structured_environment_is_lost_or_doubled():
    buffer = filled_from_env(partial(two_step_env, length=3), 2, 9, 1)
    batch = everything(buffer)
    assert batch.n_substeps is None, "all steps are complete"
    choice = batch.actions[0]["item"].float()
    time = batch.observations[0]["time"][:, 0]
    assert torch.equal(batch.observations[1]["choice"][:, 1], choice), "sub-steps of one step belong together"
    assert torch.equal(batch.rewards[:, 0], torch.zeros(18))
    assert torch.equal(batch.rewards[:, 1], 10 * (time + 1) + choice)
    assert torch.equal(batch.terminated, time == 2)
    alive = ~batch.terminated
    assert torch.equal(batch.next_observations[0]["time"][alive, 0], time[alive] + 1)
    known = batch.has_next_step
    assert known[alive].sum() >= alive.sum() - 2, "only the latest step of each environment waits for the next one"
    assert not known[batch.terminated].any()
    assert torch.equal(batch.next_observations[1]["choice"][known, 0], time[known] + 1)


def test_an_episode_cut_off_in_mid_step_keeps_the_observation_of_who_was_to_act():
    buffer = filled_from_env(partial(two_step_env, breaks_at=1), 1, 5, 2)
    batch = everything(buffer)
    cut_off = batch.n_substeps == 1
    assert cut_off.any()
    assert not batch.terminated[cut_off].any()
    assert torch.equal(batch.observations[1]["choice"][cut_off, 1], batch.actions[0]["item"][cut_off].float())


def test_actors_that_come_and_go_are_refused():
    with pytest.raises(ConfigError, match="varying number of agents"):
        filled_from_env(coming_and_going_env, 1, 1, 1)
    with pytest.raises(EnvironmentContractError, match="same actors in the same order"):
        filled_from_env(hierarchical_env, 1, 5, 5)
