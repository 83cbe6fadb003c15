"""One policy for all settings of lost sales: exact costs of its actions in each of the 32 settings.

    python benchmarks/context.py --seeds 1 2 3                    # trains +experiment=lost_sales_context_ppo
    python benchmarks/context.py --runs outputs/<run> --markdown docs/benchmarks/operations.md

Printed are the gaps to the exact optimum of each setting (docs/benchmarks/operations.md has the optima), those of the
base-stock policy with the level that follows from the context, and the CPU seconds of each training run.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.operations import HEADER, LAST, trained
from benchmarks.page_tables import markdown_table, rows_of, write_table

CONTEXT = {"demand": ["poisson", "geometric"], "penalty": [4, 9, 19, 39], "lead_time": [1, 2, 3, 4]}
OPERATIONS = Path(__file__).resolve().parents[1] / "docs/benchmarks/operations.md"


def train(seed: int, directory: Path, overrides: Sequence[str]) -> float:
    """Train a run and return its CPU seconds."""
    command = [sys.executable, "-m", "maze.maze_cli", "-cn", "conf_train", "+experiment=lost_sales_context_ppo"]
    seeds = [f"seeding.env_base_seed={seed}", f"seeding.agent_base_seed={seed}", f"hydra.run.dir={directory}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, *seeds, *overrides], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def exact_cost(
    setting: tuple[str, float, int], act: Callable[[dict[str, np.ndarray]], np.ndarray], largest: int
) -> float:
    """Average cost of a policy in a setting; it observes stocks padded to the longest lead time, and the context."""
    from maze.core.env.context import Context
    from maze_envs.inventory.exact import lost_sales_cost
    from maze_envs.inventory.lost_sales import SCALE, LostSales

    demand, penalty, lead_time = setting
    problem = LostSales(1, demand, lead_time=lead_time, penalty=penalty, max_order=largest)
    stored = np.array([[CONTEXT["demand"].index(demand), penalty, lead_time]], np.float64)
    seen = Context(CONTEXT, tuple(CONTEXT)).observed(stored)

    def orders(states: np.ndarray) -> np.ndarray:
        stock = np.pad(states / SCALE, ((0, 0), (0, max(CONTEXT["lead_time"]) - lead_time))).astype(np.float32)
        return act({"stock": stock, "context": np.repeat(seen, len(states), axis=0)})

    return lost_sales_cost(problem, orders, tolerance=1e-3).cost


def gap_in_percent(arguments: tuple[str, Any]) -> float:
    """Gap to the optimum of a run, or of the heuristic (`None`), in a setting."""
    setting, run = arguments
    demand, penalty, lead_time = setting.split(",")
    if run is None:
        from maze_envs.inventory.lost_sales import ContextBaseStockPolicy

        policy = ContextBaseStockPolicy(CONTEXT)
        act = lambda seen: policy.choose(seen, 0)["order"]  # noqa: E731
    else:
        _, network = trained(run, LAST)
        act = lambda seen: network(0, seen)["order"]  # noqa: E731
    optimum = float(rows_of(OPERATIONS, "lost_sales", HEADER)[setting][1])
    cost = exact_cost((demand, float(penalty), int(lead_time)), act, 12 if demand == "poisson" and run is None else 20)
    return 100 * (cost / optimum - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="seeds of training runs")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="finished training runs")
    parser.add_argument("--settings", nargs="*", help="settings such as poisson,4,1 (default: all)")
    parser.add_argument("--overrides", nargs="*", default=[], help="overrides of the training runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the evaluation")
    parser.add_argument("--markdown", type=Path, help="page whose table `context` is replaced")
    options = parser.parse_args()
    runs: list[tuple[Path, float | None]] = [(run, None) for run in options.runs]
    for seed in options.seeds:
        directory = Path(tempfile.mkdtemp(prefix=f"context-{seed}-")) / "run"
        runs.append((directory, train(seed, directory, options.overrides)))
    settings = options.settings or list(rows_of(OPERATIONS, "lost_sales", HEADER))
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, run, seconds in [("base-stock by context", None, 0.0), *((f"{r}", r, s) for r, s in runs)]:
            gaps = list(pool.map(gap_in_percent, [(setting, run) for setting in settings]))
            worst = settings[int(np.argmax(gaps))]
            print(name, " ".join(f"{each:.2f}" for each in gaps), flush=True)
            cpu = "" if seconds is None else f"{seconds:.0f}"
            print(
                f"  mean {mean(gaps):.3f} %, largest {max(gaps):.3f} % ({worst}), CPU seconds: {cpu or 'unknown'}",
                flush=True,
            )
            label = name if run is None else f"PPO, run {len(rows)}"
            rows.append([label, f"{mean(gaps):.2f} %", f"{max(gaps):.2f} % ({worst})", cpu])
    if options.markdown:
        header = ["policy", "mean gap over 32 settings", "largest gap", "CPU seconds"]
        write_table(options.markdown, "context", markdown_table(header, rows))


if __name__ == "__main__":
    main()
