"""Rollouts of perturbed policies: batched, sequential and in worker processes, with equal results."""

import copy
import itertools
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, NonFiniteError, WorkerError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.wrapper import ObservationWrapper
from maze.train.parallelization.vector_env.vector_env_utils import with_stats
from maze.train.trainers.common.observation_statistics import ObservationStatistics, ObservedRows
from maze.train.trainers.es.distributed.es_distributed_rollouts import EpisodeSeeds, Outcome, RolloutSchedule
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import (
    ESDummyDistributedRollouts,
    Players,
    Population,
    is_batchable,
)
from maze.train.trainers.es.distributed.es_rollout_wrapper import ESAbortException, ESRolloutWorkerWrapper
from maze.train.trainers.es.distributed.es_subproc_distributed_rollouts import ESSubprocDistributedRollouts
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_utils import get_flat_parameters, set_flat_parameters
from tests.train.parallelization.toy_envs import (
    coming_and_going_env,
    counting_env,
    hierarchical_env,
    random_walk_env,
    two_step_env,
)
from tests.train.trainers.common.recurrent_models import recurrent_model
from tests.train.trainers.es.populations import NormalizingNet, TorchOnlyNet, build_policy

NOISE = SharedNoiseTable(100_000)
cartpole = partial(GymMazeEnv, "CartPole-v1")
TORCH_ONLY = {"_target_": f"{TorchOnlyNet.__module__}.TorchOnlyNet"}


def summary(results):
    return [(result.is_eval, result.noise_indices, result.returns, result.lengths) for result in results]


def played(rollouts, policy, n_results, update=0, n_rollouts=6, n_timesteps=0, max_steps=30, stddev=0.5):
    rollouts.prepare_update(update, n_rollouts, n_timesteps)
    generator = rollouts.generate_rollouts(policy, max_steps, stddev, None)
    results = list(itertools.islice(generator, n_results))
    generator.close()
    return results


def dummy(make_env, **arguments):
    arguments = {"env_factory": make_env, "env_seed": 3, **arguments}
    return ESDummyDistributedRollouts(make_env(), 2, NOISE, 7, **arguments)


def single_player(env, policy):
    """Return a player that evaluates one policy at a time."""
    player = Players(None, NOISE, first_env=env)
    player.use(unbatched(policy))
    return player


def unbatched(policy):
    """Return a copy of a policy whose perturbations are evaluated one after another."""
    other = copy.deepcopy(policy)
    other.__class__ = type("OwnPolicy", (type(policy),), {})
    return other


@pytest.mark.parametrize("make_env", [cartpole, random_walk_env, two_step_env, hierarchical_env, coming_and_going_env])
def test_episodes_side_by_side_equal_episodes_one_after_another(make_env):
    policy = build_policy(make_env())
    together = dummy(make_env)
    one_by_one = dummy(make_env)
    results = played(together, policy, 5)
    assert not together.players.is_single
    assert summary(results) == [
        (is_eval, indices, pytest.approx(returns, rel=1e-5), lengths)
        for is_eval, indices, returns, lengths in summary(played(one_by_one, unbatched(policy), 5))
    ]


@pytest.mark.parametrize("concurrency", [1, 2, 3, 64])
def test_the_number_of_environments_does_not_change_a_bit(concurrency):
    policy = build_policy(hierarchical_env())
    reference = summary(played(dummy(hierarchical_env), policy, 6))
    assert summary(played(dummy(hierarchical_env, concurrency=concurrency), policy, 6)) == reference


def test_a_network_without_numpy_form_is_mapped_over_the_population():
    policy = build_policy(hierarchical_env(), TORCH_ONLY)
    assert is_batchable(policy, hierarchical_env().observation_spaces_dict)
    one_by_one = dummy(hierarchical_env)
    expected = [
        (*rest, pytest.approx(returns, rel=1e-5), n)
        for *rest, returns, n in summary(played(one_by_one, unbatched(policy), 5))
    ]
    assert summary(played(dummy(hierarchical_env), policy, 5)) == expected


