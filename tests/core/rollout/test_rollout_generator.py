from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.log_stats import LogStatsKey, LogStatsLevel
from maze.core.rollout.batched_acting import act_by_actor
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.rollout.rollout_generator import RolloutGenerator, record_of
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from tests.train.parallelization.toy_envs import (
    ComingAndGoingCoreEnv,
    coming_and_going_env,
    counting_env,
    hierarchical_env,
    random_walk_env,
    two_step_env,
)


class Reflex(Policy):
    """Answers each observation with an action computed from it: every entry of a rollout can be checked."""

    def seed(self, seed: int) -> None:
        pass

    def needs_state(self) -> bool:
        return False

    def compute_action(self, observation, maze_state=None, env=None, actor_id=None, deterministic=False) -> Any:
        number = sum(int(np.sum(value) * 1000) for value in observation.values())
        if "count" in observation:
            return {"move": number % 5}
        if "time" in observation:
            return {"item": number % 4}
        if "choice" in observation:
            return {"where": np.array([number % 2, 0.25], np.float32)}
        if "position" in observation:
            return {"direction": number % 4}
        if "pressure" in observation:
            return {"force": np.array([number % 3 - 1, 0.5], np.float32)}
        return {"signal": number % 2}

    def compute_top_action_candidates(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError


class BatchedReflex(Reflex):
    """The same for whole batches, with logits, as a TorchPolicy does it."""

    distribution_mapper = SimpleNamespace(
        distribution_class=lambda head: SimpleNamespace(required_logits_shape=lambda space: (2,))
    )

    def __init__(self) -> None:
        self.batches: list[tuple[ActorID, int]] = []

    def compute_action(
        self, observation, maze_state=None, env=None, actor_id=None, deterministic=False, logits_out=None
    ) -> Any:
        action = super().compute_action(observation)
        if logits_out is not None:
            logits_out.update({key: np.full((1, 2), actor_id.agent_id + 0.5) for key in action})
        return action

    def compute_actions(self, observation, actor_id=None, deterministic=False, out=None, logits_out=None) -> Any:
        n_rows = len(next(iter(observation.values())))
        self.batches.append((actor_id, n_rows))
        actions = [
            self.compute_action({key: value[row] for key, value in observation.items()}) for row in range(n_rows)
        ]
        out = {} if out is None else out
        for key in actions[0]:
            stacked = np.stack([np.asarray(action[key]) for action in actions])
            if key in out:
                out[key][...] = stacked
            else:
                out[key] = stacked
            if logits_out is not None:
                logits_out[key][...] = actor_id.agent_id + 0.5
        return out


FACTORIES = {
    "flat": partial(counting_env, ((3, "terminated"), (2, "truncated"))),
    "multi-step": partial(two_step_env, 3),
    "multi-step, cut off in mid-step": partial(two_step_env, 3, 2),
    "hierarchical": hierarchical_env,
    "agents": coming_and_going_env,
}


def by_hand(factory: Any, policy: Policy, seed: int, n_ticks: int) -> list[Any]:
    """What one environment goes through, tick by tick."""
    env = factory()
    env.seed(seed)
    observation = env.reset()
    ticks = []
    for _ in range(n_ticks):
        actor = env.actor_id()
        action = policy.compute_action(observation, actor_id=actor)
        next_observation, reward, done, info = env.step(action)
        truncated = done and info.get("TimeLimit.truncated", False)
        ticks.append((actor, observation, action, reward, done and not truncated, truncated, next_observation))
        observation = env.reset() if done else next_observation
    ticks.append((env.actor_id(), observation))
    return ticks


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(np.asarray(one[key], np.float32), np.asarray(other[key], np.float32)) for key in one
    )


