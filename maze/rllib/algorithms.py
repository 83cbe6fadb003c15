"""Supported algorithms of RLlib and their hyperparameters."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maze.core.errors import ConfigError, did_you_mean, first_line, install_command

SET_BY_RUNNER: Mapping[str, str] = {
    "num_env_runners": "runner.num_workers",
    "num_rollout_workers": "runner.num_workers",
    "num_workers": "runner.num_workers",
    "seed": "seeding.agent_base_seed and seeding.env_base_seed",
    "env": "env",
    "env_config": "env",
    "observation_space": "env and wrappers",
    "action_space": "env and wrappers",
    "model": "the group model (model=rllib for RLlib's own)",
    "log_level": "runner.log_level",
}
"""Keys of RLlib that are not allowed in `algorithm.config`, and the keys of Maze that replace them."""

_ALIASES: Mapping[str, str] = {"lambda": "lambda_"}
_SETTABLE_PROPERTIES = ("train_batch_size_per_learner",)


@dataclass(frozen=True)
class RLlibAlgorithm:
    """An algorithm of RLlib.

    :param name: RLlib's name.
    :param package: Module of its configuration class.
    :param needs_single_action: Whether it needs a single `Discrete` or `Box` action, not a dictionary.
    """

    name: str
    package: str
    needs_single_action: bool = False

    def new_config(self) -> Any:
        """Return RLlib's configuration of the algorithm with its defaults."""
        return getattr(importlib.import_module(self.package), f"{self.name}Config")()


_SUPPORTED = (
    RLlibAlgorithm("PPO", "ray.rllib.algorithms.ppo"),
    RLlibAlgorithm("APPO", "ray.rllib.algorithms.appo"),
    RLlibAlgorithm("IMPALA", "ray.rllib.algorithms.impala"),
    RLlibAlgorithm("DQN", "ray.rllib.algorithms.dqn", needs_single_action=True),
    RLlibAlgorithm("SAC", "ray.rllib.algorithms.sac", needs_single_action=True),
)
ALGORITHMS: Mapping[str, RLlibAlgorithm] = {algorithm.name: algorithm for algorithm in _SUPPORTED}

_OPTIONS = ", ".join(name.lower() for name in ALGORITHMS)


def find_algorithm(name: Any) -> RLlibAlgorithm:
    """Return the algorithm with a name; Ray is not needed.

    :raises ConfigError: It is not supported; lists the supported ones.
    """
    for known in ALGORITHMS.values():
        if known.name.lower() == str(name).lower():
            return known
    raise ConfigError(
        f"algorithm.algorithm: {name!r} is no supported algorithm of RLlib."
        f"{did_you_mean(str(name), ALGORITHMS)} Choose one with rllib/algorithm=<option>. Options: {_OPTIONS}."
    )


def require_ray() -> None:
    """Raise a `ConfigError` that names the extra if Ray or a package that RLlib needs is not installed."""
    try:
        importlib.import_module("ray.rllib.algorithms.algorithm_config")
    except ImportError as error:
        raise ConfigError(
            f"-cn conf_rllib: RLlib cannot be imported ({error}). It comes with an extra: {install_command('rllib')}"
        ) from error


def configured(algorithm: RLlibAlgorithm, values: Mapping[str, Any]) -> Any:
    """Return RLlib's configuration with the hyperparameters of `algorithm.config`.

    :param values: Hyperparameters by RLlib's names; missing ones keep RLlib's defaults.
    :raises ConfigError: RLlib has no such hyperparameter, or does not accept its value.
    """
    config = algorithm.new_config()
    known = known_hyperparameters(config)
    accepted = {}
    for key, value in values.items():
        where = f"algorithm.config.{key}"
        if key in SET_BY_RUNNER:
            raise ConfigError(f"{where}: set {SET_BY_RUNNER[key]} instead.")
        name = _ALIASES.get(key, key)
        if name not in known:
            raise ConfigError(
                f"{where}: {algorithm.name} of RLlib has no such hyperparameter.{did_you_mean(key, known)} "
                f"All of them: python -c 'from {algorithm.package} import {algorithm.name}Config as c; "
                "print(*sorted(vars(c())))'"
            )
        accepted[name] = value
    for name, value in accepted.items():
        _set(config, name, value)
    return config


def _set(config: Any, name: str, value: Any) -> None:
    try:
        config.update_from_dict({name: value})
    except Exception as error:  # RLlib's checks raise any type
        raise ConfigError(f"algorithm.config.{name}: RLlib does not accept {value!r}: {first_line(error)}") from error


def known_hyperparameters(config: Any) -> list[str]:
    """Return the names of all settings of a configuration of RLlib."""
    removed = -1  # RLlib's marker of deprecated settings, which are no valid defaults of others
    own = [name for name, value in vars(config).items() if not name.startswith("_") and value is not removed]
    return sorted([*own, *_SETTABLE_PROPERTIES])


def validated(config: Any) -> Any:
    """Return the configuration after RLlib's checks.

    :raises ConfigError: A check fails.
    """
    try:
        config.validate()
    except Exception as error:
        raise ConfigError(f"algorithm.config: RLlib does not accept this configuration: {error}") from error
    return config
