from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.env.space_values import zeros
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats.log_stats import LogStatsKey, LogStatsLevel
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.wrapper import ObservationWrapper
from maze.train.parallelization.vector_env.sequential_vector_env import N_CHECKED_STEPS, SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import CloudpickleWrapper, SubprocVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import SinkHoleConsumer, disable_epoch_level_stats
from tests.train.parallelization.toy_envs import (
    CountingCoreEnv,
    Observe,
    PassOn,
    coming_and_going_env,
    counting_env,
    hierarchical_env,
    random_walk_env,
    sampled_actions,
    two_step_env,
)


def moves(*values: int) -> dict[str, np.ndarray]:
    return {"move": np.array(values)}


def test_reset_stacks_the_first_observations_with_the_dtypes_of_the_spaces():
    env = SequentialVectorEnv([counting_env] * 3)
    observations = env.reset()
    assert observations["count"].dtype == np.float32
    assert observations["flag"].dtype == np.int64
    np.testing.assert_array_equal(observations["count"], np.zeros((3, 2)))
    assert list(observations) == list(env.observation_space)


def test_an_ended_episode_is_followed_by_the_next_one_in_the_same_call():
    env = SequentialVectorEnv(
        [partial(counting_env, ((2, "terminated"),)), partial(counting_env, ((9, "terminated"),))]
    )
    env.reset()
    env.step(moves(0, 0))
    observations, rewards, dones, _ = env.step(moves(0, 0))
    np.testing.assert_array_equal(observations["count"], [[0, 1], [2, 0]])  # first of episode 1, step 2 of episode 0
    np.testing.assert_array_equal(rewards, [2, 2])
    np.testing.assert_array_equal(dones, [True, False])
    observations, rewards, dones, _ = env.step(moves(0, 0))
    np.testing.assert_array_equal(observations["count"], [[1, 1], [3, 0]])
    np.testing.assert_array_equal(dones, [False, False])


def test_each_action_reaches_its_environment_and_none_a_finished_episode():
    env = SequentialVectorEnv([partial(counting_env, ((1, "terminated"), (2, "truncated")))] * 2)
    env.reset()
    for step in range(20):
        env.step(moves(step % 5, (step + 1) % 5))  # the toy asserts that its episode is not over
    assert env.envs[0].core_env.received == [step % 5 for step in range(20)]
    assert env.envs[1].core_env.received == [(step + 1) % 5 for step in range(20)]


@pytest.mark.parametrize(
    ("way", "terminated", "truncated"),
    [("terminated", True, False), ("truncated", False, True), ("both", True, False)],
)
def test_termination_and_truncation_are_kept_apart(way, terminated, truncated):
    env = SequentialVectorEnv([partial(counting_env, ((2, way),))] * 2)
    env.reset()
    env.step(moves(0, 0))
    assert not env.terminated.any()
    assert not env.truncated.any()
    env.step(moves(0, 0))
    np.testing.assert_array_equal(env.terminated, [terminated] * 2)
    np.testing.assert_array_equal(env.truncated, [truncated] * 2)
    env.step(moves(0, 0))
    assert not env.terminated.any()
    assert not env.truncated.any()
    assert env.final_observations == {}


def test_the_final_observation_is_the_last_one_of_the_truncated_episode():
    env = SequentialVectorEnv([partial(counting_env, ((3, "truncated"),)), partial(counting_env, ((3, "terminated"),))])
    env.reset()
    for _ in range(3):
        observations, *_ = env.step(moves(0, 0))
    assert list(env.final_observations) == [0]  # a terminated episode has no future to value
    actor, observation = env.final_observations[0]
    assert actor == ActorID(0, 0)
    np.testing.assert_array_equal(observation["count"], [3, 0])
    assert observation["flag"] == 1
    np.testing.assert_array_equal(observations["count"][0], [0, 1])


def test_final_observations_of_terminated_episodes_are_kept_on_request():
    env = SequentialVectorEnv([partial(counting_env, ((2, "terminated"),))])
    env.keep_terminal_observations = True
    env.reset()
    env.step(moves(0))
    env.step(moves(0))
    np.testing.assert_array_equal(env.final_observations[0].observation["count"], [2, 0])