def assert_columns_tell(columns: RolloutColumns, env_index: int, ticks: list[Any]) -> None:
    position = dict.fromkeys(columns.substeps, 0)
    finals = {(entry.tick, entry.env_index): entry for entry in columns.final_observations}
    for tick, (actor, observation, action, reward, terminated, truncated, following) in enumerate(ticks[:-1]):
        substep = columns.substeps[actor.step_key]
        rows = np.flatnonzero(substep.ticks == tick)
        assert len(rows) == 1, f"tick {tick}"
        row = rows[0]
        assert substep.valid is None or substep.valid[row, env_index]
        assert substep.agent_ids[row, env_index] == actor.agent_id
        assert same({key: array[row, env_index] for key, array in substep.observations.items()}, observation)
        assert same({key: array[row, env_index] for key, array in substep.actions.items()}, action)
        assert columns.rewards[tick, env_index] == np.float32(reward)
        assert columns.terminated[tick, env_index] == terminated
        assert columns.truncated[tick, env_index] == truncated
        assert ((tick, env_index) in finals) == truncated
        if truncated:
            assert same(finals[tick, env_index].observation, following)
        position[actor.step_key] += 1
    last_actor, last_observation = ticks[-1]
    assert columns.last_actor_ids[env_index] == last_actor
    last = columns.last_observations[last_actor.step_key]
    assert same({key: array[env_index] for key, array in last.items()}, last_observation)
    for key, substep in columns.substeps.items():
        n_valid = substep.n_rows if substep.valid is None else int(substep.valid[:, env_index].sum())
        assert n_valid == position[key]
        assert all(len(array) == substep.n_rows + 1 for array in substep.observations.values())
        assert all(len(array) == substep.n_rows for array in substep.actions.values())


@pytest.mark.parametrize("policy", [Reflex(), BatchedReflex()], ids=["one by one", "batched"])
@pytest.mark.parametrize("name", FACTORIES)
def test_columns_hold_exactly_what_each_environment_went_through(name, policy):
    n_envs, n_ticks = 3, 24
    env = SequentialVectorEnv([FACTORIES[name]] * n_envs)
    env.seed([5, 6, 7])
    columns = RolloutColumns(env.observation_spaces_dict, env.action_spaces_dict, n_envs, n_ticks)
    generator = RolloutGenerator(env)
    generator.collect(policy, columns)
    assert columns.is_dense() == (name in ("flat", "multi-step"))
    for index in range(n_envs):
        assert_columns_tell(columns, index, by_hand(FACTORIES[name], policy, 5 + index, n_ticks))


@pytest.mark.parametrize("name", FACTORIES)
def test_rollouts_continue_each_other_independently_of_changes_to_the_columns(name):
    env = SequentialVectorEnv([FACTORIES[name]] * 2)
    env.seed([5, 6])
    generator = RolloutGenerator(env)
    columns = RolloutColumns(env.observation_spaces_dict, env.action_spaces_dict, 2, 11)
    generator.collect(Reflex(), columns)
    for substep in columns.substeps.values():
        for array in (*substep.observations.values(), *substep.actions.values()):
            array[...] = 0  # a trainer may do what it wants with them
    generator.collect(Reflex(), columns)
    for index in range(2):
        ticks = by_hand(FACTORIES[name], Reflex(), 5 + index, 22)
        assert_columns_tell(columns, index, ticks[11:])


def test_worker_processes_give_the_same_rollouts():
    env, subproc = SequentialVectorEnv([hierarchical_env] * 3), SubprocVectorEnv([hierarchical_env] * 3, n_workers=2)
    for one in (env, subproc):
        one.seed([1, 2, 3])
    expected = RolloutGenerator(env).rollout(Reflex(), 20)
    found = RolloutGenerator(subproc).rollout(Reflex(), 20)
    subproc.close()
    for step, other in zip(expected.step_records, found.step_records, strict=True):
        assert step.actor_ids == other.actor_ids
        for record, its in zip(step.substep_records, other.substep_records, strict=True):
            assert same(record.observation, its.observation)
            np.testing.assert_array_equal(record.reward, its.reward)


