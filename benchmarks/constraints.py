"""Constraints in training: service levels of lost sales, late orders of dispatching, costs of a public safety suite.

    python benchmarks/constraints.py lost_sales --fill-rates 0.98 --seeds 1 2 3
    python benchmarks/constraints.py dispatching --seeds 1
    python benchmarks/constraints.py safety --seeds 1 2 3

`lost_sales`: runs are +experiment=lost_sales_service_ppo (lead time 4, Poisson demand of mean 5). Stock and lost sales
of a period are computed exactly, for the learned policy and for all base-stock levels. The optimum is that of the
constrained problem, `max over p of min over policies of (stock + p * (lost - bound))`, with exact costs of
unconstrained problems. The lower 95 % bound of the fill rate is from 500 simulated episodes of 1,000 periods, with
the periods in which the first orders have not arrived.

`dispatching`: +experiment=dispatching_late_ppo with and without the constraint, and the nearest order, in the same
episodes.

`safety`: SafetyBallRun-v0 of bullet-safety-gym with a cost limit of 10 per episode, see docs/guide/constraints.md for
the installation.

`--keep` names a directory for the runs, where finished ones are not trained again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.operations import trained
from benchmarks.page_tables import markdown_table

LEAD_TIME, MEAN_DEMAND, LARGEST = 4, 5.0, 12
PRICES = (*range(2, 20, 2), *range(20, 60, 4))
"""Penalties of a lost unit whose unconstrained problems bound the constrained one."""


COST_LIMIT = 10
SAFETY_SETTINGS = (
    "+experiment=mujoco_ppo",
    "runner.concurrency=20",
    "algorithm.n_epochs=6",
    "algorithm.epoch_length=10",
    "algorithm.n_rollout_steps=100",
    "algorithm.batch_size=256",
    "algorithm.constraint_margin=0.1",
    "algorithm.rollout_evaluator.deterministic=true",
    "algorithm.rollout_evaluator.n_episodes=20",
)
"""120,000 steps: 60 updates of 20 episodes."""


def maze_run(arguments: Sequence[str]) -> None:
    """Run a command with one thread; modules of this repository can be imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-m", "maze.maze_cli", *arguments], env=environment, cwd=root, check=True)


def train(directory: Path, overrides: Sequence[str], seed: int) -> Path:
    """Train a run, unless it is finished, and return its directory."""
    if not (directory / "state_dict.pt").exists():
        command = ["-cn", "conf_train", *overrides, f"hydra.run.dir={directory}"]
        seeds = [f"seeding.env_base_seed={seed}", f"seeding.agent_base_seed={seed}"]
        maze_run([*command, *seeds])
    return directory


def stock_and_lost(policy: Any) -> tuple[float, float]:
    """Exact stock and lost sales of a period in the long run."""
    from maze_envs.inventory.exact import lost_sales_cost
    from maze_envs.inventory.lost_sales import LostSales

    costs = ((1.0, 0.0), (0.0, 1.0))
    problems = (LostSales(1, lead_time=LEAD_TIME, holding_cost=h, penalty=p, max_order=LARGEST) for h, p in costs)
    stock, lost = (lost_sales_cost(problem, policy, 1e-3).cost for problem in problems)
    return stock, lost


def optimum(bound: float) -> float:
    """Least stock of all policies, randomised ones included, that lose at most `bound` units per period."""
    from maze_envs.inventory.exact import lost_sales_cost
    from maze_envs.inventory.lost_sales import LostSales

    duals = (
        lost_sales_cost(LostSales(1, lead_time=LEAD_TIME, penalty=float(price), max_order=LARGEST), tolerance=1e-3).cost
        - price * bound
        for price in PRICES
    )
    return max(duals)


def simulated_loss(act: Any) -> tuple[float, float]:
    """Share of the demand that is lost in 500 episodes, and its upper 95 % bound."""
    from maze_envs.inventory.lost_sales import LostSales

    n_envs, n_steps = 500, 1000
    problem = LostSales(n_envs, lead_time=LEAD_TIME, max_order=LARGEST, max_episode_steps=n_steps)
    for row in range(n_envs):
        problem.seed_row(row, 10_000 + row)
    problem.begin(np.arange(n_envs))
    lost = np.zeros(n_envs)
    seen = {"stock": np.zeros((n_envs, LEAD_TIME), np.float32)}
    for _ in range(n_steps):
        problem.observe(seen)
        problem.advance({"order": act(seen)})
        lost += next(fired.attributes["units"] for fired in problem.fired if fired.event.__name__ == "short")
    shares = lost / n_steps / MEAN_DEMAND
    return float(shares.mean()), float(shares.mean() + 1.645 * shares.std(ddof=1) / n_envs**0.5)


