"""Job shops: heuristics, trained dispatchers and published figures on Taillard's instances; time of a decision.

    python benchmarks/job_shop.py outputs/<run> [outputs/<other seed> ...]   # gaps to the best known makespans
    python benchmarks/job_shop.py --sizes 15x15 --samples 0                  # rules only
    python benchmarks/job_shop.py --sizes large --cp-sat 10                  # ta41 to ta80, CP-SAT for 10 seconds each
    python benchmarks/job_shop.py --train 3 --keep runs --jobs 2 --markdown docs/benchmarks/job_shop.md
    python benchmarks/job_shop.py --train 3 --keep runs --experiment small large --sizes 20x20
    python benchmarks/job_shop.py outputs/<run> --temperatures 1 2 3 4       # of samples, compared on random instances
    python benchmarks/job_shop.py outputs/<run> --cpu-seconds 3             # best of many beside CP-SAT, equal CPU time
    python benchmarks/job_shop.py --waiting --cpu-seconds 15 --sizes 6x6 8x8 15x15  # what non-delay schedules cost
    python benchmarks/job_shop.py --speed [outputs/<run>]                    # a decision; best of 64 in a batch

Runs come from `maze-run -cn conf_train +experiment=job_shop_ppo`, or are trained here: `--train` so many seeds with the
arguments that `EXPERIMENTS` names and `--overrides`. Those that are finished in `--keep` are not trained again.
`--experiment small large` compares size generalisation: trained on shops of 6 to 10 jobs and machines, and on 20x20.

Greedy: the most likely job each time; best of 64: the shortest of 64 schedules with decisions drawn at `--temperature`
(by default what `--temperatures` found for a size on random instances). Several runs: mean and 95 % interval over runs.
CP-SAT: the schedule that was found, and what dispatching in its order makes of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.operations import Training, interval, seconds_of, train
from benchmarks.page_tables import markdown_table, write_table
from maze.core.agent.serialized_torch_policy import SerializedTorchPolicy
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.rollout.solve import Search, solve
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.perception.models.auto_model_composer import AutoModelComposer
from maze_envs.scheduling.cp_sat import CpSatSchedule, cp_sat_schedule, dispatched_makespan
from maze_envs.scheduling.job_shop import JobShopEnv, JobShops
from maze_envs.scheduling.rules import RULES, DispatchingRule
from maze_envs.scheduling.taillard import Instance, generate, instances_of, lower_bound

SIZES = ("15x15", "20x15", "20x20", "30x15")
LARGE = ("30x20", "50x15", "50x20", "100x20")
"""ta41 to ta80."""
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "standard": (),
    "small": ("env.n_jobs=[6,10]", "env.n_machines=[6,10]"),
    "large": ("env.n_jobs=20", "env.n_machines=20"),
}
"""What is trained with, by name: instances as the experiment says, no larger than 10x10, and 20x20."""
TEMPERATURES = {"15x15": 2.5}
"""Of samples, by size; 1 where more decisions follow on each other: what `--temperatures` finds on random instances."""
PUBLISHED = {"Zhang et al. (2020), published": {"15x15": 25.96, "20x15": 30.03, "20x20": 31.61, "30x15": 33.00}}


def load(run: Path, weights: str, temperature: float) -> SerializedTorchPolicy:
    """The policy of a run; its actions are sampled at a temperature, in the kind of environment that it has."""
    config = OmegaConf.load(run / "hydra_config.yaml")
    spaces = str(run / "spaces_config.pkl")
    policy = SerializedTorchPolicy(config.model, str(run / weights), spaces, "cpu", temperature)
    policy.may_wait = config.env.get("may_wait", False)
    return policy


def gaps(policy: Any, size: str, n_samples: int = 1) -> np.ndarray:
    """Gaps to the best known makespans in percent, one for each instance; of the best of `n_samples` schedules."""
    instances = instances_of(size)
    best = np.array([one.best_known for one in instances])
    return np.asarray(100 * (makespans(policy, instances, n_samples) / best - 1))


def makespans(policy: Any, instances: list[Instance], n_samples: int, seed: int = 0) -> np.ndarray:
    """The best of `n_samples` makespans of each instance."""
    env = JobShopEnv(instances=instances, only_choices=True, may_wait=getattr(policy, "may_wait", False))
    found = solve(policy, env, n_samples=n_samples, seed=seed)
    return np.array([each.kpis["makespan"] for each in found])


def random_instances(size: str, number: int) -> list[Instance]:
    """Random instances of a size, such as `6x6`."""
    n_jobs, n_machines = map(int, size.split("x"))
    made = [generate(n_jobs, n_machines, 7_000_001 + seed, 8_000_009 + seed) for seed in range(number)]
    return [Instance(f"random {seed}", *one, 0) for seed, one in enumerate(made)]


def compared_temperatures(
    runs: list[Path], sizes: list[str], n_samples: int, weights: str, temperatures: list[float], n_instances: int
) -> dict[str, dict[str, list[float]]]:
    """Mean makespans of the best of `n_samples` on random instances, above their lower bounds in percent."""
    found: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        instances = random_instances(size, n_instances)
        bounds = np.array([lower_bound(one.durations, one.machines) for one in instances])
        for run in runs:
            for temperature in temperatures:
                found_here = makespans(load(run, weights, temperature), instances, n_samples)
                mean = float(100 * (found_here / bounds - 1).mean())
                found.setdefault(f"temperature {temperature:g}", {}).setdefault(size, []).append(mean)
                print(f"{run.name}, {size}, temperature {temperature:g}: {mean:.2f} %", flush=True)
    return found


def by_cp_sat(size: str, seconds: float) -> dict[str, float]:
    """Mean gaps to the best known makespans in percent: of what CP-SAT finds and bounds, and of what is dispatched."""
    found: dict[str, list[float]] = {}
    for one in instances_of(size):
        schedule = cp_sat_schedule(one.durations, one.machines, seconds)
        for name, makespan in (
            (f"CP-SAT, {seconds:g} s", schedule.makespan),
            (f"CP-SAT, {seconds:g} s, dispatched", dispatched_makespan(one, schedule.starts)),
            (f"CP-SAT, {seconds:g} s, lower bound", schedule.bound),
        ):
            found.setdefault(name, []).append(100 * (makespan / one.best_known - 1))
    return {name: statistics.mean(values) for name, values in found.items()}


def cp_sat_in(seconds: float, one: Instance, may_wait: bool = True) -> CpSatSchedule:
    """What one worker of CP-SAT finds in CPU seconds, the building of its model included."""
    end = time.process_time() + seconds
    return cp_sat_schedule(
        one.durations, one.machines, 100 * seconds, 1, may_wait=may_wait, is_time_over=lambda: time.process_time() > end
    )


def waiting(sizes: list[str], seconds: float, n_instances: int) -> str:
    """How far schedules in which no machine waits (non-delay) are from the shortest ones, with one CP-SAT worker.

    Gaps in percent are those of the best non-delay schedules and of their lower bounds to the shortest makespan that
    is known: published, or found here.

    :param seconds: CPU seconds of a search.
    """
    lines = []
    for size in sizes:
        try:
            instances = instances_of(size)[:n_instances]
        except ConfigError:
            instances = random_instances(size, n_instances)
        gaps_found, bounds, n_solved = [], [], 0
        for one in instances:
            best, best_bound, held = one.best_known, 0, cp_sat_in(seconds, one, may_wait=False)
            if not best:
                best, best_bound, _ = cp_sat_in(seconds, one)
            n_solved += held.makespan == held.bound and (bool(one.best_known) or best == best_bound)
            gaps_found.append(100 * (held.makespan / best - 1))
            bounds.append(100 * (max(held.bound, best_bound) / best - 1))
            print(f"{size}, {one.name}: {best}, non-delay {held.makespan}, at least {held.bound}", flush=True)
        spread = f"{statistics.mean(gaps_found):.1f} ({min(gaps_found):.1f} to {max(gaps_found):.1f})"
        lines.append([size, str(len(gaps_found)), str(n_solved), spread, f"{statistics.mean(bounds):.1f}"])
    header = ["size", "instances", "solved exactly", "non-delay, %", "lower bound, %"]
    return markdown_table(header, lines)


def table(
    runs: dict[str, list[Path]],
    sizes: list[str],
    n_samples: int,
    weights: str,
    cp_sat_seconds: float,
    temperature: float | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Mean gaps by line and size, one for each run."""
    found: dict[str, dict[str, list[float]]] = {
        name: {s: [row[s]] for s in sizes if s in row} for name, row in PUBLISHED.items() if row.keys() & sizes
    }
    for rule in RULES:
        found[rule] = {size: [gaps(DispatchingRule(rule), size).mean()] for size in sizes}
    for size in sizes if cp_sat_seconds else ():
        for name, value in by_cp_sat(size, cp_sat_seconds).items():
            found.setdefault(name, {})[size] = [value]
            print(f"{name}, {size}: {value:.2f} %", flush=True)
    for kind, run in ((kind, run) for kind, of_kind in runs.items() for run in of_kind):
        policy = load(run, weights, 1.0)
        for name, samples in ((f"{kind}, greedy", 1), (f"{kind}, best of {n_samples}", n_samples)):
            for size in sizes if samples else ():
                policy.temperature = temperature or TEMPERATURES.get(size, 1.0)
                found.setdefault(name, {}).setdefault(size, []).append(float(gaps(policy, size, samples).mean()))
                print(f"{run.name}, {name}, {size}: {found[name][size][-1]:.2f} %", flush=True)
    return found


