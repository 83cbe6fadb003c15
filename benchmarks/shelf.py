"""The shelf: policy bundles that are part of Maze, with the results of comparisons with heuristics in their cards.

    python -m benchmarks.shelf lost_sales --keep runs              # train (unless `runs` has it), compare, export
    python -m benchmarks.shelf --markdown docs/guide/operations.md # write the table from the cards

Each policy is trained by the command in its card and compared with a heuristic on the same episodes.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.page_tables import markdown_table, write_table
from maze.cli.commands import SHELF_HEADER, shelf_row
from maze.core.utils.config_utils import read_config
from maze.maze_cli import main as maze_run
from maze.serve.bundle import PolicyBundle, shelf

SHELF = Path(__file__).resolve().parents[1] / "maze_envs" / "shelf"
SEEDS = ("seeding.env_base_seed=1", "seeding.agent_base_seed=1")


@dataclass(frozen=True)
class Entry:
    """A bundle of the shelf.

    :param problem: What the policy solves.
    :param training: Arguments of the training.
    :param heuristic: Name of the heuristic that it is compared with.
    :param policy: The heuristic in `policies`.
    :param kpi: The KPI of the table; less is better.
    :param n_episodes: Episodes of the comparison.
    :param evaluated: Arguments of the environment in the comparison.
    """

    problem: str
    training: tuple[str, ...]
    heuristic: str
    policy: str
    kpi: str
    n_episodes: int = 200
    evaluated: tuple[str, ...] = ()


ENTRIES = {
    "lost_sales": Entry(
        "lost sales, lead time 4, penalty 4, Poisson demand",
        ("+experiment=lost_sales_ppo", "policy@warm_start.policy=base_stock", "algorithm.critic_burn_in_epochs=1"),
        "best capped base-stock",
        "{_target_: maze_envs.inventory.lost_sales.BaseStockPolicy, level: 26, cap: 5}",
        "average_cost",
        500,
    ),
    "lost_sales_context": Entry(
        "lost sales, 32 settings as context",
        ("+experiment=lost_sales_context_ppo", "algorithm.n_epochs=10", "algorithm.epoch_length=20"),
        "base-stock by context",
        "context_base_stock",
        "average_cost",
        128,
        (
            "env=lost_sales",
            "env.instances=grid",
            "env.max_order=20",
            "env.reward_scale=newsvendor",
            "env.context={demand: [poisson, geometric], penalty: [4, 9, 19, 39], lead_time: [1, 2, 3, 4]}",
        ),
    ),
    "criss_cross": Entry(
        "criss-cross network, balanced medium load",
        (
            "+experiment=criss_cross_ppo",
            "env.network=B.M.",
            "runner.concurrency=256",
            "algorithm.n_rollout_steps=128",
            "algorithm.batch_size=4096",
        ),
        "c-mu rule",
        "{_target_: maze_envs.queueing.network.PriorityPolicy, network: B.M., rule: c_mu}",
        "average_jobs",
        100,
    ),
    "dispatching": Entry(
        "dispatching, at most 5 late orders per 100",
        ("+experiment=dispatching_late_ppo",),
        "nearest order",
        "nearest_order",
        "distance_per_order",
        100,
    ),
    "job_shop": Entry(
        "job shops of all sizes; results on Taillard's 15x15",
        ("+experiment=job_shop_ppo", "algorithm.n_epochs=15", "algorithm.epoch_length=15"),
        "FDD/MWKR",
        "job_shop_rule",
        "gap_to_best_known",
        10,
        ("env=job_shop", "env.instances=15x15"),
    ),
}


def made(name: str, keep: Path) -> Path:
    """Train a policy, compare it, and write its bundle.

    :param name: Name of the bundle.
    :param keep: Directory of runs; one that is finished is not trained again.
    """
    entry, run = ENTRIES[name], (keep / name).absolute()
    if not (run / "state_dict.pt").is_file():
        _succeed(["-cn", "conf_train", *entry.training, *SEEDS, f"hydra.run.dir={run}"])
    with tempfile.TemporaryDirectory() as directory:
        minimised = [f"runner.minimize=[{entry.kpi}]"]
        policies = [f"policies={{policy: {run}, heuristic: {entry.policy}}}"]
        episodes = [f"runner.n_episodes={entry.n_episodes}", *SEEDS, f"hydra.run.dir={directory}"]
        _succeed(["-cn", "conf_compare", *policies, *minimised, *entry.evaluated, *episodes])
        found = {row["policy"]: row for row in _rows(Path(directory) / "comparison.csv") if row["measure"] == entry.kpi}
    results = [[float(found[who][key]) for key in ("mean", "mean_low", "mean_high")] for who in ("policy", "heuristic")]
    facts: dict[str, Any] = {
        "problem": entry.problem,
        "env": read_config(run / "hydra_config.yaml")["env"],
        "kpi": entry.kpi,
        "heuristic": entry.heuristic,
        "results": results,
        "n_episodes": entry.n_episodes,
    }
    command = shlex.join(["maze-run", "-cn", "conf_train", *entry.training, *SEEDS])
    bundle = PolicyBundle.from_run(run, name=name, n_steps=500, card={"shelf": facts, "command": command, "run": name})
    return bundle.save(SHELF / f"{name}.maze")


def _succeed(command: Sequence[str]) -> None:
    if maze_run(command):
        raise SystemExit(f"maze-run {shlex.join(command)} failed")


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def shelf_table() -> str:
    """Return the table of the shelf, from the cards of its bundles."""
    return markdown_table(SHELF_HEADER, [shelf_row(PolicyBundle.load(path, check=False)) for path in shelf().values()])


def main() -> None:
    """Make bundles, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*ENTRIES, []])
    parser.add_argument("--keep", type=Path, default=Path("runs"), help="directory of the runs")
    parser.add_argument("--markdown", type=Path, help="page with the table")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in options.names:
        print(made(name, options.keep), flush=True)
    if options.markdown is not None:
        write_table(options.markdown, "shelf", shelf_table())


if __name__ == "__main__":
    main()
