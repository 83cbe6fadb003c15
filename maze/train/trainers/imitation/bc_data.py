"""What behavioural cloning learns from: loading a data set, and what of it is kept for validation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, random_split

from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.minari_data import PREFIX
from maze.core.utils.factory import ConfigType, Factory, plain_container
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper

if TYPE_CHECKING:
    from maze.train.trainers.imitation.bc_algorithm_config import BCAlgorithmConfig

logger = logging.getLogger(__name__)

MIN_TRAJECTORIES_TO_SEPARATE = 10
"""From this number of episodes on, training and validation data have no episode in common."""


def load_dataset(config: ConfigType, env_factory: Callable[[], Any] | None) -> Any:
    """The data set; relative paths are those of where the command was started.

    :param config: The data set or its configuration.
    :param env_factory: Makes an environment that converts states and actions.
    :raises ConfigError: There is none, or it cannot be loaded.
    """
    config = plain_container(config, "runner.dataset")
    if config is None:
        raise ConfigError("runner.dataset: expected the configuration of a data set, found nothing.")
    if isinstance(config, dict):
        config = {
            key: _from_working_directory(value) if key in ("input_data", "dir_or_file") else value
            for key, value in config.items()
        }
    return Factory(Dataset).instantiate(config, config_path="runner.dataset", conversion_env_factory=env_factory)


def split_dataset(dataset: Any, config: BCAlgorithmConfig, next_seed: Callable[[], int]) -> tuple[Any, Any]:
    """Training and validation data: whole episodes where there are enough of them, else single steps.

    Of a handful of episodes, half would show too little of the task to learn it.

    :param dataset: All data.
    :param config: How much is kept, and of what.
    :param next_seed: Gives the seed of the choice.
    """
    n_validation = round(len(dataset) * config.validation_percentage / 100)
    if n_validation == 0:
        return dataset, []
    generator = torch.Generator()
    generator.manual_seed(next_seed())
    lengths = [len(dataset) - n_validation, n_validation]
    n_trajectories = len(getattr(dataset, "trajectory_references", ()))
    is_few = config.validation_split == "auto" and n_trajectories < MIN_TRAJECTORIES_TO_SEPARATE
    if config.validation_split != "steps" and not is_few:
        training, validation = dataset.random_split(lengths, generator=generator)
        return training, validation
    if is_few:
        logger.info(
            "Validation steps come from the episodes that are trained on, as there are only %d; accuracy on new "
            "episodes may be lower (`algorithm.validation_split=episodes` measures it).",
            n_trajectories,
        )
    training, validation = random_split(dataset, lengths, generator)
    return training, validation


class TimeLimitedEnvFactory:
    """Makes environments whose episodes are cut off.

    :param env_factory: Makes one environment.
    :param max_episode_steps: Number of steps.
    """

    def __init__(self, env_factory: Callable[[], Any], max_episode_steps: int) -> None:
        self.env_factory = env_factory
        self.max_episode_steps = max_episode_steps

    def __call__(self) -> Any:
        return TimeLimitWrapper.wrap(self.env_factory(), max_episode_steps=self.max_episode_steps)


def _from_working_directory(path: Any) -> Any:
    """Relative paths, one or a list, as seen from where the command was started; runs work in their own directories."""
    if isinstance(path, list):
        return [_from_working_directory(each) for each in path]
    if not isinstance(path, str) or path.startswith(PREFIX) or Path(path).exists():
        return path
    from hydra.core.hydra_config import HydraConfig

    return str(Path(HydraConfig.get().runtime.cwd) / path) if HydraConfig.initialized() else path
