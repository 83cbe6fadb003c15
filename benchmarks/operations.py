"""Operations problems: trained policies, exact values, heuristics and published figures; one run per setting and seed.

Runs are the shipped experiments through the command line, inventory problems with a warm start from their best
rule. The long-run average cost of what they learned is computed exactly where the states can be listed (inventory,
criss-cross network in light and medium load), and otherwise simulated, with 95 % intervals.

    python benchmarks/operations.py lost_sales --settings poisson,4,4     # demand, penalty, lead time
    python benchmarks/operations.py dual_sourcing --settings 2,105        # lead time, price of express orders
    python benchmarks/operations.py criss_cross --settings B.M.
    python benchmarks/operations.py extended_network --seeds 1
    python benchmarks/operations.py bin_packing --seeds 1 --overrides algorithm.n_epochs=40
    python benchmarks/operations.py lost_sales --keep runs --jobs 2 --markdown docs/benchmarks/operations.md

Without `--settings` all of the published table are taken (hours). `--keep` keeps the runs, and those that are finished
there are not trained again, so that the hours can be spread; `--markdown` writes the table into a page, where rows of
other settings stay unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.page_tables import markdown_table, rows_of, write_table

T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Quantiles of the t distribution for 95 % intervals of so many seeds."""

DUAL_PUBLISHED = {"2,105": 0.52, "2,110": 0.80, "3,105": 0.82, "3,110": 0.51, "4,105": 1.85, "4,110": 1.33}
"""Gaps of A3C in percent (Gijsbrechts et al. 2022, figure 9)."""
NETWORK_PUBLISHED = {
    "I.L.": 0.671,
    "B.L.": 0.843,
    "I.M.": 2.084,
    "B.M.": 2.829,
    "I.H.": 9.970,
    "B.H.": 15.228,
    "extended_6": 14.130,
    "extended_9": 23.269,
}
"""Average numbers of jobs: optimum of the criss-cross network, PPO on the extended ones (Dai and Gluzman 2022)."""
PACKING_PUBLISHED = {"uniform,500": "first fit 5.74, best fit 5.37, formula 3.11"}
"""Romera-Paredes et al. (2024), on other instances of the same distribution."""
BUFFERS = {"I.L.": 18, "B.L.": 18, "I.M.": 36, "B.M.": 36}
"""Jobs of a class at most, where the average is computed exactly."""
LARGEST_QUEUE = 160
"""Maximum queue length for which policies are evaluated in simulations."""


@dataclass
class Row:
    """One setting."""

    setting: str
    reference: float
    """The exact optimum, or what the published best policy reaches."""
    rules: dict[str, float]
    learned: list[float] = field(default_factory=list)
    """By seed."""
    seconds: list[float] = field(default_factory=list)
    """Training time by seed."""
    published: str = ""

    def cells(self) -> list[str]:
        """The row of the table."""
        rules = ", ".join(f"{name} {value:.3f}" for name, value in self.rules.items())
        figures = ["", "", ""]
        if self.learned:
            spread = "" if len(self.learned) < 2 else f" ± {interval(self.learned):.3f}"
            gap = f"{100 * (mean(self.learned) / self.reference - 1):+.2f} %" if self.reference else ""
            figures = [f"{mean(self.learned):.3f}{spread}", gap, f"{mean(self.seconds):.0f}"]
        reference = f"{self.reference:.3f}" if self.reference else ""
        return [self.setting, reference, rules, self.published, *figures, f"{len(self.learned)}"]


HEADER = ["setting", "reference", "heuristics", "published", "learned", "gap", "seconds per run", "seeds"]
"""Of the table; intervals are for 95 %."""


@dataclass(frozen=True)
class Training:
    """One training to do."""

    experiment: str
    directory: Path
    seed: int
    overrides: tuple[str, ...]


