"""The queueing networks against published figures and an exact solver."""

from __future__ import annotations

import numpy as np
import pytest

from maze.core.errors import ConfigError
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.utils.check_env import check_env
from maze_envs.queueing.exact import criss_cross_optimum, criss_cross_values, expected_changes, smoothed_cost, tabulated
from maze_envs.queueing.network import PriorityPolicy, QueueingEnv, Queues, network_of


@pytest.mark.parametrize(("regime", "published"), [("I.L.", 0.671), ("B.L.", 0.843)])
def test_the_optimum_of_the_criss_cross_network_is_the_published_one(regime, published):
    low, high = criss_cross_optimum(regime, buffer=18)
    assert (low + high) / 2 == pytest.approx(published, abs=0.002)


@pytest.mark.long
@pytest.mark.parametrize(("regime", "published"), [("I.M.", 2.084), ("B.M.", 2.829)])
def test_the_optimum_under_medium_load_is_the_published_one(regime, published):
    low, high = criss_cross_optimum(regime, buffer=36, tolerance=5e-3)
    assert (low + high) / 2 == pytest.approx(published, abs=0.006)


def test_the_number_of_jobs_equals_that_of_the_exact_solver():
    rule = PriorityPolicy("I.L.", "longest_queue")
    low, high = criss_cross_optimum("I.L.", 18, lambda jobs: rule.choose({"jobs": jobs / 10}, 0)["server_0"])
    assert average_jobs("I.L.", rule, 4000) == pytest.approx((low + high) / 2, abs=0.01)
    assert low > criss_cross_optimum("I.L.", 18)[0]


def test_smoothed_costs_have_the_same_average_and_vary_less():
    best = criss_cross_values("I.L.", 18, tolerance=1e-6)
    choices = tabulated(longest_first, 18)
    costs = smoothed_cost("I.L.", best.values, choices)
    assert costs.min() == pytest.approx(best.low, abs=1e-5)  # no state is better than under the best policy
    rng = np.random.default_rng(0)
    jobs, smoothed, arbitrary = [], [], []
    other_costs = smoothed_cost("I.L.", best.values + rng.normal(size=best.values.shape), choices)
    queues = Queues(400, "I.L.", max_episode_steps=None)
    for row in range(400):
        queues.random.seed(row, row)
    queues.begin(np.arange(400))
    for tick in range(4000):
        at = tuple(np.minimum(queues.jobs, 18).T)
        if tick >= 300:
            jobs.append(queues.jobs.sum(axis=1))
            smoothed.append(costs[at])
            arbitrary.append(other_costs[at])
        queues.advance({"server_0": choices[at]})
    assert np.mean(smoothed) == pytest.approx(np.mean(jobs), abs=0.01)
    assert np.mean(arbitrary) == pytest.approx(np.mean(jobs), abs=0.01)
    assert np.mean(smoothed, axis=0).std() < 0.05 * np.mean(jobs, axis=0).std()


def test_expected_changes_are_those_of_the_values_in_all_states_of_the_criss_cross_network():
    values = np.random.default_rng(0).normal(size=(9, 9, 9))
    choices = tabulated(longest_first, 8)
    jobs = np.indices((8, 8, 8)).reshape(3, -1).T  # within full buffers, where jobs are turned away
    served = np.stack([choices[tuple(jobs.T)] == 0, choices[tuple(jobs.T)] == 1, np.ones(len(jobs), np.bool_)], axis=1)
    changes = expected_changes("B.H.", jobs, served, lambda states: values[tuple(states.T)][:, None])
    costs = smoothed_cost("B.H.", values, choices)[tuple(jobs.T)]
    # ticks of the simulation are shorter: it draws services of both classes of the first server, of which one is idle
    longer = (2 * 0.9 + 2.0 + 2.0 + 1.0) / (2 * 0.9 + 2.0 + 1.0)
    np.testing.assert_allclose(jobs.sum(axis=1) + longer * changes[:, 0], costs, atol=1e-12)


def test_expected_changes_are_what_happens_on_average():
    queues = Queues(20_000, "extended_6", max_episode_steps=None)
    for row in range(len(queues.jobs)):
        queues.random.seed(row, row)
    queues.begin(np.arange(len(queues.jobs)))
    start = np.array([1, 0, 3, 2, 4, 1])
    queues.jobs[:] = start
    served = np.array([[False, False, True, True, False, False]])
    weights = np.array([1.0, 5.0, -2.0, 3.0, 7.0, 11.0])
    (expected,) = expected_changes("extended_6", start[None], served, lambda jobs: (jobs @ weights)[:, None])
    queues.advance({"server_0": np.full(20_000, 2), "server_1": np.zeros(20_000, np.int64)})
    changed = (queues.jobs - start) @ weights
    assert changed.mean() == pytest.approx(expected[0], abs=4 * changed.std() / 20_000**0.5)
    assert abs(expected[0]) > 8 * changed.std() / 20_000**0.5


