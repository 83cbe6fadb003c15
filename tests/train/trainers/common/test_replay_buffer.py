"""Replay buffers: what goes in comes out, with the true observation after each step."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.common.replay_buffer.rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import fixed_actors
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from maze.train.trainers.common.replay_trainer import fill_by_policy
from tests.train.parallelization.toy_envs import (
    Observe,
    PassOn,
    ToyCoreEnv,
    TwoStepCoreEnv,
    coming_and_going_env,
    counting_env,
    hierarchical_env,
    two_step_env,
)


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


def filled_from_env(make_env, n_envs, n_rollouts, n_steps, policy_seed=0, item_length=1):
    """A buffer with several short rollouts of a random policy."""
    env = SequentialVectorEnv([make_env] * n_envs)
    env.seed(list(range(n_envs)))
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(policy_seed)
    all_spaces = (env.observation_spaces_dict, env.action_spaces_dict)
    actors = fixed_actors(env.agent_counts_dict)
    buffer = UniformReplayBuffer(1000, seed=0)
    buffer.allocate(actors, *all_spaces, item_length)
    generator, rows = RolloutGenerator(env), RolloutRows(actors, *all_spaces, n_envs, item_length)
    for _ in range(n_rollouts):
        columns = generator.collect(policy, generator.allocate(n_steps))
        buffer.add_rows(rows.convert(columns, buffer.n_rows_added))
    return buffer


def everything(buffer):
    return buffer.columns.read(np.arange(len(buffer.columns)), "cpu")


def test_a_sampled_transition_was_added_before():
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


def test_every_item_is_sampled_about_equally_often():
    buffer = UniformReplayBuffer(4, seed=1)
    buffer.add_rollout([step(number) for number in range(4)])
    drawn = buffer.sample_transitions(8000, "cpu").observations[0]["x"].flatten().long()
    counts = torch.bincount(drawn, minlength=4)
    assert (counts - 2000).abs().max() < 200
    assert buffer.avg_pick_per_transition == 2000


def test_the_same_seed_samples_the_same_items_and_a_restored_buffer_continues():
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


def test_next_observations_are_taken_from_the_following_step():
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


def test_empty_buffer_is_an_error():
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


def test_episode_truncated_within_a_step_keeps_the_observation_of_the_next_actor():
    buffer = filled_from_env(partial(two_step_env, breaks_at=1), 1, 5, 2)
    batch = everything(buffer)
    cut_off = batch.n_substeps == 1
    assert cut_off.any()
    assert not batch.terminated[cut_off].any()
    assert torch.equal(batch.observations[1]["choice"][cut_off, 1], batch.actions[0]["item"][cut_off].float())


def test_buffer_items_contain_the_taken_sub_steps():
    buffer = filled_from_env(partial(two_step_env, breaks_at=1), 1, 5, 2)
    taken = {len(item.substep_records) for item in buffer.sample_batch(60, "cpu")}
    assert taken == {1, 2}


def test_varying_numbers_of_actors_are_refused():
    with pytest.raises(ConfigError, match="varying number of agents"):
        filled_from_env(coming_and_going_env, 1, 1, 1)
    with pytest.raises(EnvironmentContractError, match="same actors in the same order"):
        filled_from_env(hierarchical_env, 1, 5, 5)


class StaysCoreEnv(TwoStepCoreEnv):
    """Cuts its episodes off, and leaves its actor as it is when it does."""

    def step(self, maze_action):
        actor = self.actor
        state, reward, done, info = super().step(maze_action)
        if done:
            self.actor = actor
        return state, reward, done, {"TimeLimit.truncated": True} if done else info


class TwoAgentsCoreEnv(ToyCoreEnv):
    """Two agents of one sub-step key take turns; the episode is cut off with the second one still to act."""

    step_keys = ("agent",)
    agent_counts_dict = {"agent": 2}

    def reset(self):
        self.time, self.actor = 0, ActorID("agent", 0)
        return self.get_maze_state()

    def step(self, maze_action):
        if self.actor.agent_id == 0:
            self.actor = ActorID("agent", 1)
            return self.get_maze_state(), 0.0, False, {}
        self.time += 1
        done = self.time == 3
        self.actor = ActorID("agent", 1 if done else 0)
        return self.get_maze_state(), 1.0, done, {"TimeLimit.truncated": True} if done else {}

    def get_maze_state(self):
        return {"self": [self.time, self.actor.agent_id]}


def stays_env(length=3):
    env = two_step_env()
    return MazeEnv(StaysCoreEnv(length), env.action_conversion_dict, env.observation_conversion_dict)


def two_agents_env():
    return MazeEnv(
        TwoAgentsCoreEnv(),
        {"agent": PassOn(spaces.Dict({"move": spaces.Discrete(2)}))},
        {"agent": Observe(spaces.Dict({"self": spaces.Box(0, 9, (2,), np.float32)}))},
    )


@pytest.mark.parametrize(("make_env", "key"), [(stays_env, "time"), (two_agents_env, "self")])
def test_a_final_observation_of_another_actor_is_not_used_for_bootstrapping(make_env, key):
    buffer = filled_from_env(make_env, 2, 6, 3)
    batch = everything(buffer)
    time, following = batch.observations[0][key][:, 0], batch.next_observations[0][key]
    assert torch.equal(following[:, 0], time + 1)
    assert set(time.tolist()) == {0.0, 1.0}, "the step that was cut off is left out"
    if key == "self":
        assert not following[:, 1].any(), "the next to act is the first agent"
    assert not batch.has_next_step[time == 1].any()


def test_environments_without_any_step_to_keep_are_named():
    env = SequentialVectorEnv([partial(stays_env, length=1)])
    policy = RandomPolicy(env.action_spaces_dict)
    with pytest.raises(ConfigError, match="none of 1,000 environment steps can be kept in a replay buffer"):
        fill_by_policy(UniformReplayBuffer(50, seed=0), policy, 1000, seed=1, item_length=1, env=env)


def structured(numbers, after, truncated):
    """A step of two actors."""
    first, second = numbers
    return StructuredSpacesRecord(
        [
            SpacesRecord(ActorID("a", 0), {"x": np.float32([first])}, {"u": 0}, 0.0, False, {}),
            SpacesRecord(
                ActorID("b", 0), {"y": np.float32([second])}, {"v": 1}, 1.0, True,
                {"TimeLimit.truncated": truncated}, next_observation=after,
            ),
        ]
    )  # fmt: skip


def test_a_recorded_observation_of_another_actor_is_refused_where_it_is_evaluated():
    buffer = UniformReplayBuffer(4, seed=0)
    with pytest.raises(EnvironmentContractError, match=r"Step 0 .*keys \['y'\], expected .*'a'.*\['x'\]"):
        buffer.add_transition(structured((1, 2), {"y": np.float32([9])}, truncated=True))
    buffer.add_transition(structured((1, 2), {"y": np.float32([9])}, truncated=False))
    buffer.add_transition(structured((3, 4), {"x": np.float32([9])}, truncated=True))
    assert everything(buffer).next_observations[0]["x"].flatten().tolist() == [1.0, 9.0]


def test_more_steps_than_there_is_room_for_leave_the_latest():
    first, *others = (structured((0, number), None, truncated=False) for number in (5, 6, 7, 8, 9))
    del others[1].substep_records[1]
    others[1].substep_records[0].done = True  # the second actor observed nothing
    buffer = UniformReplayBuffer(2, seed=0)
    buffer.add_transition(first)
    buffer.add_rollout(others)
    assert buffer.columns.observations[1]["y"].flatten().tolist() == [9.0, 8.0]


HEADS = {
    "push": spaces.Box(np.float32([-1, -np.inf]), np.float32([1, 2]), dtype=np.float32),
    "move": spaces.Discrete(5),
    "pick": spaces.MultiDiscrete([2, 3]),
    "use": spaces.MultiBinary(2),
}


def step_with_actions(**actions):
    record = step(0)
    valid = {"push": np.zeros(2, np.float32), "move": 4, "pick": np.array([1, 2]), "use": np.array([0, 1])}
    record.substep_records[0].action = {**valid, **actions}
    return record


def buffer_for_heads():
    buffer = UniformReplayBuffer(8, seed=0)
    observation = {0: spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (1,), np.float32)})}
    buffer.allocate([ActorID(0, 0)], observation, {0: spaces.Dict(HEADS)})
    return buffer


def test_continuous_actions_of_demonstrations_are_clipped_as_they_were_for_the_environment():
    buffer = buffer_for_heads()
    drawn = np.float32([5, -7])
    buffer.add_rollout([step_with_actions(), step_with_actions(push=drawn), step_with_actions(push=[-3.0, 9.0])])
    assert everything(buffer).actions[0]["push"].tolist() == [[0, 0], [1, -7], [-1, 2]]
    assert drawn.tolist() == [5, -7]


@pytest.mark.parametrize(
    ("head", "value"),
    [("move", 5), ("move", -1), ("move", 1.5), ("pick", np.array([1, 3])), ("use", np.array([2, 0]))],
)
def test_an_action_that_the_space_does_not_have_is_refused_by_step_and_head(head, value):
    buffer = buffer_for_heads()
    with pytest.raises(EnvironmentContractError, match=rf"Step 1 .*`{head}` is .*, expected an element of "):
        buffer.add_rollout([step_with_actions(), step_with_actions(**{head: value})])
    assert len(buffer) == 0


@pytest.mark.parametrize("make_buffer", [buffer_for_heads, lambda: UniformReplayBuffer(8, seed=0)])
def test_an_action_that_is_no_number_is_refused(make_buffer):
    with pytest.raises(NonFiniteError, match=r"Step 1 .*`push`, index \[1\] is nan"):
        make_buffer().add_rollout([step_with_actions(), step_with_actions(push=np.float32([0, np.nan]))])


def test_the_last_observation_of_a_terminated_episode_is_not_evaluated():
    """It may be that no action is allowed there."""
    buffer = UniformReplayBuffer(4, seed=0)
    buffer.add_rollout([step(0), step(1, done=True), step(5, done=True, truncated=True)])
    assert everything(buffer).next_observations[0]["x"].flatten().tolist() == [1.0, 1.0, 6.0]


class BreaksAnywhereCoreEnv(TwoStepCoreEnv):
    """Episodes are cut off in different steps, so that environments get out of step with one another."""

    def reset(self):
        self.breaks_at = int(self.rng.integers(0, 4))
        return super().reset()


def breaks_anywhere_env():
    env = two_step_env()
    return MazeEnv(BreaksAnywhereCoreEnv(50), env.action_conversion_dict, env.observation_conversion_dict)


@pytest.mark.parametrize(
    "make_env",
    [partial(two_step_env, length=50), partial(two_step_env, length=5, breaks_at=2), breaks_anywhere_env],
    ids=["no end", "in lockstep", "out of step"],
)
def test_whole_rollouts_are_successive_steps_of_one_environment(make_env):
    length = 3
    buffer = filled_from_env(make_env, 2, 7, length, item_length=length)
    assert len(buffer.columns) == len(buffer) * length
    assert len(buffer) >= 10
    time = buffer.columns.observations[0]["time"][: len(buffer.columns), 0].reshape(-1, length)
    after = buffer.columns.next_observation["time"][: len(buffer.columns), 0].reshape(-1, length)
    complete = buffer.columns.n_substeps[: len(buffer.columns)].reshape(-1, length) == 2
    goes_on = complete[:, :-1]
    assert np.array_equal(time[:, 1:][goes_on], after[:, :-1][goes_on])
    assert not time[:, 1:][~goes_on].any(), "a new episode"
    linked = np.flatnonzero(buffer.columns.next_row[: len(buffer.columns)] >= 0)
    following = buffer.columns.next_row[linked]
    flat_time, flat_after = time.ravel(), after.ravel()
    assert np.array_equal(flat_time[following], flat_after[linked])
    inner = linked[linked % length < length - 1]
    assert np.array_equal(buffer.columns.next_row[inner], inner + 1)


def test_a_saved_buffer_of_rollouts_of_another_length_is_refused():
    action_spaces = {0: spaces.Dict({"a": spaces.Discrete(3)})}
    buffers = []
    for size, length in ((6, 2), (4, 3)):
        buffer = UniformReplayBuffer(size, seed=0)
        observation_spaces = {0: spaces.Dict({"x": spaces.Box(-1, 1, (1,), np.float32)})}
        buffer.allocate([ActorID(0, 0)], observation_spaces, action_spaces, length)
        buffers.append(buffer)
    with pytest.raises(ConfigError, match=r"n_rollout_steps: .* items of 2, .* items of 3"):
        buffers[1].load_state_dict(buffers[0].state_dict())


def test_rows_that_wait_survive_saving():
    """The third step of each environment is under way, or waits for its item, between the rollouts."""
    env = SequentialVectorEnv([breaks_anywhere_env] * 2)
    env.seed([0, 1])
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(0)
    all_spaces = (env.observation_spaces_dict, env.action_spaces_dict)
    actors, generator = fixed_actors(env.agent_counts_dict), RolloutGenerator(env)
    kept, passed_on = (RolloutRows(actors, *all_spaces, 2, item_length=3) for _ in range(2))
    number = 0
    for _ in range(6):
        columns = generator.collect(policy, generator.allocate(2))
        loaded = RolloutRows(actors, *all_spaces, 2, item_length=3)
        loaded.load_state(passed_on.state())
        passed_on = loaded
        first, second = kept.convert(columns, number), passed_on.convert(columns, number)
        number += len(first)
        assert first.follows.tolist() == second.follows.tolist()
        assert np.array_equal(first.rewards, second.rewards)
    assert number > 12


def test_an_actor_without_observation_gets_an_element_of_its_space():
    """Nobody learns from it, but networks evaluate it: a mask without any valid action would stop the training."""
    observation_spaces = {
        "a": spaces.Dict({"x": spaces.Box(0, 1, (1,), np.float32)}),
        "b": spaces.Dict(
            {
                "mask": spaces.Box(0, 1, (3,), np.float32), "bits": spaces.MultiBinary(2), "kind": spaces.Discrete(3),
                "size": spaces.Box(-np.inf, np.inf, (1,), np.float32), "far": spaces.Box(5, 7, (1,), np.float32),
            }
        ),
    }  # fmt: skip
    actors = [ActorID("a", 0), ActorID("b", 0)]
    buffer = UniformReplayBuffer(4, seed=0)
    buffer.allocate(actors, observation_spaces, dict.fromkeys("ab", spaces.Dict({"u": spaces.Discrete(3)})))
    record = SpacesRecord(actors[0], {"x": np.float32([0.5])}, {"u": 2}, 1.0, True, {})
    buffer.add_transition(StructuredSpacesRecord([record]))
    batch = everything(buffer)
    for observed in (batch.observations[1], batch.next_observations[1]):
        values = {key: tensor[0].tolist() for key, tensor in observed.items()}
        assert values == {"mask": [1, 1, 1], "bits": [1, 1], "kind": 0, "size": [1], "far": [5]}
    assert batch.n_substeps.tolist() == [1]