def test_policy_is_evaluated_once_per_tick_or_once_per_actor():
    policy = BatchedReflex()
    RolloutGenerator(SequentialVectorEnv([FACTORIES["multi-step"]] * 3)).rollout(policy, 2)
    assert policy.batches == [(ActorID("choose", 0), 3), (ActorID("cut", 0), 3)] * 2
    policy.batches.clear()
    env = SequentialVectorEnv([hierarchical_env] * 4)
    env.seed([1, 2, 3, 4])
    RolloutGenerator(env).rollout(policy, 10)
    assert {actor.step_key for actor, _ in policy.batches} == {"walk", "grasp"}
    assert sum(n_rows for _, n_rows in policy.batches) == 4 * 10


@pytest.mark.parametrize(
    ("name", "n_ticks"),
    [("flat", 12), ("multi-step", 24), ("hierarchical", 12)],  # every action of the hierarchy is a step
)
def test_rollouts_have_the_requested_number_of_environment_steps(name, n_ticks):
    env = SequentialVectorEnv([FACTORIES[name]] * 3)
    env.seed([1, 2, 3])
    generator = RolloutGenerator(env)
    columns = generator.allocate(12)
    for _ in range(3):
        generator.collect(Reflex(), columns)
        assert columns.n_ticks == len(columns.rewards) == len(columns.step_complete) == n_ticks
        np.testing.assert_array_equal(columns.step_complete.sum(axis=0), [12, 12, 12])
    assert len(generator.rollout(Reflex(), 5)) == 5


def test_where_numbers_of_agents_vary_a_rollout_takes_the_steps_on_average_and_the_memory_that_they_need():
    n_envs, n_steps = 3, 8
    env = SequentialVectorEnv([coming_and_going_env] * n_envs)
    env.seed([5, 6, 7])
    generator = RolloutGenerator(env)
    columns = generator.allocate(n_steps)
    assert columns.capacity == n_steps
    expected = [by_hand(coming_and_going_env, Reflex(), 5 + index, 200) for index in range(n_envs)]
    first_tick = 0
    for _ in range(4):
        generator.collect(Reflex(), columns)
        n_completed = columns.step_complete.sum()
        assert n_steps * n_envs <= n_completed < n_steps * n_envs + n_envs
        for index in range(n_envs):
            ticks = expected[index][first_tick : first_tick + columns.n_ticks + 1]
            assert_columns_tell(columns, index, [*ticks[:-1], ticks[-1][:2]])
        first_tick += columns.n_ticks
    assert columns.capacity >= columns.n_ticks > n_steps


def test_an_environment_that_never_completes_a_step_is_no_endless_rollout():
    class Endless(ComingAndGoingCoreEnv):
        def is_step_complete(self) -> bool:
            return False

        def step(self, maze_action: Any) -> Any:
            state, reward, _, info = super().step(maze_action)
            return state, reward, False, info

    def factory() -> Any:
        like = coming_and_going_env()
        return MazeEnv(Endless(), like.action_conversion_dict, like.observation_conversion_dict)

    generator = RolloutGenerator(SequentialVectorEnv([factory]))
    with pytest.raises(EnvironmentContractError, match=r"not complete after 1024 sub-steps.*is_step_complete"):
        generator.rollout(Reflex(), 1)