def train_all(
    names: list[str], n_seeds: int, directory: Path, overrides: list[str], n_jobs: int
) -> tuple[dict[str, list[Path]], dict[str, float]]:
    """Train what is not trained yet; directories and mean seconds, by what was trained with."""
    by_name = {
        name: [
            Training("job_shop_ppo", directory / f"job_shop-{name}-{seed}", seed, (*EXPERIMENTS[name], *overrides))
            for seed in range(1, n_seeds + 1)
        ]
        for name in names
    }
    with ThreadPoolExecutor(n_jobs) as pool:
        list(pool.map(train, [training for of_name in by_name.values() for training in of_name]))
    seconds = {name: statistics.mean(map(seconds_of, of_name)) for name, of_name in by_name.items()}
    return {f"trained ({name})": [each.directory for each in by_name[name]] for name in names}, seconds


def cells(name: str, row: dict[str, list[float]], sizes: list[str]) -> list[str]:
    """A line of the table: means over runs, and 95 % intervals where there are several."""
    n_runs = max(map(len, row.values()), default=0)
    means = []
    for size in sizes:
        values = row.get(size, [])
        spread = f" ± {interval(values):.1f}" if len(values) > 1 else ""
        means.append(f"{statistics.mean(values):.1f}{spread}" if values else "")
    return [name, *means, f"{n_runs}" if name.startswith("trained") else ""]