@pytest.mark.parametrize("network", [None, TORCH_ONLY])
@pytest.mark.parametrize("rows", [slice(0, 3), np.array([2, 0])])
def test_each_row_of_a_population_acts_with_its_own_parameters(network, rows):
    env = random_walk_env()
    policy = build_policy(env, network)
    population = Population(policy, 3)
    rng = np.random.default_rng(0)
    population.parameters[:] = rng.normal(size=population.parameters.shape)
    chosen = np.arange(3)[rows]
    observations = {"position": rng.normal(size=(len(chosen), 3)).astype(np.float32)}
    env.reset()
    actions = population.act(env.actor_id(), observations, rows)["push"]
    for position, row in enumerate(chosen):
        set_flat_parameters(policy, torch.from_numpy(population.parameters[row]))
        single = {key: value[position] for key, value in observations.items()}
        expected = policy.compute_action(single, actor_id=env.actor_id(), deterministic=True)["push"]
        np.testing.assert_allclose(actions[position], expected, rtol=1e-5, atol=1e-6)


def test_networks_that_share_parameters_share_the_perturbation():
    env = two_step_env()
    policy = build_policy(env)
    n_before = Population(policy, 1).parameters.shape[1]
    policy.networks["choose"].heads[0].bias = policy.networks["cut"].heads[0].bias
    shared = Population(policy, 1)
    assert shared.parameters.shape[1] == policy.num_params == n_before - 4


def test_mirrored_policies_use_the_same_environment_seed_with_opposite_perturbations():
    seeds = EpisodeSeeds(NOISE, 1, 2)
    schedule = RolloutSchedule(seeds, update=4, n_evaluations=0, n_rollouts=4, n_timesteps=0)
    plus, minus, other = (schedule.next_episode() for _ in range(3))
    assert (plus.sign, minus.sign) == (1, -1)
    assert (plus.noise_index, plus.env_seed) == (minus.noise_index, minus.env_seed)
    assert (plus.noise_index, plus.env_seed) != (other.noise_index, other.env_seed)
    batch = Players(random_walk_env, NOISE, 2)
    batch.use(build_policy(random_walk_env()))
    parameters = get_flat_parameters(batch.policy).numpy()
    batch.configure(parameters, 0.5, None)
    rows = [np.empty_like(parameters) for _ in range(2)]
    for episode, row in zip((plus, minus), rows, strict=True):
        batch.perturbed(episode, row)
    np.testing.assert_allclose((rows[0] + rows[1]) / 2, parameters, atol=1e-6)
    np.testing.assert_allclose(rows[0] - parameters, 0.5 * NOISE.get(plus.noise_index, len(parameters)), atol=1e-6)


def test_results_are_ordered_independently_of_completion_order():
    schedule = RolloutSchedule(EpisodeSeeds(NOISE, 1, 2), 0, n_evaluations=1, n_rollouts=3, n_timesteps=0)
    episodes = [schedule.next_episode(), *(schedule.next_episode() for _ in range(4))]
    assert schedule.next_episode() is None
    for episode in reversed(episodes[1:]):
        schedule.record(episode, Outcome({}, float(episode.number), 10))
        assert list(schedule.results()) == []
    schedule.record(episodes[0], Outcome({}, 0.0, 10))
    assert [result.returns for result in schedule.results()] == [[0.0], [1.0, 2.0], [3.0, 4.0]]


def test_more_episodes_are_started_until_their_steps_suffice():
    schedule = RolloutSchedule(EpisodeSeeds(NOISE, 1, 2), 0, n_evaluations=0, n_rollouts=2, n_timesteps=45)
    first = [schedule.next_episode(), schedule.next_episode()]
    for episode in first:
        schedule.record(episode, Outcome({}, 0.0, 10))
    n_started = 2
    while schedule.next_episode() is not None:
        n_started += 1
    assert n_started == 6  # of ten steps each; pairs are completed


def test_max_steps_cuts_episodes_off_after_environment_steps_not_substeps():
    results = played(dummy(partial(two_step_env, 50)), build_policy(two_step_env()), 4, max_steps=7)
    assert all(length == 7 for result in results for length in result.lengths)