def test_a_dense_rollout_is_one_structured_record():
    env = SequentialVectorEnv([FACTORIES["multi-step"]] * 2)
    generator = RolloutGenerator(env, record_logits=True)
    columns = generator.collect(BatchedReflex(), generator.allocate(4, BatchedReflex()))
    record = record_of(columns).stack()
    assert record.actor_ids == [ActorID("choose", 0), ActorID("cut", 0)]
    assert record.batch_shape == [4, 2]
    assert record.observations[0]["time"].shape == (4, 2, 1)
    np.testing.assert_array_equal(record.rewards[0], np.zeros((4, 2)))
    np.testing.assert_array_equal(record.rewards[1][:, 0] // 10, [1, 2, 3, 1])  # ten times the step number, plus choice
    np.testing.assert_array_equal(record.logits[1]["where"], np.full((4, 2, 2), 0.5))
    np.testing.assert_array_equal(columns.actor_rewards[1::2, 0], [10, 20, 30, 10])
    np.testing.assert_array_equal(columns.actor_rewards[0::2], record.actions[0]["item"])


def test_agents_that_share_a_policy_have_their_own_records():
    from gymnasium import spaces

    class TwoAgents(ComingAndGoingCoreEnv):
        agent_counts_dict = {"agent": 2}  # type: ignore[assignment]

        def step(self, maze_action: Any) -> Any:
            self.present = [0, 1]
            result = super().step(maze_action)
            self.present = [0, 1]
            self.actor = ActorID("agent", self.position)
            return result

    def factory() -> Any:
        like = coming_and_going_env()
        return MazeEnv(TwoAgents(), like.action_conversion_dict, like.observation_conversion_dict)

    assert isinstance(factory().action_space, spaces.Dict)
    env = SequentialVectorEnv([factory] * 2)
    generator = RolloutGenerator(env)
    columns = generator.collect(Reflex(), generator.allocate(3))
    assert columns.actor_sequence == [ActorID("agent", 0), ActorID("agent", 1)]
    record = record_of(columns).stack()
    assert record.observations[1]["self"].shape == (3, 2, 2)
    np.testing.assert_array_equal(columns.substeps["agent"].agent_ids[:, 0], [0, 1] * 3)
    with pytest.raises(ValueError, match="share a sub-step key"):
        _ = record.observations_dict


def test_the_documented_record_of_a_vector_environment():
    env = SequentialVectorEnv([FACTORIES["flat"]] * 2)
    record = RolloutGenerator(env, record_next_observations=True).rollout(Reflex(), 6, trajectory_id="mine")
    assert record.id == "mine"
    assert len(record) == 6
    assert record.step_records[0].batch_shape == [2]
    dones = np.stack([step.dones[0] for step in record.step_records])
    np.testing.assert_array_equal(dones[:, 0], [False, False, True, False, True, False])
    following = np.stack([step.next_observations[0]["count"][0] for step in record.step_records])
    # the last observations of both episodes, the terminated one's too, and nothing of the next episode's first
    np.testing.assert_array_equal(following, [[1, 0], [2, 0], [3, 0], [1, 1], [2, 1], [1, 2]])
    assert [step.infos[0][0] for step in record.step_records[3:]] == [{}, {"TimeLimit.truncated": True}, {}]
    stacked = record.stack()
    assert stacked.batch_shape == [6, 2]
    np.testing.assert_array_equal(record.total_reward(), [10, 10])


def test_asynchronous_records_name_the_environments_of_each_actor():
    env = SequentialVectorEnv([hierarchical_env] * 3)
    env.seed([1, 2, 3])
    record = RolloutGenerator(env).rollout(Reflex(), 10)
    for step in record.step_records:
        indices = np.concatenate([substep.info["env_indices"] for substep in step.substep_records])
        assert sorted(indices) == [0, 1, 2]
    columns = RolloutGenerator(env).collect(Reflex(), RolloutColumns.for_env(env, 10))
    entries = [substep.entries() for substep in columns.substeps.values()]
    assert sum(len(rows) for rows, _ in entries) == columns.n_ticks * 3
    with pytest.raises(ValueError, match="same sequence of actors"):
        record_of(columns).stack()


# -- the actors' own rewards ---------------------------------------------------------------------------------------


def earned_by_hand(factory: Any, policy: Policy, seed: int, n_ticks: int, scale: float) -> list[float]:
    """What the actor of each tick earns: the environment tells it when the step is complete."""
    env = factory()
    env.seed(seed)
    observation, earned = env.reset(), []
    for _ in range(n_ticks):
        observation, _, done, _ = env.step(policy.compute_action(observation))
        if done or env.is_step_complete():
            earned += [scale * float(reward) for reward in env.get_actor_rewards()]
        observation = env.reset() if done else observation
    return earned


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", ["multi-step", "agents"])
def test_records_hold_the_rewards_of_the_actors_themselves(name, scale):
    class Alternating(Reflex):
        """Its choices differ, and so do what the actors earn."""

        def compute_action(self, observation, *arguments: Any, **keywords: Any) -> Any:
            if "time" in observation:
                return {"item": 1 + int(observation["time"][0]) % 3}
            return super().compute_action(observation)

    def factory() -> Any:
        return RewardScalingWrapper.wrap(FACTORIES[name](), scale=scale)

    expected = earned_by_hand(FACTORIES[name], Alternating(), 3, 60, scale)
    assert len(set(expected)) > 2
    single = factory()
    single.seed(3)
    record = RolloutGenerator(single).rollout(Alternating(), 8)
    found = [substep.reward for step in record.step_records for substep in step.substep_records]
    assert found == pytest.approx(expected[: len(found)])

    env = SequentialVectorEnv([factory] * 2)
    env.seed([5, 3])
    columns = RolloutGenerator(env).allocate(8)
    trajectory = record_of(RolloutGenerator(env).collect(Alternating(), columns))
    found = []
    for step in trajectory.step_records:
        for substep in step.substep_records:
            envs = [0, 1] if columns.is_dense() else substep.info["env_indices"].tolist()
            found += [substep.reward[envs.index(1)]] if 1 in envs else []
    n_told = len(columns.rewards) - int(np.argmax(columns.step_complete[::-1, 1]))
    assert found[:n_told] == pytest.approx(expected[:n_told])
    assert found[n_told:] == columns.rewards[n_told:, 1].tolist()  # of a step that is under way
    if columns.is_dense():
        rewards = record_of(columns).stack().rewards
        assert np.stack(rewards, axis=1)[..., 1].flatten() == pytest.approx(found)


# -- policies ------------------------------------------------------------------------------------------------------


def test_policy_is_evaluated_once_per_actor_for_the_rows_of_its_environments():
    requested: list[tuple[ActorID, Any]] = []

    def act(observation: Any, actor: ActorID, out: Any, logits_out: Any, env_indices: Any) -> None:
        requested.append((actor, env_indices))
        out["a"][...] = 10 * observation["o"] + actor.agent_id
        if logits_out is not None:
            logits_out["a"][..., 0] = observation["o"]

    walk, other, grasp = ActorID("walk", 0), ActorID("walk", 1), ActorID("grasp", 0)
    actors = [walk, grasp, other, walk]
    observations = {"walk": {"o": np.arange(4)}, "grasp": {"o": np.arange(4) + 4}, "rest": {"o": np.arange(4)}}
    actions = {key: {"a": np.full(4, -1)} for key in observations}
    logits = {"walk": {"a": np.zeros((4, 1))}, "grasp": None}
    chosen = act_by_actor(act, actors, observations, actions, logits)
    assert requested == [(walk, [0, 3]), (grasp, [1]), (other, [2])]
    assert chosen.keys() == {"walk", "grasp"}
    assert chosen["walk"]["a"] is actions["walk"]["a"]
    assert actions["walk"]["a"].tolist() == [0, -1, 21, 30]
    assert actions["grasp"]["a"].tolist() == [-1, 50, -1, -1]
    assert logits["walk"]["a"][:, 0].tolist() == [0, 0, 2, 3]
    requested.clear()
    chosen = act_by_actor(act, [grasp] * 4, observations, actions)
    assert requested == [(grasp, None)]
    assert chosen["grasp"]["a"].tolist() == [40, 50, 60, 70]


# -- single environments -------------------------------------------------------------------------------------------


def test_a_rollout_names_the_environments_that_do_not_continue_the_previous_one():
    def renewed():
        return generator.collect(Reflex(), columns).renewed

    def begun(*seeds):
        generator = RolloutGenerator(SequentialVectorEnv([counting_env] * len(seeds)))
        generator.env.seed(seeds)
        return generator, generator.allocate(2)

    generator, columns = begun(1, None)
    assert [renewed(), renewed()] == [[0, 1], []]
    state = generator.state_dict()
    generator, columns = begun(1, 2)
    assert list(generator.load_state_dict(state)) == [1]
    unused = generator.state_dict()
    assert [renewed(), renewed()] == [[1], []]
    generator.reset()
    assert renewed() == [0, 1]
    generator, columns = begun(1, 2)
    assert not generator.load_state_dict(unused)
    assert [renewed(), renewed()] == [[1], []]


def test_single_environment_gives_unbatched_records_and_continues_its_episode():
    env = counting_env(((3, "terminated"),))
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    generator = RolloutGenerator(env)
    first, second = generator.rollout(policy, 2), generator.rollout(policy, 3)
    counts = [step.observations[0]["count"].tolist() for step in (*first.step_records, *second.step_records)]
    assert counts == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    assert second.step_records[0].is_done()
    assert not second.is_done()
    assert first.step_records[0].batch_shape is None
    assert first.total_reward() == 3


def test_a_rollout_may_end_with_the_episode():
    generator = RolloutGenerator(
        counting_env(((3, "truncated"),)), terminate_on_done=True, record_next_observations=True
    )
    record = generator.rollout(Reflex(), None)
    assert len(record) == 3
    assert record.is_done()
    assert record.step_records[-1].substep_records[0].info["TimeLimit.truncated"]
    np.testing.assert_array_equal(record.step_records[-1].next_observations[0]["count"], [3, 0])
    assert len(generator.rollout(Reflex(), 2)) == 2
    assert generator.rollout(Reflex(), 2).total_reward() == 3


def test_the_statistics_of_steps_and_episodes_are_recorded_on_request():
    generator = RolloutGenerator(
        counting_env(((3, "terminated"),)), record_step_stats=True, record_episode_stats=True, terminate_on_done=True
    )
    record = generator.rollout(Reflex(), None)
    key = LogStatsKey(BaseEnvEvents.reward, None, None)
    assert [step.step_stats[key] for step in record.step_records] == [1, 2, 3]
    assert [step.episode_stats is None for step in record.step_records] == [True, True, False]
    generator.get_epoch_stats_aggregator().reduce()
    assert generator.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name="mean") == 6