def longest_first(jobs):
    return PriorityPolicy("I.L.", "longest_queue").choose({"jobs": jobs / 10}, 0)["server_0"]


def test_a_flow_passes_its_classes_in_order():
    net = network_of("extended_6")
    assert net.following == (3, 4, 5, 1, -1, -1)
    assert net.classes_of(1) == [3, 4, 5]
    assert [1 / rate for rate in net.services] == pytest.approx([8, 2, 4, 6, 7, 1])
    queues = Queues(1, "extended_6")
    queues.jobs[0] = [1, 0, 0, 0, 0, 0]
    seen = []
    for cls, action in [(0, (0, 0)), (3, (0, 0)), (1, (1, 0)), (4, (1, 1))]:
        queues.random.uniform = lambda cls=cls: np.array([queues._cumulative[5 + cls] + 1e-9])
        queues.advance({"server_0": np.array([action[0]]), "server_1": np.array([action[1]])})
        seen.append(queues.jobs[0].tolist().index(1) if queues.jobs.any() else None)
    assert seen == [3, 1, 4, None]


def test_a_stopping_server_completes_only_requests_in_progress():
    queues = Queues(1, "I.M.")
    queues.jobs[0] = [2, 2, 0]
    queues.random.uniform = lambda: np.array([queues._cumulative[2] + 1e-9])  # a service of class 0 would be completed
    queues.advance({"server_0": np.array([1])})
    assert queues.jobs[0].tolist() == [2, 2, 0]
    queues.advance({"server_0": np.array([0])})
    assert queues.jobs[0].tolist() == [1, 2, 1]


def test_a_full_buffer_turns_jobs_away():
    queues = Queues(2, "I.M.", buffer=3)
    queues.jobs[:] = [[3, 0, 0], [2, 0, 0]]
    queues.random.uniform = lambda: np.zeros(2)  # a job of class 0 arrives
    queues.advance({"server_0": np.array([1, 1])})
    assert queues.jobs[:, 0].tolist() == [3, 3]
    assert [event.where.tolist() for event in queues.fired if event.where is not None] == [[True, False]]


@pytest.mark.parametrize("network", ["B.M.", "extended_6"])
def test_the_environments_are_sound_and_batches_take_their_course(network):
    report = check_env(lambda: QueueingEnv(network), n_steps=60)
    assert report.findings == []
    assert all("forbidden actions" in note for note in report.skipped)  # an empty class is the same as resting
    rule = PriorityPolicy(network, "c_mu")
    single = SequentialVectorEnv([lambda: QueueingEnv(network, max_episode_steps=90)] * 2)
    many = BatchedVectorEnv(Queues(2, network, max_episode_steps=90))
    seen = []
    for env in (single, many):
        env.seed([1, 2])
        observations = env.reset()
        seen.append([])
        for _ in range(200):
            observations, rewards, dones, _ = env.step(rule.compute_actions(observations))
            seen[-1].append(
                (observations["jobs"].tolist(), rewards.tolist(), dones.tolist(), dict(env.finished_episodes))
            )
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["X.L.", "extended", "extended_3", "extended_7"])
def test_unknown_networks_and_heuristics_are_named(name):
    with pytest.raises(ConfigError, match=r"env.network: expected a load regime .* found '" + name):
        QueueingEnv(name)
    with pytest.raises(ConfigError, match="expected last_buffer_first, c_mu or longest_queue, found 'fifo'"):
        PriorityPolicy("I.M.", "fifo")


def test_queues_are_rendered():
    import matplotlib.pyplot as plt

    env = QueueingEnv("extended_6")
    env.seed(1)
    env.reset()
    state = {**env.get_maze_state(), "jobs": np.array([1, 2, 3, 0, 5, 6])}
    env.get_renderer().render(state, {"server_0": np.array(1), "server_1": np.array(0)}, None)
    assert [patch.get_height() for patch in plt.gca().patches] == [1, 2, 3, 0, 5, 6]
    plt.close()


def average_jobs(network, rule, n_ticks):
    n_envs = 512
    queues = Queues(n_envs, network, max_episode_steps=None, warm_up=n_ticks // 2)
    for row in range(n_envs):
        queues.random.seed(row, row)
    queues.begin(np.arange(n_envs))
    seen = {key: np.zeros((n_envs, *space.shape), np.float32) for key, space in queues.observation_spaces[0].items()}
    for _ in range(n_ticks):
        queues.observe(seen)
        queues.advance(rule.choose(seen, 0))
    return queues.kpis(np.arange(n_envs))["average_jobs"].mean()
