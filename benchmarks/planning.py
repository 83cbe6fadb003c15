"""Rollout policies beside their base policies; the cost of copies and of simulated decisions.

    python benchmarks/planning.py lost_sales --settings poisson,2,9   # demand, lead time, penalty; default: all 24
    python benchmarks/planning.py dcl --settings poisson,2,9          # policies of algorithm=dcl, after each generation
    python benchmarks/planning.py problems --episodes 20              # five shipped problems, paired episodes
    python benchmarks/planning.py improve --budget 600           # `improve` on seven problems, a JSON line for each
    python benchmarks/planning.py copies                              # µs for a copied and a reseeded row
    python benchmarks/planning.py processes                           # simulated steps through single environments

Lost sales: the decisions of the rollout policy in all states that it visits make a table, whose average cost is
computed exactly (`maze_envs.inventory.exact`). Times are CPU seconds of this process, with one numerical thread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("", "tutorials")]

import numpy as np
from omegaconf import OmegaConf

from maze.api.improve import COST
from maze.api.run_context import RunContext
from maze.core.agent.policy import Policy, acting_in, build_policy
from maze.core.utils.config_utils import EnvFactory, read_config
from maze.core.utils.stats_utils import Estimate, mean_interval
from maze.evaluation.comparison import RETURN
from maze.planning.branches import ArrayBranches
from maze.planning.planner import BranchSimulator, Planner
from maze.planning.rollout_policy import RolloutPolicy, acting
from maze_envs.inventory.exact import lost_sales_cost
from maze_envs.inventory.lost_sales import BaseStockPolicy, LostSales, LostSalesEnv
from maze_envs.scheduling.job_shop import JobShops

ROOT = Path(__file__).resolve().parents[1]
ENVS = ROOT / "maze_envs"
SETTINGS = [
    f"{demand},{lead},{cost}" for demand in ("poisson", "geometric") for lead in (2, 3, 4) for cost in (4, 9, 19, 39)
]
PUBLISHED = {"poisson,10,4": 5.024, "poisson,10,39": 13.487}
"""Average costs of deep controlled learning (Temizöz et al. 2025), by setting."""
PROBLEMS: dict[str, tuple[str, dict[str, Any], str | dict[str, Any], dict[str, Any]]] = {
    "dispatching": (
        "logistics/dispatching/conf/env/dispatching",
        {},
        "logistics/dispatching/conf/policy/nearest_order",
        {"horizon": 12, "scenarios": 32, "value": {"_target_": "benchmarks.planning.RestOfTheDay"}},
    ),
    "cutting_2d": (
        "logistics/cutting_2d/conf/env/cutting_2d",
        {},
        "logistics/cutting_2d/conf/policy/cutting_2d_greedy_policy",
        {"horizon": 20, "scenarios": 64, "candidates": 16},
    ),
    "cutting_2d_masked": (
        "../tutorials/tutorial_maze_env/part06_struct_env/conf/env/tutorial_cutting_2d_struct_masked",
        {},
        "logistics/cutting_2d/conf/policy/cutting_2d_greedy_policy",
        {"horizon": 20, "scenarios": 64, "candidates": 16},
    ),
    "bin_packing": (
        "packing/conf/env/bin_packing",
        {"n_items": 100},
        "packing/conf/policy/packing_rule",
        {"horizon": 30, "scenarios": 64},
    ),
    "queueing": (
        "queueing/conf/env/criss_cross",
        {"network": "I.H.", "max_episode_steps": 300},
        {"_target_": "maze_envs.queueing.network.PriorityPolicy", "network": "I.H.", "rule": "longest_queue"},
        {"horizon": 200, "scenarios": 128},
    ),
    "queueing_extended": (
        "queueing/conf/env/extended_network",
        {"max_episode_steps": 500},
        {"_target_": "maze_envs.queueing.network.PriorityPolicy", "network": "extended_6", "rule": "c_mu"},
        {"horizon": 200, "scenarios": 128},
    ),
    "job_shop": (
        "scheduling/conf/env/job_shop",
        {"n_jobs": 10, "n_machines": 10, "only_choices": True},
        "scheduling/conf/policy/job_shop_rule",
        {"horizon": None},
    ),
}
"""By name the environment, its changes, the base policy and the arguments of the rollout policy."""
_STEPS = {"dispatching": 160, "cutting_2d": 20, "cutting_2d_masked": 180}
"""Steps of an episode, where the problem has no end of its own."""
_GUIDE = ROOT / "docs" / "guide" / "first_hour.md"
OWN = {
    "workshop": ("workshop", "WorkshopEnv", "EarliestDueDate"),
    "truck_docks": ("tutorial_maze_env.truck_docks", "TruckDocksEnv", "LongestWait"),
    "ambulances": ("tutorial_maze_env.ambulances", "AmbulancesEnv", "HomeStation"),
}
"""Simulators of users: module, environment and heuristic."""


class RestOfTheDay:
    """Value of dispatching at the horizon: the heuristic earns 82 on an average day.

    Steps take different times, so that branches of equally many steps end at different times.
    """

    def __call__(self, observations: Mapping[str, np.ndarray], actor: Any) -> np.ndarray:
        rest: np.ndarray = 82.0 * observations["time_left"][:, 1]
        return rest


def lost_sales(settings: list[str], scenarios: int) -> None:
    """Print the gaps to the optimum of the best base-stock policy and of its rollout."""
    print("| demand | lead time | penalty | optimum | base stock % | rollout % | ms/decision, batch | ms, single |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    gaps = []
    for setting in settings:
        problem = problem_of_setting(setting)
        demand, lead, penalty = setting.split(",")
        one = LostSales(1, **problem, expected_costs=True)
        optimum = lost_sales_cost(one, tolerance=1e-3).cost
        level, base_cost = best_level(one)
        horizon = one.lead_time + 4
        table, seconds = planned_table(problem, level, horizon, scenarios)
        shape = (len(one.probabilities) + 5 * one.lead_time,) + (one.max_order + 1,) * (one.lead_time - 1)
        orders = np.clip(level - np.indices(shape).sum(axis=0), 0, one.max_order)
        for state, order in table.items():
            orders[state] = order
        cost = lost_sales_cost(one, lambda states, orders=orders: orders.reshape(-1), tolerance=1e-3).cost
        gaps.append([100 * (each / optimum - 1) for each in (base_cost, cost)])
        single = seconds_of_decisions(problem, level, horizon, scenarios)
        print(
            f"| {demand} | {lead} | {penalty} | {optimum:.3f} | {gaps[-1][0]:.2f} | {gaps[-1][1]:.3f} | "
            f"{1e3 * seconds:.2f} | {1e3 * single:.1f} |",
            flush=True,
        )
    print(f"mean: base stock {np.mean(gaps, axis=0)[0]:.2f} %, rollout {np.mean(gaps, axis=0)[1]:.3f} %", flush=True)


def problem_of_setting(setting: str) -> dict[str, Any]:
    """Arguments of the lost-sales problem."""
    demand, lead, penalty = setting.split(",")
    # with geometric demand states are many: larger orders than these are never optimal
    max_order = (20 if int(lead) <= 4 else 12) if demand == "poisson" else {2: 30, 3: 24, 4: 14}[int(lead)]
    return {"demand": demand, "lead_time": int(lead), "penalty": float(penalty), "max_order": max_order}


def labelled(settings: list[str], seed: int, generations: int) -> None:
    """Print the gaps of the policies of `algorithm=dcl`, which begins with the best base-stock policy.

    The policies act greedily and without planning. Up to lead time 4, average costs and the optimum are exact; beyond
    it, costs are simulated and compared with published ones.
    """
    print("| setting | seed | generation | base stock % | policy % | CPU s |\n| --- | --- | --- | --- | --- | --- |")
    for setting in settings:
        problem = problem_of_setting(setting)
        one = LostSales(1, **problem, expected_costs=True)
        optimum = PUBLISHED[setting] if one.lead_time > 4 else lost_sales_cost(one, tolerance=1e-4).cost
        level, base_cost = best_level(one)
        env = {f"env.{name}": value for name, value in {**problem, "expected_costs": True}.items()}
        base = {"_target_": "maze_envs.inventory.lost_sales.BaseStockPolicy", "level": level, "cap": one.max_order}
        algorithm = {"base": base, "horizon": one.lead_time + 8}
        overrides = {
            **env,
            **{f"algorithm.{name}": value for name, value in algorithm.items()},
            "seeding.env_base_seed": seed,
            "seeding.agent_base_seed": seed,
        }
        with (
            tempfile.TemporaryDirectory() as directory,
            RunContext(
                "lost_sales", algorithm="dcl", model="auto", run_dir=directory, silent=True, overrides=overrides
            ) as run,
        ):
            started = time.process_time()
            for generation in range(1, generations + 1):
                run.train(n_epochs=1)
                spent = time.process_time() - started

                def orders(states: np.ndarray, policy: Any = run.runner.trainer.policy) -> np.ndarray:
                    seen = {"stock": (states / LostSales.scale).astype(np.float32)}
                    return np.asarray(policy.compute_actions(seen, deterministic=True)["order"])

                gap = 100 * (average_cost(one, orders, tolerance=1e-4) / optimum - 1)
                shown = f"{100 * (base_cost / optimum - 1):.2f} | {gap:.3f} | {spent:.0f}"
                print(f"| {setting} | {seed} | {generation} | {shown} |", flush=True)


def average_cost(one: LostSales, orders: Callable[[np.ndarray], np.ndarray], tolerance: float) -> float:
    """Average cost of a policy: exact up to lead time 4, otherwise of 4 million simulated periods (error 0.02 %)."""
    if one.lead_time <= 4:
        return lost_sales_cost(one, orders, tolerance).cost
    n_stores, n_periods, warm_up = 4000, 1100, 100
    stores = LostSales(
        n_stores, "poisson", lead_time=one.lead_time, penalty=one.penalty, max_order=one.max_order,
        expected_costs=True, max_episode_steps=n_periods + 1,
    )  # fmt: skip
    for row in range(n_stores):
        stores.seed_row(row, row)
    stores.begin(np.arange(n_stores))
    total = 0.0
    for period in range(n_periods):
        states = np.column_stack([stores.stock, stores.outstanding])
        rewards, _, _ = stores.advance({"order": np.clip(orders(states), 0, one.max_order).astype(np.int64)})
        total -= float(rewards.mean()) * (period >= warm_up)
    return total / (n_periods - warm_up)


def best_level(one: LostSales) -> tuple[int, float]:
    """The best level of a base-stock policy with its exact average cost."""

    def cost(level: int) -> float:
        return average_cost(one, lambda states: np.clip(level - states.sum(1), 0, None), tolerance=1e-3)

    level = round(one.mean_demand * (one.lead_time + 1))
    costs = {level: cost(level)}
    for step in (1, -1):
        while True:
            following = (min if step < 0 else max)(costs) + step
            costs[following] = cost(following)
            if costs[following] > min(costs.values()):
                break
    return min(costs.items(), key=lambda each: each[1])


def planned_table(
    problem: dict[str, Any], level: int, horizon: int, scenarios: int
) -> tuple[dict[tuple[int, ...], int], float]:
    """Orders of the rollout policy in the states that it visits, and CPU seconds for each."""
    make = partial(LostSales, **problem, expected_costs=True)
    base = BaseStockPolicy(level)
    planner = Planner(BranchSimulator(ArrayBranches(make), acting(base), horizon), scenarios)
    table: dict[tuple[int, ...], int] = {}
    seconds = 0.0
    stores = make(2000)
    for row in range(stores.n_envs):
        stores.seed_row(row, row)
    stores.begin(np.arange(stores.n_envs))
    for period in range(300):
        states = [tuple(state) for state in np.column_stack([stores.stock, stores.outstanding]).tolist()]
        unknown = sorted(set(states) - table.keys()) if period > 20 else []
        started = time.process_time()
        for first in range(0, len(unknown), 100):
            part = np.array(unknown[first : first + 100])
            source = make(len(part))
            source.stock[:], source.outstanding[:] = part[:, 0], part[:, 1:]
            candidates = []
            for state in part:
                order = int(np.clip(level - state.sum(), 0, stores.max_order))
                others = [each for each in range(stores.max_order + 1) if each != order]
                candidates.append([{"order": each} for each in (order, *others)])
            for state, found in zip(part, planner.plan(source, candidates, seed=period), strict=True):
                table[tuple(state.tolist())] = int(found.action["order"])
        seconds += time.process_time() - started
        order_up = np.clip(level - stores.stock - stores.outstanding.sum(axis=1), 0, stores.max_order)
        orders = [table.get(state, int(order)) for state, order in zip(states, order_up, strict=True)]
        stores.advance({"order": np.array(orders)})
    return table, seconds / max(1, len(table))


def seconds_of_decisions(problem: dict[str, Any], level: int, horizon: int, scenarios: int) -> float:
    """CPU seconds of a decision of the policy as it acts in one environment."""
    env = LostSalesEnv(**problem, expected_costs=True)
    policy = RolloutPolicy(BaseStockPolicy(level), horizon=horizon, scenarios=scenarios)
    seconds, _ = played(env, policy, 1, 50)
    return seconds / 50


def played(env: Any, policy: Policy, seed: int, n_steps: int | None = None) -> tuple[float, float]:
    """CPU seconds and return of an episode."""
    env.seed(seed)
    policy.seed(seed)
    policy.bind(env)
    observation, total, n_taken, done = env.reset(), 0.0, 0, False
    started = time.process_time()
    while not done and n_taken != n_steps:
        action = policy.compute_action(observation, env.get_maze_state(), env, env.actor_id(), deterministic=True)
        observation, reward, done, _ = env.step(action)
        total += reward
        n_taken += 1
    return time.process_time() - started, total


def problems(names: list[str], n_episodes: int, first_seed: int) -> None:
    """Print paired differences of the return between rollout and base policy."""
    print("| problem | base policy | rollout | difference | 95 % interval | CPU s/episode |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in names:
        make, base, arguments = problem_of(name)
        returns, seconds = np.zeros((2, n_episodes)), 0.0
        for episode in range(n_episodes):
            returns[0, episode] = played(make(), base, first_seed + episode, _STEPS.get(name))[1]
            policy = RolloutPolicy(base, **arguments)
            spent, returns[1, episode] = played(make(), policy, first_seed + episode, _STEPS.get(name))
            seconds += spent
        difference = Estimate.of(mean_interval((returns[1] - returns[0])[np.newaxis]))
        print(
            f"| {name} | {returns[0].mean():.3f} | {returns[1].mean():.3f} | {difference.value:+.3f} | "
            f"[{difference.low:.3f}, {difference.high:.3f}] | {seconds / n_episodes:.2f} |",
            flush=True,
        )


def problem_of(name: str) -> tuple[EnvFactory, Policy, dict[str, Any]]:
    """What makes the environment of a problem, its base policy, and the arguments of the rollout policy."""
    if name in OWN:
        own_env, heuristic, _ = own_problem(name, tempfile.mkdtemp())
        return own_env, heuristic(), {"horizon": 12, "scenarios": 16}
    file, changes, base, arguments = PROBLEMS[name]
    config: Any = OmegaConf.create({"env": OmegaConf.load(ENVS / f"{file}.yaml")})
    config.env.update(changes)
    make = EnvFactory(OmegaConf.to_container(config, resolve=True)["env"])
    base_config = read_config(ENVS / f"{base}.yaml") if isinstance(base, str) else base
    return make, build_policy(base_config, make()), arguments


def improvements(names: list[str], budget_s: float, seed: int) -> None:
    """Print the ladder of `improve` as a JSON line for each problem."""
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            make, base, settings = own_problem(name, directory) if name in OWN else shipped_problem(name)
            limit = {"maze.core.wrappers.time_limit_wrapper.TimeLimitWrapper": {"max_episode_steps": _STEPS.get(name)}}
            overrides = {"seeding.env_base_seed": seed, "seeding.agent_base_seed": seed}
            started, began = time.process_time(), time.monotonic()
            with RunContext(
                make, algorithm="ppo", run_dir=directory, silent=True, overrides=overrides,
                wrappers=limit if name in _STEPS else None,
            ) as run:  # fmt: skip
                ladder = run.improve(base, budget_s=budget_s, **settings)
            spent, wall = time.process_time() - started, time.monotonic() - began
            rungs = {
                row.policy: {
                    "return": rounded(row.mean),
                    "difference": row.difference and rounded(row.difference),
                    "ms_per_decision": round(cost.mean.value, 3),
                    "seconds": round(rung.seconds),
                }
                for rung, row, cost in zip(ladder.rungs, *map(ladder.comparison.rows_of, (RETURN, COST)), strict=True)
            }
            confirmed = {
                name: {
                    "episodes": gate.comparison.n_episodes,
                    "difference": rounded(gate.comparison.rows_of(RETURN)[1].difference),
                    "passes": gate.passes,
                }
                for name, gate in ladder.gates.items()
            }
            line = {
                "problem": name, "seed": seed, "budget_s": budget_s, "wall_s": round(wall), "cpu_s": round(spent),
                "recommended": ladder.recommended.name, "horizon": ladder.horizon, "confirmation": confirmed,
                "episodes": ladder.comparison.n_episodes, "ladder": rungs, "failures": dict(ladder.failures),
                "commands": dict(ladder.recommended.commands),
            }  # fmt: skip
            print(json.dumps(line), flush=True)


def rounded(estimate: Any) -> list[float]:
    """An estimate and its interval, rounded."""
    return [round(each, 4) for each in estimate]


def own_problem(name: str, directory: str) -> tuple[Any, Any, dict[str, Any]]:
    """Environment, heuristic and settings of a user's simulator; the workshop is the program of the guide."""
    module, env, heuristic = OWN[name]
    sys.path.insert(0, directory)
    if name == "workshop":
        code = re.findall(r"^```python\n(.*?)^```", _GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        Path(directory, "workshop.py").write_text("".join(code), "utf-8")
    found = importlib.import_module(module)
    return getattr(found, env), getattr(found, heuristic), {}


def shipped_problem(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Environment, configuration of the heuristic and settings of a shipped problem."""
    make, _, arguments = problem_of(name)
    base = PROBLEMS[name][2]
    settings = {"value": arguments["value"]} if "value" in arguments else {}
    return make, read_config(ENVS / f"{base}.yaml") if isinstance(base, str) else base, settings


def copies() -> None:
    """Print what a copied and a reseeded row of a 15x15 job shop cost."""
    source = JobShops(4, 15, 15, only_choices=True)
    source.begin(np.arange(4))
    for n_rows in (64, 256, 1024, 4096):
        target, rows = JobShops(n_rows, 15, 15, only_choices=True), np.zeros(n_rows, np.int64)
        everyone = slice(0, n_rows)
        copied = timed(partial(target.copy_rows, source, rows, everyone, with_random=False))
        with_random = timed(partial(target.copy_rows, source, rows, everyone))
        reseeded = timed(partial(target.new_futures, everyone, np.arange(n_rows), 1))
        print(
            f"{n_rows} rows: copy {1e6 * copied / n_rows:.3f} µs, with its random stream "
            f"{1e6 * with_random / n_rows:.3f} µs, new future {1e6 * reseeded / n_rows:.3f} µs a row",
            flush=True,
        )


def timed(call: Any, n_rounds: int = 20) -> float:
    """Median CPU seconds of a call."""
    call()
    seconds = []
    for _ in range(n_rounds):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return float(np.median(seconds))


def processes(n_processes: int, n_rounds: int = 7, seconds: float = 2.0) -> None:
    """Print simulated decisions a second of planning through single environments beside bare loops of the simulator.

    The bare loops step the environment with the base policy in as many processes at the same time.
    """
    make, base, _ = problem_of("dispatching")
    env = make()
    policy = RolloutPolicy(base, horizon=30, scenarios=16, candidates=16, n_processes=n_processes)
    policy.bind(env)
    ratios = []
    with multiprocessing.Pool(n_processes) as pool:
        for _ in range(n_rounds):
            started = time.perf_counter()
            n_bare = sum(pool.map(_bare_loop, [seconds] * n_processes))
            bare = n_bare / (time.perf_counter() - started)
            env.seed(1)
            observation, n_planned = env.reset(), 0.0
            started = time.perf_counter()
            while time.perf_counter() - started < seconds:
                done_before = policy.n_simulated
                action = policy.compute_action(observation, None, env, env.actor_id())
                n_planned += policy.n_simulated - done_before
                observation, _, done, _ = env.step(action)
                observation = env.reset() if done else observation
            planned = n_planned / (time.perf_counter() - started)
            ratios.append(planned / bare)
            print(f"bare {bare:.0f}, planning {planned:.0f} decisions/s: {ratios[-1]:.2f}", flush=True)
    print(f"median of {n_rounds} rounds with {n_processes} processes: {np.median(ratios):.2f}", flush=True)
    policy.close()


def _bare_loop(seconds: float) -> int:
    make, base, _ = problem_of("dispatching")
    env = make()
    act = acting_in(env, base, deterministic=True)
    env.seed(1)
    observation, n_steps = env.reset(), 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        observation, _, done, _ = env.step(act(observation, env.actor_id()))
        observation = env.reset() if done else observation
        n_steps += 1
    return n_steps


def main() -> None:
    """Run what the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lost_sales", "dcl", "problems", "improve", "copies", "processes"])
    parser.add_argument("--settings", nargs="*", default=None)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--scenarios", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--budget", type=float, default=600.0)
    arguments = parser.parse_args()
    if arguments.what == "lost_sales":
        lost_sales(arguments.settings or SETTINGS, arguments.scenarios)
    elif arguments.what == "dcl":
        for seed in range(1, arguments.seeds + 1):
            labelled(arguments.settings or SETTINGS, seed, arguments.generations)
    elif arguments.what == "problems":
        problems(arguments.settings or list(PROBLEMS), arguments.episodes, arguments.first_seed)
    elif arguments.what == "improve":
        seven = [*(name for name in PROBLEMS if name != "job_shop"), *OWN]
        for seed in range(1, arguments.seeds + 1):
            improvements(arguments.settings or seven, arguments.budget, seed)
    elif arguments.what == "copies":
        copies()
    else:
        processes(arguments.processes)


if __name__ == "__main__":
    main()
