"""Bringing environments back to where they were, by their seeds and actions."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maze.core.env.space_values import zeros
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.trajectory_recording.writers.trajectory_writer_registry import TrajectoryWriterRegistry
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.random_reset_wrapper import RandomResetWrapper
from maze.core.wrappers.return_normalization_reward_wrapper import ReturnNormalizationRewardWrapper
from maze.core.wrappers.trajectory_recording_wrapper import (
    ActionRecordingWrapper,
    ParquetRecordingWrapper,
    TrajectoryRecordingWrapper,
)
from maze.train.parallelization.vector_env import structured_vector_env
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import derived_seed
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.utils.train_utils import from_plain, to_plain
from tests.train.parallelization.toy_envs import (
    coming_and_going_env,
    counting_env,
    hierarchical_env,
    random_walk_env,
    sampled_actions,
    two_step_env,
)


def normalized_walk() -> Any:
    return ReturnNormalizationRewardWrapper.wrap(random_walk_env(), gamma=0.9, epsilon=1e-8)


FACTORIES = {
    "continuous": random_walk_env,
    "multi-step": partial(two_step_env, 3, 2),
    "hierarchical": hierarchical_env,
    "agents": coming_and_going_env,
    "learning wrapper": normalized_walk,
    "gymnasium": partial(GymMazeEnv, "CartPole-v1"),
}


@pytest.fixture
def reseed_often(monkeypatch):
    monkeypatch.setattr(structured_vector_env, "RESEED_AFTER", 7)


def observed(env, out):
    return [
        {key: array[index].tolist() for key, array in out[actor.step_key].items()}
        for index, actor in enumerate(env.actor_ids())
    ]


def play(env, out, rng, n_ticks):
    results = []
    for _ in range(n_ticks):
        env.step(sampled_actions(env, rng), out=out)
        results.append((env.actor_ids(), observed(env, out), env.rewards.tolist(), env.terminated.tolist()))
    return results


def begun(env):
    out = zeros(env.observation_spaces_dict, (env.n_envs,), "observation")
    env.reset(out=out)
    return out


def learned(env):
    """What the wrappers of each environment have learned."""
    return [state["wrappers"] for state in env.state_dict()["environments"]]


def continued(env, state):
    problems = env.load_state_dict(from_plain(to_plain(state)))
    assert problems == {}
    return begun(env)


@pytest.mark.parametrize("n_before", [0, 1, 5, 30])
@pytest.mark.parametrize("name", FACTORIES)
def test_restored_environments_continue_as_the_original(name, n_before, reseed_often):
    original = SequentialVectorEnv([FACTORIES[name]] * 3)
    original.seed([1, 2, 3])
    out, rng = begun(original), np.random.default_rng(3)
    play(original, out, rng, n_before)
    original.clear_epoch_stats()
    other = SequentialVectorEnv([FACTORIES[name]] * 3)
    other_out = continued(other, original.state_dict())
    assert observed(other, other_out) == observed(original, out)
    assert learned(other) == learned(original)
    other_rng = np.random.default_rng(3)
    other_rng.bit_generator.state = rng.bit_generator.state
    assert play(other, other_out, other_rng, 40) == play(original, out, rng, 40)
    for env in (original, other):
        env.write_epoch_stats()
    assert other.epoch_stats.last_stats == original.epoch_stats.last_stats  # those of running episodes are complete


@pytest.mark.parametrize("name", ["multi-step", "learning wrapper"])
def test_a_state_of_processes_can_be_continued_in_this_one_and_the_other_way_round(name):
    factories = [FACTORIES[name]] * 3
    first, second = SubprocVectorEnv(factories, n_workers=2), SubprocVectorEnv(factories, n_workers=1)
    sequential = SequentialVectorEnv(factories)
    try:
        first.seed([1, 2, 3])
        out, rng = begun(first), np.random.default_rng(3)
        play(first, out, rng, 10)
        expected = play(first, out, rng, 10)
        out = begun(first)  # begins new episodes
        rng = np.random.default_rng(3)
        sequential.seed([1, 2, 3])
        play(sequential, begun(sequential), rng, 10)
        state = rng.bit_generator.state
        out = continued(second, sequential.state_dict())
        assert play(second, out, rng, 10) == expected
        rng.bit_generator.state = state
        third = SequentialVectorEnv(factories)
        out = continued(third, second.state_dict())
        assert observed(third, out) == expected[-1][1]
    finally:
        first.close()
        second.close()


def test_a_restored_environment_can_be_saved_and_restored_again(reseed_often):
    factory = FACTORIES["gymnasium"]
    expected_env = SequentialVectorEnv([factory] * 2)
    expected_env.seed([5, 6])
    expected = play(expected_env, begun(expected_env), np.random.default_rng(1), 24)
    env = SequentialVectorEnv([factory] * 2)
    env.seed([5, 6])
    out, rng, found = begun(env), np.random.default_rng(1), []
    for _ in range(8):
        found += play(env, out, rng, 3)
        following = SequentialVectorEnv([factory] * 2)
        out = continued(following, env.state_dict())
        env = following
    assert found == expected


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.sampled_from(list(FACTORIES)))
def test_any_sequence_of_saving_and_continuing_gives_the_same_trajectory(lengths, name):
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(structured_vector_env, "RESEED_AFTER", 5)
    try:
        one = SequentialVectorEnv([FACTORIES[name]] * 2)
        one.seed([5, 6])
        expected = play(one, begun(one), np.random.default_rng(1), sum(lengths))
        env = SequentialVectorEnv([FACTORIES[name]] * 2)
        env.seed([5, 6])
        out, rng, found = begun(env), np.random.default_rng(1), []
        for length in lengths:
            found += play(env, out, rng, length)
            state = env.state_dict()
            env = SequentialVectorEnv([FACTORIES[name]] * 2)
            out = continued(env, state)
        assert found == expected
    finally:
        monkeypatch.undo()


# -- seeds ------------------------------------------------------------------------------------------


def test_the_first_episodes_are_those_of_the_seed_itself():
    single = GymMazeEnv("CartPole-v1")
    single.seed(4)
    env = SequentialVectorEnv([FACTORIES["gymnasium"]])
    env.seed([4])
    np.testing.assert_array_equal(begun(env)[0]["observation"][0], single.reset()["observation"])


def test_later_seeds_differ_and_fit_every_generator():
    seeds = [derived_seed(seed, number) for seed in (0, 1, 2**31 - 1) for number in range(1, 200)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derived_seed(17, 0) == 17


def test_resumed_evaluation_plays_the_next_episodes():
    env, other = (SequentialVectorEnv([FACTORIES["gymnasium"]] * 2) for _ in range(2))
    env.seed([1, 2])
    play(env, begun(env), np.random.default_rng(0), 5)
    state = env.state_dict(with_running=False)
    assert all("sequence" not in of_env for of_env in state["environments"])
    assert other.load_state_dict(from_plain(to_plain(state))) == {}
    np.testing.assert_array_equal(begun(env)[0]["observation"], begun(other)[0]["observation"])


def test_before_the_first_reset_there_are_seeds_only():
    env, other = (SequentialVectorEnv([FACTORIES["gymnasium"]] * 2) for _ in range(2))
    env.seed([1, 2])
    assert other.load_state_dict(from_plain(to_plain(env.state_dict()))) == {}
    np.testing.assert_array_equal(begun(env)[0]["observation"], begun(other)[0]["observation"])


def test_episodes_have_identities_of_their_own(reseed_often):
    env = SequentialVectorEnv([FACTORIES["gymnasium"]] * 2)
    env.seed([1, 1 + 2**40])
    out, rng, ids = begun(env), np.random.default_rng(0), set()
    for _ in range(200):
        play(env, out, rng, 1)
        ids.update(single.get_episode_id() for single in env.envs)
    counts = env.epoch_stats
    counts.reduce()
    n_episodes = next(value for key, value in counts.last_stats.items() if key.output_name == "episode_count")
    assert len(ids) == n_episodes + 2


# -- what is not repeated ---------------------------------------------------------------------------


def test_nothing_that_is_played_again_is_counted_or_recorded_again(reseed_often):
    def replayable():
        return TrajectoryRecordingWrapper.wrap(two_step_env(3))

    env = SequentialVectorEnv([replayable])
    env.seed([1])
    play(env, begun(env), np.random.default_rng(0), 7)  # the second episode is running, both since one seeding
    written = []

    class Writer:
        def write(self, record):
            written.append(record)

    other = SequentialVectorEnv([replayable])
    received = []
    other.envs[0].get_stats(LogStatsLevel.EPISODE).register_consumer(type("C", (), {"receive": received.append})())
    writer: Any = Writer()
    TrajectoryWriterRegistry.register_writer(writer)
    try:
        continued(other, env.state_dict())
    finally:
        TrajectoryWriterRegistry.unregister_writer(writer)
    assert written == []
    assert received == []


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_recorders_write_no_episode_that_is_played_again(tmp_path, is_deterministic):
    pytest.importorskip("pyarrow")

    def recording(name):
        inner = ParquetRecordingWrapper.wrap(two_step_env(3) if is_deterministic else counting_env(), tmp_path / name)
        return SequentialVectorEnv([lambda: ActionRecordingWrapper.wrap(inner, tmp_path / name)])

    env, other = recording("first"), recording("resumed")
    env.seed([1])
    play(env, begun(env), np.random.default_rng(0), 7)
    assert len(list((tmp_path / "first").iterdir())) == (2 if is_deterministic else 4)
    other.reset()  # `counting_env` counts its episodes
    assert bool(other.load_state_dict(env.state_dict())) != is_deterministic
    assert not (tmp_path / "resumed").exists()
    play(other, begun(other), np.random.default_rng(1), 6)
    assert {path.suffix for path in (tmp_path / "resumed").iterdir()} == {".parquet", ".json"}


def test_steps_of_wrappers_that_draw_at_reset_are_played_again():
    def make():
        return RandomResetWrapper.wrap(GymMazeEnv("CartPole-v1"), min_skip_steps=1, max_skip_steps=4)

    env = SequentialVectorEnv([make] * 2)
    env.seed([1, 2])
    out, rng = begun(env), np.random.default_rng(0)
    play(env, out, rng, 30)
    other = SequentialVectorEnv([make] * 2)
    assert observed(other, continued(other, env.state_dict())) == observed(env, out)


# -- what cannot be continued -----------------------------------------------------------------------


def test_a_non_deterministic_environment_is_named_and_starts_a_new_episode():
    env = SequentialVectorEnv([counting_env] * 2)  # counts episodes since its creation, independent of the seed
    env.seed([1, 2])
    play(env, begun(env), np.random.default_rng(0), 4)
    other = SequentialVectorEnv([counting_env] * 2)
    begun(other)  # an episode more
    problems = other.load_state_dict(env.state_dict())
    assert set(problems) == {0, 1}
    assert "not deterministic under its seed" in problems[0]
    out = begun(other)
    np.testing.assert_array_equal(out[0]["count"][:, 0], 0)  # a first observation
    play(other, out, np.random.default_rng(0), 10)


def test_an_environment_that_raises_in_a_replay_starts_a_new_episode():
    env = SequentialVectorEnv([counting_env])
    env.seed([1])
    play(env, begun(env), np.random.default_rng(0), 2)
    other = SequentialVectorEnv([partial(counting_env, fault=("raise", 1))])
    problems = other.load_state_dict(env.state_dict())
    assert "raised ValueError: the simulator lost its marbles" in problems[0]
    assert begun(other)[0]["count"][0, 0] == 0


def test_environments_without_seeds_are_reported():
    env = SequentialVectorEnv([random_walk_env])
    begun(env)
    problems = SequentialVectorEnv([random_walk_env]).load_state_dict(env.state_dict())
    assert "not seeded with an integer" in problems[0]


@pytest.mark.parametrize("n_envs", [1, 3])
def test_another_number_of_environments_starts_episodes_that_were_not_played_before(n_envs):
    def with_seeds(n):
        env = SequentialVectorEnv([random_walk_env] * n)
        env.seed([1, 2, 3][:n])
        return env

    env, other = with_seeds(2), with_seeds(n_envs)
    first = observed(env, begun(env))
    assert set(other.load_state_dict(env.state_dict())) == set(range(n_envs))
    assert not [seen for seen in observed(other, begun(other)) if seen in first]


def test_an_episode_without_end_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(structured_vector_env, "MAX_TICKS", 300)
    env = SequentialVectorEnv([partial(two_step_env, 10_000)])
    env.seed([1])
    play(env, begun(env), np.random.default_rng(0), 700)
    (state,) = env.state_dict()["environments"]
    assert "more than 300 steps" in state["problem"]
    assert len(env._log._ticks) <= 300 + 256
    other = SequentialVectorEnv([partial(two_step_env, 10_000)])
    assert "more than 300 steps" in other.load_state_dict({"environments": [state]})[0]
    assert begun(other)["choose"]["time"][0] == 0


@pytest.mark.parametrize("ticks_ago", [1, 4, 20])
@pytest.mark.parametrize("kind", [SequentialVectorEnv, partial(SubprocVectorEnv, start_method="fork")])
@pytest.mark.parametrize("name", ["continuous", "gymnasium"])
def test_the_seed_of_an_earlier_tick_reproduces_it(name, kind, ticks_ago, reseed_often):
    env = kind([FACTORIES[name]] * 3)
    env.seed([1, 2, 3])
    out, rng = begun(env), np.random.default_rng(3)
    actions, rewards = [], []
    for _ in range(40):
        actions.append(sampled_actions(env, rng))
        env.step(actions[-1], out=out)
        rewards.append(env.rewards.copy())
    seedings = [env.seeding_at(index, ticks_ago) for index in range(3)]
    env.close()
    tick = 40 - ticks_ago
    for index, (seed, n_ticks_since) in enumerate(seedings):
        again = FACTORIES[name]()
        again.seed(seed)
        again.reset()
        for taken in actions[tick - n_ticks_since : tick + 1]:
            _, reward, done, _ = again.step({key: column[index] for key, column in taken[0].items()})
            if done:
                again.reset()
        assert reward == rewards[tick][index]


def test_the_seed_is_known_in_a_restored_environment(reseed_often):
    original = SequentialVectorEnv([random_walk_env] * 2)
    original.seed([1, 2])
    play(original, begun(original), np.random.default_rng(3), 30)
    other = SequentialVectorEnv([random_walk_env] * 2)
    continued(other, original.state_dict())
    assert [other.seeding_at(index, 1) for index in range(2)] == [original.seeding_at(index, 1) for index in range(2)]


def test_absent_seeds_are_not_mentioned():
    env = SequentialVectorEnv([random_walk_env])
    play(env, begun(env), np.random.default_rng(3), 5)
    assert env.seeding_at(0, 1) is None