def speed(rounds: int, n_decisions: int = 600) -> dict[str, float]:
    """Microseconds of a decision (15x15) of the bare simulator and through Maze with statistics, alternately."""
    shops, env = JobShops(1, 15, 15), LogStatsWrapper.wrap(JobShopEnv(n_jobs=15, n_machines=15))
    out = {key: np.zeros((1, *space.shape), np.float32) for key, space in shops.observation_spaces[0].items()}
    env.seed(1)
    shops.random.seed(0, 1)
    bare, through_maze = [], []
    for _ in range(rounds):
        shops.begin(np.zeros(1, int))
        shops.observe(out)
        begin = time.perf_counter()
        for _ in range(n_decisions):
            is_over = shops.advance({"job": out["job_mask"].argmax(axis=1)})[1]
            if is_over[0]:
                shops.begin(np.zeros(1, int))
            shops.observe(out)
        bare.append(1e6 * (time.perf_counter() - begin) / n_decisions)
        seen = env.reset()
        begin = time.perf_counter()
        for _ in range(n_decisions):
            seen, _, done, _ = env.step({"job": seen["job_mask"].argmax()})
            if done:
                seen = env.reset()
        through_maze.append(1e6 * (time.perf_counter() - begin) / n_decisions)
    ratios = [other / one for one, other in zip(bare, through_maze, strict=True)]
    return {
        "bare_us": statistics.median(bare),
        "through_maze_us": statistics.median(through_maze),
        "ratio": statistics.median(ratios),
    }


