"""Number of episodes that distinguish two policies, common and separate.

Two policies cut pieces of random sizes in cutting-2D: the greedy one, and one that now and then cuts from the largest
piece, by which it uses about three per cent more raw pieces. Both play the same episodes; the difference is judged as
`maze-run -cn conf_compare` does, episode by episode, and once more as if the episodes had been different ones for each
policy (the other one's are drawn again from the same pool). How often the interval leaves out 0, over many choices of
episodes, is the chance to see the difference.

    python benchmarks/comparison.py            # 400 episodes in the pool
    python benchmarks/comparison.py --quick    # 100
    python benchmarks/comparison.py --json out.json
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

from maze.core.agent.policy import Policy
from maze.core.env.base_env import BaseEnv
from maze.core.env.maze_env import ActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.env.observation_conversion import ObservationType
from maze.core.env.structured_env import ActorID
from maze.evaluation.comparison import Comparison, PlayedEpisodes
from maze_envs.logistics.cutting_2d.agents.greedy_policy import GreedyPolicy

KPI = "raw_piece_usage_per_step"
N_STEPS, N_EPISODES, N_CHOICES = 50, 50, 200
DEMAND = {"_target_": "uniform", "raw_piece_size": [100, 100]}
SHARE_OF_SLIPS = 0.1


class SlipperyGreedyPolicy(GreedyPolicy):
    """Acts as the greedy policy, but now and then cuts from the largest piece.

    :param share: How often.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.rng = np.random.default_rng(0)

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def compute_action(
        self,
        observation: ObservationType,
        maze_state: MazeStateType | None = None,
        env: BaseEnv | None = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> ActionType:
        if self.rng.random() < self.share:
            pieces = np.asarray(observation["inventory"])
            largest = pieces.prod(axis=1).argmax()
            observation = {**observation, "inventory": np.where(np.arange(len(pieces))[:, None] == largest, pieces, 0)}
        return super().compute_action(observation, maze_state, env, actor_id, deterministic)


def pool(n_episodes: int, policies: Mapping[str, Policy]) -> list[PlayedEpisodes]:
    """What policies reach in the same episodes.

    :param n_episodes: How many.
    :param policies: By name.
    """
    from maze.core.utils.config_utils import read_hydra_config
    from maze.evaluation.runners import ComparisonRunner

    runner = ComparisonRunner(dict(policies), n_episodes, max_episode_steps=N_STEPS)
    cfg = read_hydra_config("maze.conf", "conf_compare", env="cutting_2d")
    cfg.env.core_env.demand_generator = DEMAND
    cfg.seeding.env_base_seed, cfg.seeding.agent_base_seed = 1234, 4321
    runner.setup(cfg)
    previous = Path.cwd()
    with TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            runner.run()
        finally:
            os.chdir(previous)
    assert runner.comparison is not None
    return list(runner.comparison.played)


def is_told_apart(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    """Whether the interval of the difference leaves out 0."""
    comparison = Comparison([PlayedEpisodes("a", {KPI: ours[None]}), PlayedEpisodes("b", {KPI: theirs[None]})])
    return comparison.is_significant(comparison.table[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    policies = {"greedy": GreedyPolicy(), "slippery": SlipperyGreedyPolicy(SHARE_OF_SLIPS)}
    played = pool(100 if options.quick else 400, policies)
    greedy, slippery = (each.measures[KPI][0] for each in played)
    rng = np.random.default_rng(0)
    common = separate = 0
    for _ in range(N_CHOICES):
        ours, theirs = (rng.choice(len(greedy), N_EPISODES, replace=False) for _ in range(2))
        common += is_told_apart(greedy[ours], slippery[ours])
        separate += is_told_apart(greedy[ours], slippery[theirs])
    results = {
        "difference": float(slippery.mean() / greedy.mean() - 1),
        "spread_of_episodes": float(greedy.std() / greedy.mean()),
        "correlation": float(np.corrcoef(greedy, slippery)[0, 1]),
        "told_apart_in_common_episodes": common / N_CHOICES,
        "told_apart_in_separate_episodes": separate / N_CHOICES,
    }
    print(f"{N_EPISODES} episodes of {N_STEPS} steps, {KPI}")
    for name, value in results.items():
        print(f"{name:<32} {value:.1%}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