def service(fill_rates: Sequence[float], seeds: Sequence[int], keep: Path) -> None:
    from maze_envs.inventory.lost_sales import SCALE

    levels = {}
    for level in range(20, 36):
        levels[level] = stock_and_lost(lambda state, level=level: np.clip(level - state.sum(1), 0, LARGEST))
    rows = []
    for fill_rate in fill_rates:
        bound = round((1.0 - fill_rate) * MEAN_DEMAND, 3)
        stock, lost, level = min((stock, lost, level) for level, (stock, lost) in levels.items() if lost <= bound)
        least = optimum(bound)
        target = f"{fill_rate:.0%}"
        rows.append([target, "optimum", f"{least:.3f}", f"{fill_rate:.2%}", "", f"{100 * (least / stock - 1):+.1f} %"])
        rows.append([target, f"base stock {level}", f"{stock:.3f}", f"{1 - lost / MEAN_DEMAND:.2%}", "", ""])
        for seed in seeds:
            settings = ["+experiment=lost_sales_service_ppo", f'algorithm.constraints=["short <= {bound}"]']
            run = train(keep / f"service-{bound}-{seed}", settings, seed)
            _, network = trained(run)
            act = lambda seen, network=network: network(0, seen)["order"]  # noqa: E731
            found, lost = stock_and_lost(lambda state, act=act: act({"stock": (state / SCALE).astype(np.float32)}))
            _, upper = simulated_loss(act)
            gap = f"{100 * (found / stock - 1):+.1f} %"
            rows.append(
                [target, f"PPO, seed {seed}", f"{found:.3f}", f"{1 - lost / MEAN_DEMAND:.2%}", f"{1 - upper:.2%}", gap]
            )
    header = ["target", "policy", "stock", "fill rate", "simulated, lower 95 % bound", "stock beside base stock"]
    print(markdown_table(header, rows))


def compared(policies: Mapping[str, str], kpi: str, n_episodes: int) -> None:
    """Print mean returns and a KPI of policies in the same episodes, with 95 % intervals."""
    with tempfile.TemporaryDirectory() as directory:
        chosen = ", ".join(f"{name}: {policy}" for name, policy in policies.items())
        settings = [f"policies={{{chosen}}}", f"runner.minimize=[{kpi}]", f"runner.n_episodes={n_episodes}"]
        settings += ["seeding.env_base_seed=1", "seeding.agent_base_seed=1", f"hydra.run.dir={directory}"]
        maze_run(["-cn", "conf_compare", *settings])
        with (Path(directory) / "comparison.csv").open(encoding="utf-8", newline="") as lines:
            found = {(row["policy"], row["measure"]): row for row in csv.DictReader(lines)}
    rows = [
        [name, *(cell for measure in ("return", kpi) for cell in estimate(found[name, measure]))] for name in policies
    ]
    print(markdown_table(["policy", "return", "95 % interval", kpi, "95 % interval"], rows))


def estimate(row: Mapping[str, str]) -> list[str]:
    """Return a mean and its interval as cells."""
    mean, low, high = (float(row[key]) for key in ("mean", "mean_low", "mean_high"))
    return [f"{mean:.4g}", f"[{low:.4g}, {high:.4g}]"]


def dispatching(seeds: Sequence[int], keep: Path) -> None:
    """Compare runs with and without the constraint with the heuristic."""
    rule = "{_target_: maze_envs.logistics.dispatching.rules.NearestOrder, farthest: 0.21}"
    policies = {"nearest_order": "nearest_order", "nearest_order_within_5_cells": rule}
    for seed in seeds:
        for name, changes in {"unconstrained": ["algorithm.constraints=[]"], "constrained": []}.items():
            run = train(keep / f"dispatching-{name}-{seed}", ["+experiment=dispatching_late_ppo", *changes], seed)
            policies[f"{name}_{seed}"] = str(run)
    compared(policies, "late_share", 400)


def safety(seeds: Sequence[int], keep: Path) -> None:
    """Print returns and costs of episodes with and without a cost limit."""
    env = "{_target_: benchmarks.safety_env.safety_env, name: SafetyBallRun-v0}"
    rows = []
    for seed in seeds:
        for limit in ([], [f"episode_cost <= {COST_LIMIT}"]):
            settings = [f"env={env}", *SAFETY_SETTINGS, f"algorithm.constraints={json.dumps(limit)}"]
            run = train(keep / f"safety-{len(limit)}-{seed}", settings, seed)
            found = played(run, n_episodes=100)
            low, high = found.mean(0) - 1.96 * found.std(0) / 10.0, found.mean(0) + 1.96 * found.std(0) / 10.0
            shown = (f"{mean:.1f} [{a:.1f}, {b:.1f}]" for mean, a, b in zip(found.mean(0), low, high, strict=True))
            rows.append([f"{'PPO with a limit' if limit else 'PPO'}, seed {seed}", *shown])
    print(markdown_table(["policy", "return", f"cost (limit {COST_LIMIT})"], rows))


def played(run: Path, n_episodes: int) -> np.ndarray:
    """Return and cost of episodes with greedy actions, `[n_episodes, 2]`."""
    env, act = trained(run)
    env.seed(10_000)
    found = np.zeros((n_episodes, 2))
    for episode in found:
        observation, done = env.reset(), False
        while not done:
            batch = {key: np.asarray(value)[np.newaxis] for key, value in observation.items()}
            action = {key: value[0] for key, value in act(0, batch).items()}
            observation, reward, done, info = env.step(action)
            episode[:] += (reward, info["cost"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", choices=["lost_sales", "dispatching", "safety"])
    parser.add_argument("--fill-rates", type=float, nargs="*", default=[0.95, 0.98], help="service levels")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="seeds of training runs")
    parser.add_argument("--keep", type=Path, help="directory of the runs (default: a new one)")
    options = parser.parse_args()
    keep = (options.keep or Path(tempfile.mkdtemp(prefix="constraints-"))).absolute()
    if options.problem == "lost_sales":
        service(options.fill_rates, options.seeds, keep)
    else:
        {"dispatching": dispatching, "safety": safety}[options.problem](options.seeds, keep)


if __name__ == "__main__":
    main()
