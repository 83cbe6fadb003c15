"""Supported algorithms of RLlib, their hyperparameters, and stop conditions of a run; Ray is not imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maze.core.errors import ConfigError, did_you_mean, first_line, optional_package, unknown_key_error
from maze.core.utils.config_utils import CheckedConfig, Natural, number

SET_BY_RUNNER: Mapping[str, str] = {
    "num_env_runners": "runner.num_workers",
    "seed": "seeding.agent_base_seed and seeding.env_base_seed",
    "env": "env",
    "env_config": "env",
    "observation_space": "env and wrappers",
    "action_space": "env and wrappers",
    "model": "the group model (model=rllib for RLlib's own)",
    "log_level": "runner.log_level",
}
"""Keys of RLlib that are not allowed in `algorithm.config`, and the keys of Maze that replace them."""


ALGORITHMS = ("PPO", "APPO", "IMPALA", "DQN", "SAC")
"""The supported algorithms, by RLlib's names."""
NEED_SINGLE_ACTION = ("DQN", "SAC")
"""Algorithms that need a single `Discrete` or `Box` action, not a dictionary."""


def find_algorithm(name: Any) -> str:
    """Return RLlib's name of an algorithm; Ray is not needed.

    :raises ConfigError: It is not supported; lists the supported ones.
    """
    if str(name).upper() not in ALGORITHMS:
        raise unknown_key_error("algorithm.algorithm", str(name), ALGORITHMS)
    return str(name).upper()


def require_ray() -> None:
    """Raise a `ConfigError` that names the extra if Ray or a package that RLlib needs is not installed."""
    optional_package("ray.rllib.algorithms.algorithm_config", "rllib", "-cn conf_rllib: RLlib cannot be imported")


def configured(algorithm: str, values: Mapping[str, Any]) -> Any:
    """Return RLlib's configuration with the hyperparameters of `algorithm.config`.

    :param algorithm: RLlib's name of the algorithm.
    :param values: Hyperparameters by RLlib's names; missing ones keep RLlib's defaults.
    :raises ConfigError: RLlib has no such hyperparameter, or does not accept its value.
    """
    module = importlib.import_module(f"ray.rllib.algorithms.{algorithm.lower()}")
    config = getattr(module, f"{algorithm}Config")()
    known = known_hyperparameters(config)
    for key, value in values.items():
        where = f"algorithm.config.{key}"
        if key in SET_BY_RUNNER:
            raise ConfigError(f"{where}: set {SET_BY_RUNNER[key]} instead.")
        if key not in known:
            raise ConfigError(f"{where}: {algorithm} has no such hyperparameter.{did_you_mean(key, known)}")
        try:
            config.update_from_dict({key: value})
        except Exception as error:  # RLlib's checks raise any type
            raise ConfigError(f"{where}: RLlib does not accept {value!r}: {first_line(error)}") from error
    return config


def known_hyperparameters(config: Any) -> list[str]:
    """Return the names of all settings of a configuration of RLlib."""
    removed = -1  # RLlib's marker of deprecated settings, which are not valid defaults of others
    own = [name for name, value in vars(config).items() if not name.startswith("_") and value is not removed]
    return [*own, "train_batch_size_per_learner"]


def is_number(value: Any) -> bool:
    """Return whether a value is a single number, which includes arrays without dimensions."""
    if isinstance(value, bool | np.bool_):
        return False
    return isinstance(value, int | float | np.number) or (isinstance(value, np.ndarray) and value.shape == ())


def value_at(result: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a path of a result, such as `env_runners/episode_return_mean`; `None`: there is none."""
    found: Any = result
    for part in path.split("/"):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return float(found) if is_number(found) else None


RETURN, STEPS = "env_runners/episode_return_mean", "env_runners/num_env_steps_sampled_lifetime"
"""Paths of the mean return of training episodes, and of the environment steps so far, in a result."""
_SHORT_NAMES = {"episode_return_mean": RETURN, "timesteps_total": STEPS}


@dataclass
class TuneParameters(CheckedConfig):
    """The settings of Ray Tune that a single run needs.

    :param stop: The run stops when one of these values of a result is reached: `training_iteration`,
        `timesteps_total`, `time_total_s`, `episode_return_mean` or any path such as
        `env_runners/episode_len_mean`. Empty: only an interrupt stops it.
    :param checkpoint_freq: Number of iterations between checkpoints of Ray; 0: only at the end.
    """

    section = "runner.tune_config"

    stop: Mapping[str, float] = field(default_factory=dict)
    checkpoint_freq: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        stop: Mapping[str, float | None] = self.stop or {}
        self.stop = {key: value for key, value in stop.items() if value is not None}
        for key, value in self.stop.items():
            number(f"{self.section}.stop.{key}", value, infinite=True)

    def reason_to_stop(self, result: Mapping[str, Any], iteration: int) -> str:
        """Return the stop condition that holds, or an empty text.

        :param result: Result of an iteration.
        :param iteration: Number of the iteration.
        :raises ConfigError: A condition names an unknown value.
        """
        for name, limit in self.stop.items():
            value = iteration if name == "training_iteration" else value_at(result, _SHORT_NAMES.get(name, name))
            if value is None and name not in _SHORT_NAMES:
                available = [*_SHORT_NAMES, *(key for key in result if value_at(result, key) is not None)]
                raise unknown_key_error(f"{self.section}.stop.{name}: number of RLlib", name, available)
            if value is not None and value >= limit:
                return f"{name} has reached {limit:g}"
        return ""
