"""Job shops: rules and trained dispatchers on Taillard's instances, beside published figures; the cost of a decision.

    python benchmarks/job_shop.py outputs/<run> [outputs/<other seed> ...]   # gaps to the best known makespans
    python benchmarks/job_shop.py --sizes 15x15 --samples 0                  # rules only
    python benchmarks/job_shop.py --speed                                    # a decision through Maze and without

Runs come from `maze-run -cn conf_train +experiment=job_shop_ppo`. Greedy: the most likely job each time; best of 64:
the shortest of 64 schedules with sampled decisions. Several runs: their mean, and the lowest and highest of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from maze.core.agent.serialized_torch_policy import SerializedTorchPolicy
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze_envs.scheduling.job_shop import JobShopEnv, JobShops, solve
from maze_envs.scheduling.rules import RULES, DispatchingRule
from maze_envs.scheduling.taillard import instances_of

SIZES = ("15x15", "20x15", "20x20", "30x15")
PUBLISHED = {"Zhang et al. (2020), published": {"15x15": 25.96, "20x15": 30.03, "20x20": 31.61, "30x15": 33.00}}


def load(run: Path, weights: str) -> SerializedTorchPolicy:
    """The policy of a training."""
    model = OmegaConf.load(run / "hydra_config.yaml").model
    return SerializedTorchPolicy(model, str(run / weights), str(run / "spaces_config.pkl"), "cpu")


def gaps(policy: Any, size: str, n_samples: int = 1) -> np.ndarray:
    """Gaps to the best known makespans in percent, one for each instance; of the best of `n_samples` schedules."""
    instances = instances_of(size)
    best = np.array([one.best_known for one in instances])
    return np.asarray(100 * (solve(policy, instances, n_samples).makespans.min(axis=1) / best - 1))


def table(runs: list[Path], sizes: list[str], n_samples: int, weights: str) -> dict[str, dict[str, list[float]]]:
    """Mean gaps by line and size, one for each run."""
    found: dict[str, dict[str, list[float]]] = {
        name: {s: [row[s]] for s in sizes if s in row} for name, row in PUBLISHED.items()
    }
    for rule in RULES:
        found[rule] = {size: [gaps(DispatchingRule(rule), size).mean()] for size in sizes}
    for run in runs:
        policy = load(run, weights)
        for name, samples in (("trained, greedy", 1), (f"trained, best of {n_samples}", n_samples)):
            for size in sizes if samples else ():
                found.setdefault(name, {}).setdefault(size, []).append(float(gaps(policy, size, samples).mean()))
                print(f"{run.name}, {name}, {size}: {found[name][size][-1]:.2f} %", flush=True)
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--samples", type=int, default=64, help="0: greedy decisions only")
    parser.add_argument("--weights", default="state_dict.pt", help="latest.pt: those of the last epoch")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any]
    if arguments.speed:
        found = speed(arguments.rounds)
        print(
            f"a decision (15x15): {found['bare_us']:.0f} us in the simulator, {found['through_maze_us']:.0f} us "
            f"through Maze with statistics, {found['ratio']:.2f} times as long"
        )
    else:
        found = table(arguments.runs, arguments.sizes, arguments.samples, arguments.weights)
        print(f"\n| gap to best known, % | {' | '.join(arguments.sizes)} |\n|{' --- |' * (len(arguments.sizes) + 1)}")
        for name, row in found.items():
            cells = []
            for size in arguments.sizes:
                values = row.get(size, [])
                spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.1f}{spread}" if values else "")
            print(f"| {name} | {' | '.join(cells)} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
