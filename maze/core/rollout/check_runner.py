"""Check an environment from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.errors import EnvironmentContractError
from maze.core.utils.config_utils import EnvFactory
from maze.core.utils.seeding import MazeSeeding
from maze.runner import Runner
from maze.utils.check_env import check_env

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class CheckRunner(Runner):
    """Check the configured environment with its wrappers and print the findings.

    :param n_steps: Sub-steps to take.
    :param masks: Action head of each mask, where sizes are ambiguous.
    """

    n_steps: int = 200
    masks: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._env_factory: EnvFactory | None = None

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self.maze_seeding = MazeSeeding.configured(cfg.get("seeding"))
        self._env_factory = EnvFactory(cfg.env, cfg.get("wrappers") or {})

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        """Print the report; findings end the command with an error."""
        assert self._env_factory is not None
        seed = self.maze_seeding.generate_env_instance_seed()
        report = check_env(self._env_factory, self.n_steps, seed, self.masks)
        if report.findings:
            raise EnvironmentContractError(str(report))
        print(report, flush=True)