def test_statistics_are_those_of_the_episodes():
    results = played(dummy(counting_env), build_policy(counting_env()), 3)
    for result in results:
        for stats in result.episode_stats:
            values = {key.output_name: value for key, value in stats.items() if key.event is BaseEnvEvents.reward}
            assert values == {"count": 3, "sum": 6.0}  # rewards 1, 2, 3
        assert result.returns == [6.0] * len(result.lengths)


def test_more_results_than_announced_are_available():
    assert len(played(dummy(counting_env), build_policy(counting_env()), 12, n_rollouts=2)) == 12


def test_a_policy_of_another_class_plays_one_episode_at_a_time():
    policy = build_policy(counting_env())

    class Contrarian(type(policy)):
        def compute_action(self, *args, **kwargs):
            return {"move": 4 - super().compute_action(*args, **kwargs)["move"]}

    policy.__class__ = Contrarian
    before = get_flat_parameters(policy)
    rollouts = dummy(counting_env)
    assert len(played(rollouts, policy, 4)) == 4
    assert rollouts.players.is_single
    assert torch.equal(get_flat_parameters(policy), before)


def test_the_wrapper_plays_a_mirrored_pair_and_restores_the_policy():
    policy = build_policy(random_walk_env())
    before = get_flat_parameters(policy)
    env = ESRolloutWorkerWrapper(random_walk_env(), NOISE, agent_instance_seed=1)
    env.seed(1)
    result = env.generate_training(policy, noise_stddev=0.1)
    assert (len(result.noise_indices), len(result.returns), result.is_eval) == (1, 2, False)
    assert torch.equal(get_flat_parameters(policy), before)
    assert env.generate_evaluation(policy).is_eval
    env.set_abort()
    with pytest.raises(ESAbortException):
        env.rollout(policy)
    env.clear_abort()
    env.rollout(policy)


@pytest.fixture(scope="module")
def workers():
    rollouts = ESSubprocDistributedRollouts(cartpole, 2, 0, NOISE, [3], 7, n_eval_rollouts=2, concurrency=2)
    yield rollouts
    rollouts.close()


def test_workers_give_the_results_of_a_single_process(workers):
    policy = build_policy(cartpole())
    here = dummy(cartpole)
    for update, n_rollouts, n_timesteps in ((0, 6, 0), (1, 0, 200), (2, 5, 50)):
        arguments = {"update": update, "n_rollouts": n_rollouts, "n_timesteps": n_timesteps}
        expected = played(here, policy, 5, **arguments)
        results = played(workers, policy, 5, **arguments)
        assert summary(results) == summary(expected)
        assert [result.episode_stats for result in results] == [result.episode_stats for result in expected]
        set_flat_parameters(policy, get_flat_parameters(policy) * 1.5)  # workers get the new ones


# -- running normalization --------------------------------------------------------------------------------------------


def normalizing(env, in_numpy=True):
    """Return a policy with learned normalization statistics."""
    if in_numpy:
        policy = recurrent_model(env, recurrence=False, normalize_observations=True).policy
    else:
        policy = build_policy(env, {"_target_": f"{NormalizingNet.__module__}.NormalizingNet"})
    learned(policy, env, 0)
    return policy


def learned(policy, env, seed):
    rng = np.random.default_rng(seed)
    seen = [
        {key: rng.normal(0.5, 2.0, (20, *space[key].shape)) for key in space}
        for space in env.observation_spaces_dict.values()
    ]
    ObservationStatistics(policy).learn_from(seen)


def observed_statistics(results):
    """Return the observation statistics of results, as bytes."""
    return [
        {name: (count, mean.tobytes(), variance.tobytes()) for name, (count, mean, variance) in each.items()}
        for result in results
        for each in result.observed
    ]