def batch_speed(runs: list[Path], n_samples: int, rounds: int) -> dict[str, float]:
    """CPU seconds of the best of many schedules of a 15x15 instance, its replay included: in a batch, and one by one.

    Without a run, an untrained network of the same size.
    """
    env = JobShopEnv(instances="ta01", only_choices=True)
    network = {"_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer"}
    spaces = env.action_spaces_dict, env.observation_spaces_dict, env.agent_counts_dict
    untrained = AutoModelComposer(*spaces, policy=network, hidden_units=[128, 64], attention=False).policy
    policy: Any = load(runs[0], "state_dict.pt", 1.0) if runs else untrained
    seconds: dict[str, list[float]] = {"batch_s": [], "one_by_one_s": []}
    for number in range(rounds):
        for name, concurrency in (("batch_s", None), ("one_by_one_s", 1)):
            search = Search(best_of=n_samples, concurrency=concurrency, clairvoyant=True)
            begin = time.process_time()
            plays, seeds = RolloutRunner.best_plays(env, policy, [(0, number)], search)
            RolloutRunner.run_interaction_loop(env, plays, 1, episode_seeds=seeds)
            seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def search_in_time(policy: Any, one: Instance, seconds: float) -> tuple[int, int, int, float]:
    """Search an instance: greedy actions, then batches of samples that the CPU time suffices for.

    :return: Makespan of the greedy schedule and of the best one, number of samples, CPU seconds.
    """
    begin = time.process_time()
    greedy = best = int(makespans(policy, [one], 1)[0])
    n_samples, batch = 0, 64
    sampling_began = time.process_time()
    while batch >= 16:
        best = min(best, int(makespans(policy, [one], batch, seed=n_samples)[0]))
        n_samples += batch
        of_sample = (time.process_time() - sampling_began) / n_samples
        batch = min(512, int(0.8 * (seconds - (time.process_time() - begin)) / of_sample))
    return greedy, best, n_samples, time.process_time() - begin


def in_equal_time(run: Path, sizes: list[str], weights: str, seconds: float, temperature: float | None) -> str:
    """Mean gaps of the best of as many samples as CPU seconds allow, and of CP-SAT with one worker in as many."""
    lines, policy = [], load(run, weights, 1.0)
    makespans(policy, instances_of("ta01"), 2)  # what is imported and compiled once
    for size in sizes:
        policy.temperature = temperature or TEMPERATURES.get(size, 1.0)
        found = []
        for one in instances_of(size):
            greedy, best, n_samples, spent = search_in_time(policy, one, seconds)
            solver = cp_sat_in(seconds, one)
            gaps_found = [100 * (makespan / one.best_known - 1) for makespan in (greedy, best, solver.makespan)]
            found.append([*gaps_found, n_samples, spent])
            print(f"{one.name}: greedy {greedy}, best of {n_samples} {best}, CP-SAT {solver.makespan}", flush=True)
        *means, n_samples, _ = np.mean(found, axis=0).tolist()
        slowest = max(spent for *_, spent in found)
        lines.append([size, *(f"{mean:.1f}" for mean in means), f"{n_samples:.0f}", f"{slowest:.1f}"])
    header = ["gap to best known, %", "greedy", f"best in {seconds:g} CPU s", f"CP-SAT in {seconds:g} CPU s"]
    return markdown_table([*header, "samples", "CPU s at most"], lines)