def test_returned_arrays_are_not_overwritten_by_the_next_step():
    env = SequentialVectorEnv([counting_env])
    env.reset()
    observations, rewards, dones, _ = env.step(moves(0))
    env.step(moves(0))
    np.testing.assert_array_equal(observations["count"], [[1, 0]])
    np.testing.assert_array_equal(rewards, [1])
    np.testing.assert_array_equal(dones, [False])


def test_observations_are_written_into_the_given_arrays():
    env = SequentialVectorEnv([counting_env] * 2)
    out = zeros(env.observation_spaces_dict, (2,), "observation")
    assert env.reset(out=out) is out
    returned, *_ = env.step(moves(0, 0), out=out)
    assert returned is out
    np.testing.assert_array_equal(out[0]["count"], [[1, 0], [1, 0]])


def test_an_environment_may_keep_its_action_although_the_caller_reuses_the_array():
    env = SequentialVectorEnv([random_walk_env])
    env.reset()
    push = np.ones((1, 3), np.float32)
    for _ in range(12):  # beyond the steps that are checked more closely
        env.step({"push": push})
    kept = env.envs[0].get_maze_action()["push"]
    push[...] = 7.0
    np.testing.assert_array_equal(kept, np.ones(3))


def test_statistics_of_finished_episodes_go_to_the_common_aggregator_at_once():
    env = SequentialVectorEnv([partial(counting_env, ((2, "terminated"),))] * 2)
    env.reset()
    for _ in range(4):
        env.step(moves(0, 0))
    env.write_epoch_stats()
    assert env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name="total_episode_count") == 4
    assert env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name="mean") == 3.0  # 1 + 2
    env.clear_epoch_stats()
    with pytest.raises(ValueError, match="epochs only"):
        env.get_stats(LogStatsLevel.STEP)


def returns_of(finished: dict[int, Any]) -> dict[int, Any]:
    return {
        index: next(v for k, v in stats.items() if k.event is BaseEnvEvents.reward and k.output_name == "sum")
        for index, stats in finished.items()
    }


ENDINGS = [((1, "terminated"),), ((3, "truncated"),), ((2, "terminated"),)]


@pytest.mark.parametrize("env_class", [SequentialVectorEnv, partial(SubprocVectorEnv, n_workers=2)])
def test_finished_episodes_are_reported_with_their_environment(env_class):
    env = env_class([partial(counting_env, endings) for endings in ENDINGS])
    env.reset()
    assert env.finished_episodes == {}
    results = []
    for _ in range(4):
        env.step(moves(0, 0, 0))
        results.append(returns_of(env.finished_episodes))
    assert results == [{0: 1.0}, {0: 1.0, 2: 3.0}, {0: 1.0, 1: 6.0}, {0: 1.0, 2: 3.0}]
    env.reset()
    assert returns_of(env.finished_episodes) == {1: 1.0}  # cut short in its first step
    env.step(moves(0, 0, 0))
    assert returns_of(env.finished_episodes) == {0: 1.0}
    env.close()


@pytest.mark.parametrize("env_class", [SequentialVectorEnv, partial(SubprocVectorEnv, n_workers=2)])
def test_epoch_statistics_count_a_budget_of_episodes_of_each_environment(env_class):
    env = env_class([partial(counting_env, endings) for endings in ENDINGS])
    env.reset()
    env.episode_budget = budget = np.array([2, 1, 0])
    for _ in range(7):
        env.step(moves(0, 0, 0))
    assert budget.tolist() == [0, 0, 0]
    env.write_epoch_stats()
    values = {
        name: env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name=name)
        for name in ("episode_count", "min", "max", "mean")
    }
    assert values == {"episode_count": 3, "min": 1.0, "max": 6.0, "mean": pytest.approx(8 / 3)}
    env.episode_budget = None
    env.step(moves(0, 0, 0))
    env.write_epoch_stats()
    assert env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name="episode_count") == 2
    env.close()