@pytest.mark.parametrize(
    ("make_env", "in_numpy"), [(cartpole, True), (cartpole, False), (random_walk_env, True), (hierarchical_env, False)]
)
def test_observation_statistics_do_not_depend_on_the_batch(make_env, in_numpy):
    policy = normalizing(make_env(), in_numpy)
    together, few, one_by_one = dummy(make_env), dummy(make_env, concurrency=2), dummy(make_env)
    results = played(together, policy, 5)
    assert not together.players.is_single
    assert [len(result.observed) for result in results] == [0, 0, 2, 2, 2], "evaluations teach nothing"
    assert observed_statistics(played(few, policy, 5)) == observed_statistics(results)
    for one, other in zip(played(one_by_one, unbatched(policy), 5), results, strict=True):
        for mine, its in zip(one.observed, other.observed, strict=True):
            assert mine.keys() == its.keys()
            for name, (count, mean, variance) in mine.items():
                assert count == its[name][0]
                np.testing.assert_allclose(mean, its[name][1], rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(variance, its[name][2], rtol=1e-4, atol=1e-6)


def test_workers_normalize_by_what_was_learned_last(workers):
    policy = normalizing(cartpole())
    here = dummy(cartpole)
    summaries = []
    for update in range(2):
        expected = played(here, policy, 5, update=update)
        results = played(workers, policy, 5, update=update)
        assert (summary(results), observed_statistics(results)) == (summary(expected), observed_statistics(expected))
        summaries.append(summary(played(here, policy, 5, update=0)))
        learned(policy, cartpole(), update + 1)
    assert summaries[0] != summaries[1], "the statistics must have an effect"


def test_policies_without_normalization_report_no_statistics():
    policy = build_policy(cartpole())
    assert observed_statistics(played(dummy(cartpole), policy, 4)) == []


def test_sums_of_rows_are_the_statistics_of_their_episodes():
    space = {"walk": spaces.Dict({"far": spaces.Box(-1e9, 1e9, (2,), np.float32), "mask": spaces.MultiBinary(3)})}
    rows, actor = ObservedRows(["far"], space, 3), ActorID("walk", 0)
    rng = np.random.default_rng(0)
    seen = rng.normal(1e6, 1.0, (200, 3, 2)).astype(np.float32)
    seen[:, :, 1] = 0.1  # does not vary
    assert rows.of(0) is None
    for step, values in enumerate(seen):
        if step == 50:
            rows.begin(1)
        if step == 150:
            rows.move(2, 0)
        rows.add(actor, {"far": values[[2, 0]]}, np.array([2, 0]))
        rows.add(actor, {"far": values[1:2]}, slice(1, 2))
    for row, expected in ((1, seen[50:, 1]), (2, seen[:, 2])):
        count, mean, variance = rows.of(row)["far"]
        assert count == len(expected)
        np.testing.assert_allclose(mean, expected.mean(0, dtype=float), rtol=1e-12)
        np.testing.assert_allclose(variance, expected.var(0, dtype=float), rtol=1e-6)
        assert variance[1] == 0.0
    moved = np.concatenate([seen[:150, 2], seen[150:, 0]])
    np.testing.assert_allclose(rows.of(0)["far"][1], moved.mean(0, dtype=float), rtol=1e-12)


def test_discarded_episodes_do_not_affect_the_next_update(workers):
    policy = build_policy(cartpole())
    played(workers, policy, 1, n_rollouts=64)
    assert summary(played(workers, policy, 5, update=1)) == summary(played(dummy(cartpole), policy, 5, update=1))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("raise", "raised ValueError: the simulator lost its marbles"),
        pytest.param("kill", r"killed by signal 9 \(SIGKILL\)", marks=pytest.mark.slow),
    ],
)
def test_a_failing_worker_becomes_one_error(fault, expected):
    make_env = partial(counting_env, ((100, "terminated"),), (fault, 2))
    rollouts = ESSubprocDistributedRollouts(make_env, 1, 0, NOISE, [3], 7, n_eval_rollouts=1)
    with pytest.raises(WorkerError, match=expected):
        played(rollouts, build_policy(counting_env()), 1)
    rollouts.close()
    assert not any(worker.process.is_alive() for worker in rollouts.pool.workers)


