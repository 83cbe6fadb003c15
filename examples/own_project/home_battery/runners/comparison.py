"""Compares policies on the same days."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.utils.config_utils import read_config
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.runner import Runner

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class ComparisonRunner(Runner):
    """Plays the same episodes with several policies, prints their KPIs side by side and writes them into a file.

    The policy of the training in `input_dir`, if there is one, takes part.

    :param policies: Configurations of the policies by name.
    :param n_episodes: Number of episodes.
    :param file: Where the table is written, in the directory of the run.
    """

    policies: Mapping[str, Any]
    n_episodes: int = 5
    file: str = "comparison.csv"
    table: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.n_episodes < 1:
            raise ConfigError(f"runner.n_episodes: expected at least 1, got {self.n_episodes}.")

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        seeding = cfg.seeding
        self.maze_seeding = MazeSeeding(seeding.env_base_seed, seeding.agent_base_seed, seeding.cudnn_determinism_flag)
        self._policies = dict(self.policies)
        if cfg.input_dir:
            self._policies["trained"] = trained_policy(Path(cfg.input_dir))
        self._seeds = [
            (self.maze_seeding.generate_env_instance_seed(), self.maze_seeding.generate_agent_instance_seed())
            for _ in range(self.n_episodes)
        ]

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        self.table = [{"policy": name, **self._play(policy)} for name, policy in self._policies.items()]
        with Path(self.file).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(self.table[0]))
            writer.writeheader()
            writer.writerows(self.table)
        for row in self.table:
            print("  ".join(f"{key}: {value:.2f}" if isinstance(value, float) else value for key, value in row.items()))

    def _play(self, policy: Any) -> dict[str, float]:
        env, agent = RolloutRunner.init_env_and_agent(
            self._cfg.env, self._cfg.wrappers, 0, policy, input_dir=self._cfg.input_dir
        )
        env = LogStatsWrapper.wrap(env)
        RolloutRunner.run_interaction_loop(env, agent, self.n_episodes, episode_seeds=self._seeds, deterministic=True)
        env.write_epoch_stats()
        stats = env.get_stats(LogStatsLevel.EPOCH).last_stats
        env.close()
        return {
            str(key.group[0]): float(value)
            for key, value in stats.items()
            if key.event is BaseEnvEvents.kpi and key.output_name == "mean" and key.group
        }


def trained_policy(directory: Path) -> dict[str, Any]:
    """Configuration of the policy that a training has left behind.

    :param directory: The directory of the training.
    """
    return {
        "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
        "model": read_config(directory / "hydra_config.yaml")["model"],
        "state_dict_file": "state_dict.pt",
        "spaces_dict_file": "spaces_config.pkl",
        "device": "cpu",
    }