def test_sub_steps_of_a_single_environment_stay_together():
    record = RolloutGenerator(two_step_env(2), record_logits=True).rollout(BatchedReflex(), 3)
    assert record.step_records[0].actor_ids == [ActorID("choose", 0), ActorID("cut", 0)]
    assert record.step_records[0].substep_keys == ["choose", "cut"]
    np.testing.assert_array_equal(record.step_records[2].logits_dict["cut"]["where"], [0.5, 0.5])
    assert [len(step.substep_records) for step in record.step_records] == [2, 2, 2]


def test_policies_that_need_the_state_or_the_environment_get_it_where_they_can():
    class Curious(Reflex):
        def needs_state(self) -> bool:
            return True

        def needs_env(self) -> bool:
            return True

        def compute_action(self, observation, maze_state=None, env=None, actor_id=None, deterministic=False) -> Any:
            assert maze_state["count"] == observation["count"].tolist()
            assert env.get_env_time() == maze_state["count"][0]
            return {"move": 0}

    RolloutGenerator(counting_env()).rollout(Curious(), 4)
    RolloutGenerator(SequentialVectorEnv([counting_env] * 2)).rollout(Curious(), 4)
    subproc = SubprocVectorEnv([counting_env])
    with pytest.raises(ConfigError, match="Curious needs the environment"):
        RolloutGenerator(subproc).rollout(Curious(), 4)
    subproc.close()


def test_invalid_rollout_requests_are_refused():
    env = SequentialVectorEnv([random_walk_env])
    with pytest.raises(ValueError, match="belong to a single environment"):
        RolloutGenerator(env, terminate_on_done=True)
    with pytest.raises(ValueError, match="pass `n_steps`"):
        RolloutGenerator(env).rollout(Reflex(), None)
    with pytest.raises(ConfigError, match="no logits"):
        RolloutGenerator(env, record_logits=True).rollout(Reflex(), 2)