def test_an_environment_with_statistics_is_not_wrapped_again_and_collects_none_of_its_own_epochs():
    wrapped = LogStatsWrapper.wrap(counting_env(((1, "terminated"),)))
    env = SequentialVectorEnv([lambda: wrapped])
    assert env.envs[0] is wrapped
    env.reset()
    for _ in range(3):
        env.step(moves(0))
    assert wrapped.get_stats(LogStatsLevel.EPOCH).reduce() == {}


@pytest.mark.parametrize(("n_times", "n_episodes"), [(0, 3), (1, 0), (2, 0)])
def test_disabled_epoch_statistics_stay_empty_and_those_of_episodes_complete(n_times, n_episodes):
    env = LogStatsWrapper.wrap(counting_env(((1, "terminated"),)))
    for _ in range(n_times):
        disable_epoch_level_stats(env)
    for _ in range(3):
        env.reset()
        _, reward, _, _ = env.step({"move": 0})
    env.reset()
    epoch = env.get_stats(LogStatsLevel.EPOCH).reduce()
    assert epoch.get(LogStatsKey(BaseEnvEvents.reward, "episode_count", None), 0) == n_episodes
    assert env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPISODE, name="sum") == reward
    sink = SinkHoleConsumer()
    sink.receive(epoch)
    assert not vars(sink), "nothing is kept"


def test_seeds_must_be_one_per_environment():
    env = SequentialVectorEnv([counting_env] * 2)
    for seeds in ([1], 1, [1, 2, 3]):
        with pytest.raises(ValueError, match="one seed for each of the 2"):
            env.seed(seeds)


def test_environments_of_different_spaces_are_refused_by_index():
    with pytest.raises(EnvironmentContractError, match=r"environment 1: .*observation_spaces_dict"):
        SequentialVectorEnv([counting_env, random_walk_env])


def test_stepping_before_the_first_reset_is_refused():
    with pytest.raises(EnvironmentContractError, match="reset"):
        SequentialVectorEnv([counting_env]).step(moves(0))


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (
            {"count": np.zeros(3, np.float32), "flag": 0},
            r"environment 1, sub-step 0, observation `count`.*\(2,\).*\(3,\)",
        ),
        (
            {"count": np.zeros(2, np.float32), "flag": 0.5},
            "environment 1, sub-step 0, observation `flag`.*int64.*float64",
        ),
        ({"count": np.zeros(2, np.float32)}, "environment 1, sub-step 0: .*keys"),
    ],
)
def test_an_observation_that_does_not_fit_its_space_is_named(observation, expected):
    class Liar(ObservationWrapper[Any]):
        def observation(self, _: Any) -> Any:
            return observation

    with pytest.raises(EnvironmentContractError, match=expected):
        SequentialVectorEnv([counting_env, lambda: Liar(counting_env())]).reset()


@pytest.mark.parametrize("value", [0.5, np.array(0.5), np.array(np.nan)])
def test_a_number_that_its_dtype_cannot_hold_is_refused_in_any_step(value):
    class Drifting(ObservationWrapper[Any]):
        n_observed = 0

        def observation(self, observation: Any) -> Any:
            self.n_observed += 1
            return {**observation, "flag": value} if self.n_observed > 20 else observation

    envs = SequentialVectorEnv([counting_env, lambda: Drifting(counting_env())])
    envs.seed([1, 2])
    envs.reset()

    def run() -> None:
        for _ in range(30):
            envs.step(moves(0, 0))

    with pytest.raises(EnvironmentContractError, match=r"environment 1, sub-step 0.*`flag`.* dtype int64.*(0.5|nan)"):
        run()


def test_spaces_that_have_no_fixed_shape_are_refused():
    def text_env() -> MazeEnv[Any]:
        space = spaces.Dict({"report": spaces.Text(5)})
        return MazeEnv(CountingCoreEnv(((2, "terminated"),)), {0: PassOn(space)}, {0: Observe(space)})

    with pytest.raises(
        EnvironmentContractError, match="`report` of sub-step 0: Text spaces have no fixed numeric shape"
    ):
        SequentialVectorEnv([text_env])