def publish(lines: str, arguments: argparse.Namespace) -> None:
    """Print a table, and write it into the page."""
    print(f"\n{lines}")
    if arguments.markdown:
        write_table(arguments.markdown, arguments.table, lines)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--samples", type=int, default=64, help="0: greedy decisions only")
    parser.add_argument("--temperature", type=float, help="of samples; by size by default")
    parser.add_argument("--temperatures", type=float, nargs="+", help="of samples, compared on random instances")
    parser.add_argument("--instances", type=int, default=20, help="random ones of each size that they are compared on")
    parser.add_argument("--weights", default="state_dict.pt", help="latest.pt: those of the last epoch")
    parser.add_argument("--cpu-seconds", type=float, default=0.0, help="of the search of an instance, and of CP-SAT")
    parser.add_argument("--waiting", action="store_true", help="cost of schedules in which no machine waits")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cp-sat", type=float, default=0.0, metavar="SECONDS", help="time limit for each instance")
    parser.add_argument("--train", type=int, default=0, metavar="SEEDS", help="so many runs of each experiment")
    parser.add_argument("--experiment", nargs="+", choices=EXPERIMENTS, default=["standard"])
    parser.add_argument("--overrides", nargs="*", default=[], help="of the runs, such as algorithm.n_epochs=30")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory, and use those that are there")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel")
    parser.add_argument("--markdown", type=Path, help="page whose table is written")
    parser.add_argument("--table", default="gaps", help="which table of the page")
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    found: dict[str, Any] = {}
    if arguments.speed:
        found = speed(arguments.rounds) | batch_speed(arguments.runs, arguments.samples, arguments.rounds)
        print(
            f"a decision (15x15): {found['bare_us']:.0f} us in the simulator, {found['through_maze_us']:.0f} us "
            f"through Maze with statistics, {found['ratio']:.2f} times as long\nbest of {arguments.samples} (15x15): "
            f"{found['batch_s']:.3f} CPU s in a batch, {found['one_by_one_s']:.3f} one by one, "
            f"{found['one_by_one_s'] / found['batch_s']:.1f} times as long"
        )
    elif arguments.runs and arguments.cpu_seconds:
        seconds, temperature = arguments.cpu_seconds, arguments.temperature
        for run in arguments.runs:
            publish(in_equal_time(run, arguments.sizes, arguments.weights, seconds, temperature), arguments)
    elif arguments.waiting:
        publish(waiting(arguments.sizes, arguments.cpu_seconds or 15.0, arguments.instances), arguments)
    else:
        sizes = [size for name in arguments.sizes for size in (LARGE if name == "large" else (name,))]
        runs = {"trained": arguments.runs} if arguments.runs else {}
        seconds: dict[str, float] = {}
        with tempfile.TemporaryDirectory(prefix="job_shop_") as temporary:
            if arguments.train:
                directory = (arguments.keep or Path(temporary)).absolute()
                trained, seconds = train_all(
                    arguments.experiment, arguments.train, directory, arguments.overrides, arguments.jobs
                )
                runs |= trained
            samples, weights = arguments.samples, arguments.weights
            if arguments.temperatures:
                all_runs = [run for of_name in runs.values() for run in of_name]
                found = compared_temperatures(
                    all_runs, sizes, samples, weights, arguments.temperatures, arguments.instances
                )
            else:
                found = table(runs, sizes, samples, weights, arguments.cp_sat, arguments.temperature)
        header = ["gap to best known, %" if not arguments.temperatures else "above lower bound, %", *sizes, "seeds"]
        lines = markdown_table(header, [cells(name, row, sizes) for name, row in found.items()])
        for name, of_name in seconds.items():
            lines += f"\n\nRun time ({name}): {of_name / 60:.0f} minutes."
        publish(lines, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
