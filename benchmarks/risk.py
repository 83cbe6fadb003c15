"""CVaR as an objective: lost sales with rare surges of the demand, where the mean favours rare large losses.

    python benchmarks/risk.py --seeds 1 2 3

Runs are +experiment=lost_sales_risk_ppo, with `algorithm.risk=null` and with `cvar:0.1`. All policies are evaluated in
the same 4,000 episodes, beside the base-stock policies with the best mean and with the best CVaR in other episodes.
`--keep` names a directory for the runs, where finished ones are not trained again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.constraints import train
from benchmarks.operations import trained
from benchmarks.page_tables import markdown_table

LEVEL, N_EPISODES = 0.1, 4000
Orders = Callable[[dict[str, np.ndarray]], np.ndarray]


def returns(act: Orders, settings: Any, first_seed: int) -> np.ndarray:
    """Return the returns of episodes, `[N_EPISODES]`, as negative costs."""
    from maze_envs.inventory.lost_sales import LostSales

    problem = LostSales(N_EPISODES, **settings)
    for row in range(N_EPISODES):
        problem.seed_row(row, first_seed + row)
    problem.begin(np.arange(N_EPISODES))
    seen = {"stock": np.zeros((N_EPISODES, problem.lead_time), np.float32)}
    costs = np.zeros(N_EPISODES)
    for _ in range(settings["max_episode_steps"]):
        problem.observe(seen)
        problem.advance({"order": act(seen)})
        costs += next(fired.attributes["value"] for fired in problem.fired if fired.event.__name__ == "cost")
    return -costs


def base_stock(level: int, settings: Any) -> Orders:
    from maze_envs.inventory.lost_sales import SCALE

    return lambda seen: np.clip(level - np.rint(seen["stock"] * SCALE).sum(1), 0, settings["max_order"]).astype(int)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="seeds of training runs")
    parser.add_argument("--keep", type=Path, help="directory of the runs (default: a new one)")
    parser.add_argument("--overrides", nargs="*", default=[], help="overrides of all training runs")
    options = parser.parse_args()
    from omegaconf import OmegaConf

    from maze.evaluation.comparison import Comparison, PlayedEpisodes, TailComparison

    keep = options.keep or Path(tempfile.mkdtemp(prefix="risk-"))
    runs: dict[str, list[Path]] = {}
    for risk in ("null", f"cvar:{LEVEL}"):
        overrides = ["+experiment=lost_sales_risk_ppo", f"algorithm.risk={risk}", *options.overrides]
        runs[risk] = [train(keep / f"{risk.replace(':', '-')}-{seed}", overrides, seed) for seed in options.seeds]
    config: Any = OmegaConf.load(runs["null"][0] / ".hydra" / "config.yaml")
    names = ("lead_time", "penalty", "max_order", "max_episode_steps", "surge_probability", "surge_units")
    settings = {name: config.env[name] for name in names}
    played = []
    for risk, of_risk in runs.items():
        networks = [trained(run)[1] for run in of_risk]
        found = [returns(lambda seen, net=net: net(0, seen)["order"], settings, 10_000) for net in networks]  # type: ignore[misc]
        played.append(PlayedEpisodes(f"PPO, {risk}", {"return": np.stack(found)}))
    pilot = {level: np.sort(returns(base_stock(level, settings), settings, 900_000)) for level in range(12, 36)}
    for name, share in (("mean", 1.0), (f"cvar:{LEVEL}", LEVEL)):
        best = max(pilot, key=lambda level: pilot[level][: int(share * N_EPISODES)].mean())
        measured = returns(base_stock(best, settings), settings, 10_000)[np.newaxis]
        played.append(PlayedEpisodes(f"base stock {best}, best {name}", {"return": measured}))
    comparison = Comparison(played)
    print(comparison.text(), TailComparison(comparison, [LEVEL]).text(), sep="\n\n")
    tails = {row.policy: row for _, _, row in TailComparison(comparison, [LEVEL]).rows("return")}
    rows = []
    for row in comparison.rows_of("return"):
        of_runs = next(each for each in played if each.name == row.policy).measures["return"]
        worst = np.sort(of_runs, axis=1)[:, : int(LEVEL * N_EPISODES)].mean(1)
        cells = [
            f"{row.mean.value:.0f}",
            f"{tails[row.policy].mean.value:.0f}",
            " ".join(f"{each:.0f}" for each in worst),
        ]
        for difference in (row.difference, tails[row.policy].difference):
            shown = (
                "" if difference is None else f"{difference.value:+.0f} [{difference.low:+.0f}, {difference.high:+.0f}]"
            )
            cells.append(shown)
        rows.append([row.policy, *cells])
    header = ["policy", "mean return", "CVaR", "CVaR of each run", "difference of the mean", "difference of the CVaR"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