# -- structured environments ---------------------------------------------------------------------------------------


class ActorRewards(GymMazeEnv):
    """A flat environment that reports the number of its step as the reward of its actor."""

    def get_actor_rewards(self) -> np.ndarray:
        return np.array([float(self.get_env_time())])


def test_per_actor_rewards_of_flat_environments_are_those_of_each_step():
    """Flat environments take a shorter path after the first steps, which leaves per-actor rewards out."""
    env = SequentialVectorEnv([partial(ActorRewards, "CartPole-v1")] * 2)
    env.seed([1, 2])
    for _ in range(2):
        env.reset()
        for number in range(1, N_CHECKED_STEPS + 5):
            env.step({"action": np.full(2, number % 2)})  # keeps the pole up that long
            np.testing.assert_array_equal(env.get_actor_rewards(), [[number]] * 2)


def test_sub_steps_are_distinguished_from_steps_and_actors_get_their_rewards():
    env = SequentialVectorEnv([partial(two_step_env, 2)] * 2)
    observations = env.reset()
    assert list(observations) == ["time"]
    assert env.actor_id() == ActorID("choose", 0)
    observations, rewards, _, _ = env.step({"item": np.array([1, 3])})
    assert env.actor_id() == ActorID("cut", 0)
    assert list(env.action_space) == ["where"]
    np.testing.assert_array_equal(observations["choice"], [[0, 1], [0, 3]])
    np.testing.assert_array_equal(env.step_complete, [False, False])
    np.testing.assert_array_equal(rewards, [0, 0])
    assert env.get_actor_rewards() is None
    _, rewards, dones, _ = env.step({"where": np.zeros((2, 2), np.float32)})
    np.testing.assert_array_equal(rewards, [11, 13])
    np.testing.assert_array_equal(env.step_complete, [True, True])
    np.testing.assert_array_equal(env.get_actor_rewards(), [[1, 10], [3, 10]])
    np.testing.assert_array_equal(env.get_env_time(), [1, 1])
    assert not dones.any()


def test_a_truncation_in_mid_step_leaves_the_environments_at_different_actors():
    env = SequentialVectorEnv([partial(two_step_env, 3, 0), partial(two_step_env, 3)])
    env.reset()
    env.step({"item": np.array([2, 2])})  # environment 0 is cut off after its first sub-step
    assert env.actor_ids() == [ActorID("choose", 0), ActorID("cut", 0)]
    np.testing.assert_array_equal(env.truncated, [True, False])
    np.testing.assert_array_equal(env.step_complete, [True, False])
    actor, observation = env.final_observations[0]
    assert actor == ActorID("cut", 0)
    np.testing.assert_array_equal(observation["choice"], [0, 2])
    with pytest.raises(EnvironmentContractError, match="not at the same actor"):
        env.actor_id()
    with pytest.raises(EnvironmentContractError, match="by sub-step key"):
        env.step({"item": np.array([2, 2])})
    observations, rewards, _, _ = env.step(
        {"choose": {"item": np.array([1, 99])}, "cut": {"where": np.full((2, 2), np.nan, np.float32)}}
    )
    np.testing.assert_array_equal(rewards, [0, 12])
    np.testing.assert_array_equal(observations["time"], [[0], [1]])


FACTORIES = {
    "flat": partial(counting_env, ((3, "terminated"), (2, "truncated"))),
    "continuous": random_walk_env,
    "multi-step": partial(two_step_env, 3, 2),
    "hierarchical": hierarchical_env,
    "agents": coming_and_going_env,
}