@pytest.mark.slow
def test_a_worker_killed_between_updates_becomes_an_error_and_close_returns():
    rollouts = ESSubprocDistributedRollouts(counting_env, 1, 1, NOISE, [3], 7, n_eval_rollouts=1)
    policy = build_policy(counting_env())
    played(rollouts, policy, 2)
    os.kill(rollouts.pool.workers[1].process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 .*SIGKILL"):
        played(rollouts, policy, 4)  # its slice is needed
    rollouts.close()


def test_invalid_numbers_of_workers_are_refused():
    with pytest.raises(ConfigError, match=r"runner\.n_train_workers: expected a whole number of at least 1, found 0"):
        ESSubprocDistributedRollouts(counting_env, 0, 1, NOISE, [3], 7)


def test_statistics_of_an_environment_do_not_pile_up():
    env = with_stats(counting_env())
    player = single_player(env, build_policy(env))
    player.configure(get_flat_parameters(player.policy).numpy(), 0.1, None)
    schedule = RolloutSchedule(EpisodeSeeds(NOISE, 1, None), 0, 0, 4, 0)
    for _ in range(4):
        player.start(schedule.next_episode())
        while not player.advance():
            pass
    env.write_epoch_stats()
    assert env.epoch_stats.last_stats == {}


class Faulty(ObservationWrapper):
    """Something becomes NaN in environment step 5 of each episode that it lasts to."""

    def __init__(self, env, what):
        super().__init__(env)
        self.what = what
        self.n_steps = 0

    def reset(self):
        self.n_steps = 0
        return self.env.reset()

    def step(self, action):
        observation, reward, done, info = self.env.step(action)
        self.n_steps += 1
        if self.what == "observation" and self.n_steps == 5:
            observation = {key: value * np.float32("nan") for key, value in observation.items()}
        if self.what == "reward" and self.n_steps == 6:
            reward = float("nan")
        return observation, reward, done, info

    def observation(self, observation):
        return observation


def faulty_cartpole(what):
    return Faulty.wrap(cartpole(), what=what)


@pytest.mark.parametrize("how", ["together", "one by one", "subproc"])
@pytest.mark.parametrize("what", ["observation", "reward"])
def test_a_number_that_is_not_finite_names_its_episode_and_step(what, how):
    make_env = partial(faulty_cartpole, what)
    policy = build_policy(make_env())
    if how == "subproc":
        rollouts = ESSubprocDistributedRollouts(make_env, 1, 0, NOISE, [3], 7, start_method="fork", n_eval_rollouts=0)
    else:
        rollouts = ESDummyDistributedRollouts(make_env(), 0, NOISE, 7, env_factory=make_env, env_seed=3)
        if how == "one by one":
            policy = unbatched(policy)
    seeds = EpisodeSeeds(NOISE, 7, 3)
    episode = rf"perturbation {seeds.noise_index(0, 0)} of the noise table added, seeded with {seeds.env_seed(0, 0, 0)}"
    with pytest.raises(NonFiniteError, match=rf"{episode}, environment step 5: .*{what} .* is nan"):
        played(rollouts, policy, 3)
    rollouts.close()


@pytest.mark.parametrize("network", [None, TORCH_ONLY])
def test_frozen_layers_are_the_same_for_all_perturbed_policies(network):
    policy = build_policy(cartpole(), network)
    next(iter(policy.parameters())).requires_grad_(False)
    together, one_by_one = dummy(cartpole), dummy(cartpole)
    assert summary(played(together, policy, 6)) == summary(played(one_by_one, unbatched(policy), 6))
    assert not together.players.is_single


class Counted(ObservationWrapper):
    """Leaves a line in a file when it is made and when it is closed."""

    def __init__(self, env, file):
        super().__init__(env)
        self.file = file
        self.note("made")

    def note(self, what):
        with open(self.file, "a") as file:
            file.write(f"{what}\n")

    def close(self):
        self.note("closed")
        self.env.close()

    def observation(self, observation):
        return observation


def counted_cartpole(file):
    return Counted.wrap(cartpole(), file=file)


@pytest.mark.parametrize("kind", ["dummy", "subproc"])
def test_all_environments_are_closed(tmp_path, kind):
    make_env = partial(counted_cartpole, tmp_path / "log")
    if kind == "dummy":
        rollouts = dummy(make_env)
    else:
        rollouts = ESSubprocDistributedRollouts(make_env, 2, 0, NOISE, [3], 7, start_method="fork", n_eval_rollouts=2)
    for _ in range(2):
        played(rollouts, build_policy(cartpole()), 5)
    rollouts.close()
    lines = (tmp_path / "log").read_text().split()
    assert lines.count("made") == lines.count("closed") > 4