Rows = Generator[list[Training], None, Row]
"""First the runs of a setting, then, when they are done, its row."""


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean."""
    return T_95.get(len(values), 2.0) * stdev(values) / len(values) ** 0.5


LAST = "latest.pt"
"""Weights of the last epoch: learning rates end at 0, and epochs differ by less than the noise of evaluations."""
FINISHED = "benchmark.json"
"""Written into the directory of a run when it has ended: its settings and its seconds."""


def train(training: Training) -> None:
    """Train in a process of its own, unless it is finished.

    :raises SystemExit: It failed, or another one, with other settings, was done in its directory.
    """
    settings = [f"+experiment={training.experiment}", *training.overrides]
    directory, file = training.directory, training.directory / FINISHED
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))["settings"]
        if found != settings:
            raise SystemExit(f"{directory} was trained with {' '.join(found)}; expected {' '.join(settings)}.")
        print(f"{directory.name}: trained before", flush=True)
        return
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was interrupted
    seeds = (f"seeding.env_base_seed={training.seed}", f"seeding.agent_base_seed={training.seed}")
    command = [sys.executable, "-m", "maze.maze_cli", "-cn", "conf_train", *settings, *seeds]
    command.append(f"hydra.run.dir={directory}")
    start = time.perf_counter()
    finished = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {finished.returncode}:\n{finished.stderr[-3000:]}")
    seconds = time.perf_counter() - start
    file.write_text(json.dumps({"settings": settings, "seconds": seconds}), encoding="utf-8")
    print(f"{directory.name}: {seconds:.0f} s", flush=True)


def seconds_of(training: Training) -> float:
    """How long a run took."""
    return float(json.loads((training.directory / FINISHED).read_text(encoding="utf-8"))["seconds"])


def _run(directory: Path, problem: str, setting: str, seed: int) -> Path:
    """Where a training writes; commas would be a list to the command line."""
    return directory / f"{problem}-{setting.replace(',', '-')}-{seed}"


def trained(
    directory: Path, weights: str = "state_dict.pt", deterministic: bool = True
) -> tuple[Any, Callable[[Any, dict[str, np.ndarray]], dict[str, np.ndarray]]]:
    """The simulation that a run was trained in (of one environment), and its policy's actions.

    :param directory: The run's.
    :param weights: Those of the best evaluation, or `latest.pt`: of the last epoch.
    :param deterministic: Take the most probable actions, instead of drawing.
    """
    from omegaconf import OmegaConf

    from maze.core.env.structured_env import ActorID
    from maze.core.rollout.rollout_runner import RolloutRunner

    config: Any = OmegaConf.load(directory / ".hydra" / "config.yaml")
    agent = {
        "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
        "model": OmegaConf.to_container(config.model, resolve=False),
        "state_dict_file": weights,
        "spaces_dict_file": "spaces_config.pkl",
        "device": "cpu",
    }
    env, policy = RolloutRunner.init_env_and_agent(config.env, config.wrappers, 0, agent, str(directory))
    policy.seed(0)

    def act(step_key: Any, observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        n_rows = len(next(iter(observation.values())))
        chunks = [
            policy.compute_actions(  # type: ignore[attr-defined]  # a torch policy
                {key: np.asarray(value[start : start + 20_000], np.float32) for key, value in observation.items()},
                ActorID(step_key, 0),
                deterministic=deterministic,
            )
            for start in range(0, n_rows, 20_000)
        ]
        return {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}

    return env, act


def critic_of(directory: Path, weights: str) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """Value `[n]` of observations at the first sub-step, as the critic of a run has them."""
    import torch
    from omegaconf import OmegaConf

    from maze.core.utils.checkpoint import load_state
    from maze.core.utils.factory import Factory
    from maze.perception.models.model_composer import BaseModelComposer
    from maze.perception.models.space_config import SpacesConfig

    config: Any = OmegaConf.to_container(OmegaConf.load(directory / ".hydra" / "config.yaml"), resolve=True)
    spaces = vars(SpacesConfig.load(str(directory / "spaces_config.pkl")))
    composer = Factory(BaseModelComposer).instantiate(config["model"], config_path="model", **spaces)  # type: ignore[type-abstract]
    state = load_state(str(directory / weights))
    critic: Any = composer.critic
    critic.load_state_dict(state.get("model", state))
    network = next(iter(critic.networks.values())).eval()

    def values(observation: dict[str, np.ndarray]) -> np.ndarray:
        tensors = {key: torch.as_tensor(value, dtype=torch.float32) for key, value in observation.items()}
        with torch.inference_mode():
            return np.asarray(network(tensors)["value"].reshape(-1).numpy(), np.float64)

    return values


# -- inventory ---------------------------------------------------------------------------------------


def searched(cost: Callable[..., float], start: Sequence[int], lowest: Sequence[int]) -> tuple[float, list[int]]:
    """Coordinate descent over integers: the cost and the parameters of the best rule it finds."""
    best, at = cost(*start), list(start)
    improved = True
    while improved:
        improved = False
        for position in range(len(at)):
            for step in (1, -1):
                while at[position] + step >= lowest[position]:
                    other = [value + step * (index == position) for index, value in enumerate(at)]
                    found = cost(*other)
                    if found >= best:
                        break
                    best, at, improved = found, other, True
    return best, at


def lost_sales(setting: str, seeds: Sequence[int], directory: Path, overrides: Sequence[str]) -> Rows:
    """Zipkin's test bed."""
    from maze_envs.inventory.exact import lost_sales_cost
    from maze_envs.inventory.lost_sales import SCALE, LostSales

    demand, penalty, lead_time = setting.split(",")
    largest = 12 if demand == "poisson" else 20
    problem = LostSales(1, demand, lead_time=int(lead_time), penalty=float(penalty), max_order=largest)
    best = lost_sales_cost(problem, tolerance=1e-3).cost

    def cost_of(level: int, cap: int, tolerance: float = 5e-3) -> float:
        policy = lambda states: np.clip(level - states.sum(axis=1), 0, cap)  # noqa: E731
        return lost_sales_cost(problem, policy, tolerance, largest_order=min(cap, level)).cost

    start = round(problem.mean_demand * (problem.lead_time + 1))
    _, (level, cap) = searched(cost_of, [start + 2, round(problem.mean_demand) + 1], [1, 1])
    capped = cost_of(level, cap, tolerance=1e-3)
    base_stock, _ = searched(lambda level: cost_of(level, largest), [level], [1])
    row = Row(setting, best, {"base-stock": base_stock, f"capped ({level}, {cap})": capped})
    env = (f"env.demand={demand}", f"env.penalty={penalty}", f"env.lead_time={lead_time}", f"env.max_order={largest}")
    warm = (
        *("policy@warm_start.policy=base_stock", f"warm_start.policy.level={level}", f"warm_start.policy.cap={cap}"),
        "algorithm.critic_burn_in_epochs=1",
    )
    training_runs = [
        Training("lost_sales_ppo", _run(directory, "lost_sales", setting, seed), seed, (*env, *warm, *overrides))
        for seed in seeds
    ]
    yield training_runs
    for training in training_runs:
        row.seconds.append(seconds_of(training))
        _, act = trained(training.directory, LAST)
        found = lost_sales_cost(
            problem, lambda states, act=act: act(0, {"stock": states / SCALE})["order"], tolerance=1e-3
        )
        row.learned.append(found.cost)
    return row