def trajectory(env: Any, n_ticks: int) -> list[Any]:
    """Return all results of a vector environment with seeded actions."""
    env.seed(list(range(10, 10 + env.n_envs)))
    rng = np.random.default_rng(3)
    out = zeros(env.observation_spaces_dict, (env.n_envs,), "observation")
    env.reset(out=out)
    results = []
    for _ in range(n_ticks):
        _, rewards, dones, infos = env.step(sampled_actions(env, rng), out=out)
        rows = [
            {key: array[index].tolist() for key, array in out[actor.step_key].items()}
            for index, actor in enumerate(env.actor_ids())
        ]
        flags = [env.terminated.tolist(), env.truncated.tolist(), env.step_complete.tolist(), dones.tolist()]
        finals = {
            index: (final.actor_id, {key: value.tolist() for key, value in final.observation.items()})
            for index, final in env.final_observations.items()
        }
        actor_rewards = env.actor_rewards and [None if r is None else r.tolist() for r in env.actor_rewards]
        results.append((env.actor_ids(), rows, rewards.tolist(), flags, finals, infos, actor_rewards))
    results.append(env.get_env_time().tolist())
    results.append(env.is_actor_done().tolist())
    env.write_epoch_stats()
    results.append(env.epoch_stats.last_stats)
    return results


@pytest.mark.parametrize("name", FACTORIES)
def test_sequential_and_subprocess_environments_give_identical_trajectories(name):
    factories = [FACTORIES[name]] * 5
    sequential = SequentialVectorEnv(factories)
    subproc = SubprocVectorEnv(factories, n_workers=2)
    try:
        assert subproc.is_flat == sequential.is_flat == (name in ("flat", "continuous"))
        expected, found = trajectory(sequential, 40), trajectory(subproc, 40)
    finally:
        subproc.close()
    for tick, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one == other, f"tick {tick}"


def test_sub_policies_are_chosen_by_each_environment_for_itself():
    env = SequentialVectorEnv([hierarchical_env] * 4)
    results = trajectory(env, 30)
    differing = [actors for actors, *_ in results[:30] if len(set(actors)) > 1]
    assert len(differing) > 10


class LeavesWithTheEpisode(CountingCoreEnv):
    def is_actor_done(self) -> bool:
        return self.is_over


def leaving_env() -> MazeEnv[Any]:
    env = counting_env()
    return MazeEnv(
        LeavesWithTheEpisode(((2, "truncated"),)), env.action_conversion_dict, env.observation_conversion_dict
    )


@pytest.mark.parametrize("env_class", [SequentialVectorEnv, partial(SubprocVectorEnv, n_workers=2)])
def test_an_actor_that_leaves_as_its_episode_is_truncated_is_done_also_after_the_autoreset(env_class):
    env = env_class([leaving_env] * 2)
    env.reset()
    found = []
    for _ in range(5):
        env.step(moves(0, 0))
        found.append(env.is_actor_done().tolist())
    assert found == [[False] * 2, [True] * 2, [False] * 2, [True] * 2, [False] * 2]
    env.close()


def test_the_number_of_agents_varies_within_an_episode():
    results = trajectory(SequentialVectorEnv([coming_and_going_env] * 2), 60)
    agents = {actor.agent_id for actors, *_ in results[:60] for actor in actors}
    assert agents == {0, 1, 2, 3}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    endings=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(["terminated", "truncated"])), min_size=1, max_size=4
    ),
    n_envs=st.integers(1, 4),
    n_steps=st.integers(1, 25),
)
def test_rows_never_mix_episodes(endings, n_envs, n_steps):
    """Law: the count goes up by one within an episode, and starts at zero where the step before was done."""
    env = SequentialVectorEnv([partial(counting_env, tuple(endings))] * n_envs)
    before = env.reset()["count"]
    for _ in range(n_steps):
        observations, rewards, dones, _ = env.step(moves(*[0] * n_envs))
        np.testing.assert_array_equal(rewards, before[:, 0] + 1)
        np.testing.assert_array_equal(observations["count"][:, 0], np.where(dones, 0, before[:, 0] + 1))
        np.testing.assert_array_equal(observations["count"][:, 1], before[:, 1] + dones)
        assert set(env.final_observations) == set(np.flatnonzero(env.truncated))
        assert not (env.terminated & env.truncated).any()
        before = observations["count"]


def test_a_closure_survives_the_cloudpickle_wrapper():
    import pickle

    offset = 3
    assert pickle.loads(pickle.dumps(CloudpickleWrapper(lambda value: value + offset))).var(1) == 4
