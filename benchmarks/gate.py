"""Decisions of the gate for a policy that is 3 % worse and for one that is not.

Policies cut pieces of random sizes in cutting-2D: the greedy one; one that now and then cuts from the largest piece,
which costs about 3 % more raw pieces; and one that is equally good, as it errs just as often as
its baseline, at other times. All play the same pool of episodes. How often `maze-run -cn conf_gate` would let them pass
with its default number of episodes and its default margin is counted over many choices of episodes.

Then the command itself plays, 20 times with other seeds: a policy against itself, and against the worse one.

    python -m benchmarks.gate            # 1000 episodes in the pool
    python -m benchmarks.gate --quick    # 300, and 3 times instead of 20
    python -m benchmarks.gate --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.comparison import DEMAND, N_STEPS, SlipperyGreedyPolicy, pool
from maze.core.utils.config_utils import read_hydra_config
from maze.evaluation.comparison import RETURN, PlayedEpisodes
from maze.evaluation.gate import Gate, Threshold
from maze.maze_cli import main as maze_run
from maze_envs.logistics.cutting_2d.agents.greedy_policy import GreedyPolicy

N_CHOICES = 200
SHARE_OF_SLIPS = 0.115


class OtherSlipsPolicy(SlipperyGreedyPolicy):
    """Slips as often, at other times."""

    def seed(self, seed: int) -> None:
        super().seed(seed + 1)


def passes(baseline: PlayedEpisodes, candidate: PlayedEpisodes, episodes: np.ndarray[Any, Any], margin: float) -> bool:
    """Whether a candidate passes in a choice of episodes, judged by its return."""
    ours, theirs = (
        PlayedEpisodes(each.name, {RETURN: each.measures[RETURN][:, episodes]}) for each in (baseline, candidate)
    )
    return Gate(ours, theirs, {RETURN: Threshold(margin=margin)}).passes


def share_of_passes(baseline: PlayedEpisodes, candidate: PlayedEpisodes, n_episodes: int, margin: float) -> float:
    """How often a candidate passes."""
    rng = np.random.default_rng(0)
    n_pool = baseline.measures[RETURN].shape[1]
    choices = (rng.choice(n_pool, n_episodes, replace=False) for _ in range(N_CHOICES))
    return float(np.mean([passes(baseline, candidate, episodes, margin) for episodes in choices]))


def n_passes_of_command(candidate: Mapping[str, Any], n_times: int) -> int:
    """How often the command lets a candidate pass beside the greedy policy, each time with other seeds."""
    sizes = ",".join(map(str, DEMAND["raw_piece_size"]))
    settings = [
        "env=cutting_2d",
        "~env.core_env.demand_generator",
        f"+env.core_env.demand_generator={{_target_:uniform,raw_piece_size:[{sizes}]}}",
        f"runner.max_episode_steps={N_STEPS}",
        "baseline=cutting_2d_greedy",
        f"candidate={{{','.join(f'{key}:{value}' for key, value in candidate.items())}}}",
    ]
    previous, statuses = Path.cwd(), []
    with TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            for seed in range(n_times):
                seeds = [f"seeding.env_base_seed={seed}", f"seeding.agent_base_seed={seed + 1000}"]
                statuses.append(maze_run(["--quiet", "-cn", "conf_gate", *settings, *seeds, f"hydra.run.dir={seed}"]))
        finally:
            os.chdir(previous)
    assert set(statuses) <= {0, 1}, statuses
    return statuses.count(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runner = read_hydra_config("maze.conf", "conf_gate").runner
    n_episodes, margin = int(runner.n_episodes), float(runner.margin)
    policies = {
        "greedy": GreedyPolicy(),
        "slippery": SlipperyGreedyPolicy(SHARE_OF_SLIPS),
        "other slips": OtherSlipsPolicy(SHARE_OF_SLIPS),
    }
    greedy, slippery, other = pool(300 if options.quick else 1000, policies)
    n_times = 3 if options.quick else 20
    returns = {each.name: each.measures[RETURN].mean() for each in (greedy, slippery, other)}
    slips = {"_target_": "benchmarks.comparison.SlipperyGreedyPolicy", "share": SHARE_OF_SLIPS}
    same = {"_target_": f"{GreedyPolicy.__module__}.GreedyPolicy"}
    results = {
        "n_episodes": n_episodes,
        "margin": margin,
        "worse_by": float(returns["slippery"] / returns["greedy"] - 1),
        "worse_is_stopped": 1 - share_of_passes(greedy, slippery, n_episodes, margin),
        "equal_differs_by": float(returns["other slips"] / returns["slippery"] - 1),
        "equal_passes": share_of_passes(slippery, other, n_episodes, margin),
        "same_passes": share_of_passes(slippery, slippery, n_episodes, margin),
        "command_stops_worse": 1 - n_passes_of_command(slips, n_times) / n_times,
        "command_passes_same": n_passes_of_command(same, n_times) / n_times,
    }
    print(f"{n_episodes} episodes of {N_STEPS} steps, margin {margin:.0%}, {N_CHOICES} choices, {n_times} commands")
    for name, value in list(results.items())[2:]:
        print(f"{name:<32} {value:.1%}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