def dual_sourcing(setting: str, seeds: Sequence[int], directory: Path, overrides: Sequence[str]) -> Rows:
    """The settings of Gijsbrechts et al. (2022); costs include a constant of 200."""
    from maze_envs.inventory.dual_sourcing import EXPRESS, REGULAR, SCALE, DualSourcing
    from maze_envs.inventory.exact import dual_sourcing_cost

    lead_time, express_cost = setting.split(",")
    problem = DualSourcing(1, lead_time=int(lead_time), express_cost=float(express_cost))
    best = dual_sourcing_cost(problem).cost

    def cost_of(express_level: int, regular_level: int, cap: int) -> float:
        def orders(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            express = np.clip(express_level - states[:, 0], 0, problem.max_express)
            return express, np.clip(regular_level - states.sum(axis=1) - express, 0, cap)

        return dual_sourcing_cost(problem, orders, tolerance=5e-3).cost

    start = [4, 3 + 2 * problem.lead_time]
    dual, at = searched(lambda *levels: cost_of(*levels, problem.max_regular), start, [0, 0])
    capped, at = searched(cost_of, [*at, 2], [0, 0, 1])
    row = Row(setting, best, {"dual index": dual, f"capped {tuple(at)}": capped})
    row.published = f"A3C {best * (1 + DUAL_PUBLISHED[setting] / 100):.2f}" if setting in DUAL_PUBLISHED else ""
    env = (f"env.lead_time={lead_time}", f"env.express_cost={express_cost}")
    levels = zip(("express_level", "regular_level", "cap"), at, strict=True)
    warm = ("policy@warm_start.policy=dual_index", *(f"warm_start.policy.{name}={value}" for name, value in levels))
    given = (*env, *warm, "algorithm.critic_burn_in_epochs=1", *overrides)
    training_runs = [
        Training("dual_sourcing_ppo", _run(directory, "dual_sourcing", setting, seed), seed, given) for seed in seeds
    ]
    yield training_runs
    for training in training_runs:
        row.seconds.append(seconds_of(training))
        _, act = trained(training.directory)

        def learned(states: np.ndarray, act: Any = act) -> tuple[np.ndarray, np.ndarray]:
            express = act(EXPRESS, {"stock": states / SCALE})[EXPRESS]
            raised = states + express[:, None] * (np.arange(states.shape[1]) == 0)
            return express, act(REGULAR, {"stock": raised / SCALE})[REGULAR]

        row.learned.append(dual_sourcing_cost(problem, learned, tolerance=5e-3).cost)
    return row


# -- queueing networks -------------------------------------------------------------------------------


def queueing(setting: str, seeds: Sequence[int], directory: Path, overrides: Sequence[str]) -> Rows:
    """Average numbers of jobs."""
    from maze_envs.queueing.exact import criss_cross_optimum, criss_cross_values, smoothed_cost, tabulated
    from maze_envs.queueing.network import CRISS_CROSS, SCALE, PriorityPolicy

    rules = {rule: PriorityPolicy(setting, rule) for rule in ("longest_queue", "c_mu", "last_buffer_first")}
    buffer = BUFFERS.get(setting)
    published = NETWORK_PUBLISHED.get(setting, float("nan"))
    values = None
    if buffer is None and setting in CRISS_CROSS:  # of smaller queues: others vary more, but their average is the same
        values = np.pad(criss_cross_values(setting, 70, tolerance=0.02).values, (0, LARGEST_QUEUE - 70), mode="edge")

    def average(
        choose: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
        critic: Callable[[dict[str, np.ndarray]], np.ndarray] | None = None,
    ) -> float:
        if setting not in CRISS_CROSS:
            return simulated(setting, choose, critic)

        def of_states(jobs: np.ndarray) -> np.ndarray:
            waits = jobs[:, :2] > 0
            mask = waits | ~waits.any(axis=1, keepdims=True)
            return choose({"jobs": jobs / SCALE, "server_0_mask": mask})["server_0"]

        if values is not None:
            table = tabulated(of_states, LARGEST_QUEUE)
            return simulated_criss_cross(setting, table, smoothed_cost(setting, values, table))
        return mean(criss_cross_optimum(setting, buffer, of_states, tolerance=2e-3))

    reference = published if buffer is None else mean(criss_cross_optimum(setting, buffer, tolerance=2e-3))
    found = {name: average(lambda seen, rule=rule: rule.choose(seen, 0)) for name, rule in rules.items()}
    row = Row(setting, reference, found, published=f"{published}")
    experiment = "criss_cross_ppo" if setting in CRISS_CROSS else "extended_network_ppo"
    training_runs = [
        Training(experiment, _run(directory, "queueing", setting, seed), seed, (f"env.network={setting}", *overrides))
        for seed in seeds
    ]
    yield training_runs
    for training in training_runs:
        row.seconds.append(seconds_of(training))
        _, act = trained(training.directory, LAST)
        critic = None if setting in CRISS_CROSS else critic_of(training.directory, LAST)
        row.learned.append(average(lambda seen, act=act: act(0, seen), critic))
    return row


def simulated_criss_cross(
    regime: str, table: np.ndarray, costs: np.ndarray, n_envs: int = 2048, n_ticks: int = 32_000
) -> float:
    """Average of the costs of states in the second half of long simulations, where a table says what is done.

    The largest states that it has stand for larger ones. Prints the interval.
    """
    from maze_envs.queueing.network import Queues

    queues = Queues(n_envs, regime, buffer=10_000, max_episode_steps=None)
    for row in range(n_envs):
        queues.random.seed(row, row)
    queues.begin(np.arange(n_envs))
    totals = np.zeros(n_envs)
    for tick in range(n_ticks):
        states = tuple(np.minimum(queues.jobs, len(table) - 1).T)
        if tick >= n_ticks // 2:
            totals += costs[states]
        queues.advance({"server_0": table[states]})
    averages = totals / (n_ticks - n_ticks // 2)
    print(f"  simulated: {averages.mean():.3f} ± {1.96 * averages.std() / n_envs**0.5:.3f}", flush=True)
    return float(averages.mean())


def simulated(
    network: str,
    choose: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    critic: Callable[[dict[str, np.ndarray]], np.ndarray] | None = None,
    n_envs: int = 1024,
    n_ticks: int = 40_000,
    every: int = 40,
) -> float:
    """Average number of jobs in the second half of long simulations; prints its interval.

    Expected changes of the critic, and of products of queues, are control variates: their averages are known to be 0.
    """
    from maze_envs.queueing.exact import expected_changes
    from maze_envs.queueing.network import SCALE, Queues

    queues = Queues(n_envs, network, buffer=10_000, max_episode_steps=None)
    for row in range(n_envs):
        queues.random.seed(row, row)
    queues.begin(np.arange(n_envs))
    seen = {key: np.zeros((n_envs, *space.shape), np.float32) for key, space in queues.observation_spaces[0].items()}
    pairs = np.triu_indices(queues.jobs.shape[1])

    def values(jobs: np.ndarray) -> np.ndarray:
        columns = [jobs, jobs[:, pairs[0]] * jobs[:, pairs[1]] / SCALE]
        return np.column_stack(columns if critic is None else [*columns, critic({"jobs": jobs / SCALE})])

    jobs, changes, n_samples = np.zeros(n_envs), 0.0, 0
    for tick in range(n_ticks):
        queues.observe(seen)
        actions = choose(seen)
        if tick >= n_ticks // 2 and tick % every == 0:
            served = np.zeros(queues.jobs.shape, np.bool_)
            for head, classes in queues.choosing.items():
                served[:, classes] = np.arange(len(classes)) == actions[head][:, None]
            jobs += queues.jobs.sum(axis=1)
            changes = changes + expected_changes(network, queues.jobs, served, values)
            n_samples += 1
        queues.advance(actions)
    controls = np.column_stack([np.ones(n_envs), changes / n_samples])
    found, *_ = np.linalg.lstsq(controls, jobs / n_samples, rcond=None)
    left = jobs / n_samples - controls @ found
    error = 1.96 * left.std() * (n_envs - controls.shape[1]) ** -0.5
    print(f"  simulated: {found[0]:.3f} ± {error:.3f}", flush=True)
    return float(found[0])


# -- packing -----------------------------------------------------------------------------------------


def bin_packing(setting: str, seeds: Sequence[int], directory: Path, overrides: Sequence[str]) -> Rows:
    """Excess over the lower bound in percent, on 200 unseen instances.

    A setting `uniform,500:weibull,500` is judged by other items than it was trained with, and one that ends with
    ` drawn` by actions that are drawn instead of the most probable ones.
    """
    from maze_envs.packing.bin_packing import BinPacking, PackingRule

    items, _, choice = setting.partition(" ")
    learned_with, _, judged_by = items.partition(":")
    family, n_items = (judged_by or learned_with).split(",")
    n_instances = 200

    def excess(choose: Callable[[BinPacking], np.ndarray]) -> float:
        bins = BinPacking(n_instances, family, int(n_items))
        for row in range(n_instances):
            bins.random.seed(row, 10_000_000 + row)
        rows = np.arange(n_instances)
        bins.begin(rows)
        for _ in range(int(n_items)):
            bins.advance({"level": choose(bins)})
        found = bins.kpis(rows)["excess_percent"]
        print(f"  {found.mean():.3f} ± {1.96 * found.std() / n_instances**0.5:.3f} %", flush=True)
        return float(found.mean())

    def by_rule(name: str) -> float:
        rule = PackingRule(name)
        return excess(lambda bins: rule.levels(bins.room[:, : bins.n_bins.max() + 1], bins.item, bins.capacity))

    formula = "or_library_score" if family == "uniform" else "weibull_score"
    row = Row(setting, 0.0, {rule: by_rule(rule) for rule in ("first_fit", "best_fit", formula)})
    row.published = PACKING_PUBLISHED.get(f"{family},{n_items}", "")
    names = ("env.family", "env.n_items")
    given = tuple(f"{name}={value}" for name, value in zip(names, learned_with.split(","), strict=True))
    training_runs = [
        Training("bin_packing_ppo", _run(directory, "bin_packing", learned_with, seed), seed, (*given, *overrides))
        for seed in seeds
    ]
    yield training_runs
    for training in training_runs:
        row.seconds.append(seconds_of(training))
        _, act = trained(training.directory, deterministic=choice != "drawn")
        spaces = BinPacking(1, family, int(n_items)).observation_spaces[0].spaces.items()
        seen = {key: np.zeros((n_instances, *space.shape), np.float32) for key, space in spaces}

        def learned(bins: BinPacking, act: Any = act, seen: dict[str, np.ndarray] = seen) -> np.ndarray:
            bins.observe(seen)
            return act(0, seen)["level"]

        row.learned.append(excess(learned))
    return row


PROBLEMS: dict[str, tuple[Callable[..., Rows], list[str]]] = {
    "lost_sales": (
        lost_sales,
        [
            f"{demand},{p},{time}"
            for demand in ("poisson", "geometric")
            for p in (4, 9, 19, 39)
            for time in (1, 2, 3, 4)
        ],
    ),
    "dual_sourcing": (dual_sourcing, list(DUAL_PUBLISHED)),
    "criss_cross": (queueing, ["I.L.", "B.L.", "I.M.", "B.M.", "I.H.", "B.H."]),
    "extended_network": (queueing, ["extended_6"]),
    "bin_packing": (
        bin_packing,
        [f"uniform,500{judged}{how}" for judged in ("", ":weibull,500") for how in ("", " drawn")],
    ),
}


def row_of(rows: Rows) -> Row:
    """The row of a setting whose runs are done."""
    try:
        next(rows)
    except StopIteration as end:
        row: Row = end.value
    return row


def main() -> None:
    """Train, evaluate and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--settings", nargs="*", help="of the table; all by default")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--overrides", nargs="*", default=[], help="of the runs, such as algorithm.n_epochs=3")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory, and use those that are there")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel")
    parser.add_argument("--markdown", type=Path, help="page whose table of this problem is written")
    arguments = parser.parse_args()
    function, settings = PROBLEMS[arguments.problem]
    rows: dict[str, list[str]] = {}
    if arguments.markdown and arguments.settings:
        rows = rows_of(arguments.markdown, arguments.problem, HEADER)
    results: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="operations_") as temporary:
        directory = (arguments.keep or Path(temporary)).absolute()
        selected = [
            function(setting, range(arguments.seeds), directory, arguments.overrides)
            for setting in arguments.settings or settings
        ]
        todo = {training.directory: training for each in selected for training in next(each)}
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(train, todo.values()))
        for each in selected:
            results.append(row_of(each))
            rows[results[-1].setting] = results[-1].cells()
            print(f"| {' | '.join(rows[results[-1].setting])} |", flush=True)
    table = markdown_table(HEADER, [rows[setting] for setting in dict.fromkeys([*settings, *rows]) if setting in rows])
    print(f"\n{table}")
    if arguments.markdown:
        write_table(arguments.markdown, arguments.problem, table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in results], indent=2))


if __name__ == "__main__":
    main()
